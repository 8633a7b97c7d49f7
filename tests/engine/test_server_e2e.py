"""Real SGLang in-process with the tiny demo model: pages come back from storage with the right answer,
clients' features work, and the process ends as it should. One server at a time, one per page layout.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdserve.engine.demo_model import make_demo_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

SERVER = """
import sys
from pdserve.engine.args import server_argv
from pdserve.engine.config import EngineConfig
from pdserve.engine.server import prepare_engine, serve, until_stopped
from pdserve.errors import PdserveError

def main():
    model, port, layout = sys.argv[1:]
    config = EngineConfig(
        model_path=model,
        port=int(port),
        layout=layout,
        dtype="float32",
        max_total_tokens=12000,
    )
    try:
        with until_stopped():
            device = prepare_engine(config)
            def add_route(app):
                app.add_api_route("/pd/hello", lambda: {"hello": "pd"})
            serve(server_argv(config, "agg", device, "file"), configure_app=add_route)
    except PdserveError as error:
        sys.exit(f"error: {error}")

if __name__ == "__main__":
    main()
"""


class Server:
    """One SGLang server in its own process."""

    def __init__(self, directory: Path, model: Path, layout: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        script = directory / "server.py"
        script.write_text(SERVER)
        self.log = directory / "server.log"
        environment = {**os.environ, "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(directory / "pages")}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(script), str(model), str(self.port), layout],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait_ready(self, timeout_s: float = 180.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            assert self.process.poll() is None, self.log.read_text()
            try:
                self.request("GET", "/ready")
                return
            except OSError:  # refused, or 503 while it warms up
                time.sleep(0.2)
        pytest.fail(f"not ready after {timeout_s} s: {self.log.read_text()}")

    def request(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"content-type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            text = response.read()
        return json.loads(text) if text[:1] in (b"{", b"[") else text

    def generate(
        self, input_ids: list[int], new_tokens: int = 24
    ) -> tuple[list[int], list[float], dict[str, Any]]:
        """Greedy output ids, their log-probabilities, and SGLang's count of cached tokens by source."""
        answer = self.request(
            "POST",
            "/generate",
            {
                "input_ids": input_ids,
                "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
                "return_logprob": True,
            },
        )
        meta = answer["meta_info"]
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        return answer["output_ids"], logprobs, meta.get("cached_tokens_details") or {}

    def flush(self) -> None:
        self.request("POST", "/flush_cache?timeout=10", {})

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_model("tiny", tmp_path_factory.mktemp("models") / "tiny").path


@pytest.fixture(scope="module", params=["page_first_direct", "layer_first"])
def server(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp(request.param), model, request.param)
    try:
        server.wait_ready()
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [
        [rng.randrange(300, 4000) for _ in range(length)] for length in (1, 63, 64, 65, 128, 129, 1000, 3000)
    ]


def test_pages_from_storage_give_the_same_answer(server: Server) -> None:
    cold = [server.generate(prompt) for prompt in prompts()]
    server.flush()
    for prompt, (ids, logprobs, _) in zip(prompts(), cold, strict=True):
        again_ids, again_logprobs, cached = server.generate(prompt)
        assert again_ids == ids
        assert again_logprobs == pytest.approx(logprobs, abs=1e-2)
        # the last token is always computed, so a prompt of whole pages computes its last page
        assert cached.get("storage", 0) == (len(prompt) - 1) // 64 * 64


def test_answers_vary_and_depend_on_early_tokens(server: Server) -> None:
    prompt = prompts()[-2]
    ids, _, _ = server.generate(prompt)
    changed, _, _ = server.generate([prompt[0], prompt[1] + 1, *prompt[2:]])
    assert len(set(ids)) > len(ids) // 2
    assert changed != ids


def test_added_route_answers(server: Server) -> None:
    assert server.request("GET", "/pd/hello") == {"hello": "pd"}


def test_chat_with_tools_schema_and_logprobs(server: Server) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "pick",
            "strict": True,  # else SGLang takes any JSON for the arguments
            "parameters": {
                "type": "object",
                "properties": {"colour": {"enum": ["red", "blue"]}},
                "required": ["colour"],
                "additionalProperties": False,
            },
        },
    }
    ask: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Pick one."}],
        "temperature": 0,
    }
    forced = {
        "tools": [tool],
        "tool_choice": {"type": "function", "function": {"name": "pick"}},
        "max_tokens": 64,
    }
    called = server.request("POST", "/v1/chat/completions", {**ask, **forced})["choices"][0]
    function = called["message"]["tool_calls"][0]["function"]
    assert function["name"] == "pick"
    assert json.loads(function["arguments"])["colour"] in ("red", "blue")

    schema = {"name": "choice", "schema": tool["function"]["parameters"]}
    fixed = {"response_format": {"type": "json_schema", "json_schema": schema}, "max_tokens": 64}
    content = server.request("POST", "/v1/chat/completions", {**ask, **fixed})["choices"][0]["message"][
        "content"
    ]
    assert json.loads(content)["colour"] in ("red", "blue")

    shown = {"logprobs": True, "top_logprobs": 2, "max_tokens": 4}
    answer = server.request("POST", "/v1/chat/completions", {**ask, **shown})
    assert [len(entry["top_logprobs"]) for entry in answer["choices"][0]["logprobs"]["content"]] == [2] * 4
    assert answer["usage"]["completion_tokens"] == 4


def test_last_the_server_ends_as_asked(server: Server, request: pytest.FixtureRequest) -> None:
    """Must stay the last test of a server: SIGTERM in the middle of a stream, or kill -9, by layout."""
    body = {"model": "tiny", "prompt": "Go on.", "max_tokens": 4000, "stream": True, "ignore_eos": True}
    call = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    stream = urllib.request.urlopen(call, timeout=60)
    assert stream.readline().startswith(b"data: ")
    reader = threading.Thread(target=_drain, args=(stream,))
    reader.start()
    children = server.children()
    assert len(children) >= 2
    hard = "layer_first" in request.node.name
    server.process.send_signal(signal.SIGKILL if hard else signal.SIGTERM)
    status = server.process.wait(timeout=10)
    reader.join(timeout=10)
    assert status == (-signal.SIGKILL if hard else 0), server.log.read_text()
    assert not reader.is_alive()
    _, alive = psutil.wait_procs(children, timeout=5)
    assert alive == []
    assert "Traceback" not in server.log.read_text()


def _drain(stream: Any) -> None:
    try:
        while stream.readline():
            pass
    except OSError:  # cut off in the middle of a chunk
        pass
