"""SGLang's own tests of its API, its *kits*, against any server.

    python -m tests.support.sglang_kits http://HOST:PORT MODEL DIRECTORY

MODEL is the served name, DIRECTORY the model's. Prints one JSON object: what each test ended with, "passed",
or its error. They run in a process of their own, because the kits import SGLang.

Left out are kits of operators' endpoints, which the router does not offer (`/abort_request` for all,
`/pause_generation`), those that start servers, and those that measure a trained model's answers.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import unittest
from contextlib import redirect_stdout
from types import ModuleType
from typing import Any, Final

PASSED: Final = "passed"
LONGEST_ERROR: Final = 500
KITS: Final = {
    "anthropic_messages_kit": "AnthropicMessagesMixin",
    "basic_api_contract_kit": "BasicAPIContractMixin",
    "basic_decode_correctness_kit": "BasicDecodeCorrectnessMixin",
    "basic_scheduler_stress_kit": "BasicSchedulerStressMixin",
    "ebnf_constrained_kit": "EBNFConstrainedMixin",
    "json_constrained_kit": "JSONConstrainedMixin",
    "json_mode_kit": "JSONModeMixin",
    "matched_stop_kit": "MatchedStopMixin",
    "regex_constrained_kit": "RegexConstrainedMixin",
    "spec_server_kits": "SpecLogprobKit",
}
"""Modules of `sglang.test.kits`, and their classes."""
LEFT_OUT: Final = {
    "test_leak_logprob_concurrent",
    "test_stress_concurrent_sessions",
    "test_first_mid_abort_recovery",
    "test_nth_mid_abort_recovery",
}
"""They look for leaks in an engine, for minutes; or need an operator's endpoint."""


def outcomes(url: str, model: str, directory: str, timeout_s: float) -> dict[str, str]:
    """What each test of the kits ends with at a server. Raises subprocess.SubprocessError."""
    command = [sys.executable, "-m", __name__, url, model, directory]
    run = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=timeout_s)
    found: dict[str, str] = json.loads(run.stdout)
    return found


class _Outcomes(unittest.TestResult):
    """How each test ended, by the names of its kit and itself."""

    def outcomes(self, suite: unittest.TestSuite) -> dict[str, str]:
        """Run the tests. The last line of a failed one's traceback says why."""
        names = [_name(test) for test in suite if isinstance(test, unittest.TestCase)]
        suite.run(self)
        found = dict.fromkeys(names, PASSED)
        for test, text in [*self.failures, *self.errors]:
            test = getattr(test, "test_case", test)  # of a part of a test
            found[_name(test)] = text.strip().splitlines()[-1][:LONGEST_ERROR]
        return found | {_name(test): f"skipped: {why}" for test, why in self.skipped}


def _name(test: unittest.TestCase) -> str:
    return f"{type(test).__name__}.{test.id().rpartition('.')[2]}"


class _Process:
    """In place of the server's process, which the kits look at after a test."""

    def poll(self) -> None:
        """It runs: a server that does not fails the next test."""


def main(url: str, model: str, directory: str) -> int:
    import openai
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    what: dict[str, Any] = {
        "base_url": url,
        "api_key": "unused",
        "model": model,
        "served_model_name": model,
        "client": openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0),
        "tokenizer": get_tokenizer(directory),
        "process": _Process(),
    }
    if (
        importlib.util.find_spec("datasets") is None
    ):  # SGLang's benchmarks need it; the kits import these, and use none
        sys.modules["datasets"] = unused = ModuleType("datasets")
        unused.__dict__["load_dataset"] = None
    suite = unittest.TestSuite()
    for module, name in KITS.items():
        mixin = getattr(importlib.import_module(f"sglang.test.kits.{module}"), name)
        kit = type(name, (mixin, unittest.TestCase), what)
        names = unittest.defaultTestLoader.getTestCaseNames(kit)
        suite.addTests(kit(test) for test in names if test not in LEFT_OUT)
    with redirect_stdout(sys.stderr):
        found = _Outcomes().outcomes(suite)
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
