"""Programs of others against a router that knows its worker only by etcd: SGLang's own load generator,
unmodified, and the `openai` client, both with `x-user-id`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.e2e.cluster import Router, Worker
from tests.support.e2e.site import Site

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

MAIN = """
import json, sys
from sglang.bench_serving import cli_main
for argv in json.loads(sys.argv[1]):
    sys.argv = argv
    cli_main()
"""
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
LOADS: dict[str, dict[str, Any]] = {
    "sglang-oai": {
        "dataset-name": "random-ids",
        "num-prompts": 4,
        "random-input-len": 300,
        "random-output-len": 8,
        "random-range-ratio": 1,
    },
    "sglang-oai-chat": {
        "dataset-name": "generated-shared-prefix",
        "gsp-num-groups": 1,
        "gsp-prompts-per-group": 2,
        "gsp-system-prompt-len": 200,
        "gsp-question-len": 30,
        "gsp-output-len": 8,
        "gsp-num-turns": 2,
    },
}


@pytest.fixture(scope="module")
def router(site: Site, agg_worker: Worker, run_dir: Path) -> Iterator[Router]:
    with Router(run_dir, name="router-etcd", extra={"etcd": {"endpoints": [site.etcd.url]}}) as router:
        yield router


def test_a_worker_registers_itself_once_it_is_ready(site: Site, agg_worker: Worker, router: Router) -> None:
    assert site.etcd.keys("/pdserve/") == [f"/pdserve/pool/workers/agg/127.0.0.1:{agg_worker.port}"]
    body = {"model": "demo-tiny", "prompt": "found by etcd", "max_tokens": 1}
    answer = httpx.post(f"{router.url}/v1/completions", json=body, timeout=60.0, trust_env=False)
    assert answer.headers["x-pdserve-decode"] == f"127.0.0.1:{agg_worker.port}"


@pytest.mark.extended
def test_sglangs_own_load_generator_runs_against_the_router(
    router: Router, model: Path, tmp_path: Path
) -> None:
    for backend, outcome in run_generator(router.url, "demo-tiny", model, tmp_path).items():
        assert outcome["completed"] == len(outcome["ttfts"]) == 4, backend
        assert not any(outcome["errors"])
        assert min(outcome["ttfts"]) > 0
        assert outcome["output_lens"] == [8] * 4
        assert min(outcome["input_lens"]) > 200


def run_generator(url: str, name: str, model: Path, directory: Path) -> dict[str, dict[str, Any]]:
    """What `python -m sglang.bench_serving` measured, by backend. One process for all: to import it takes ten
    seconds.
    """
    runs = []
    for backend, load in LOADS.items():
        words = {
            "backend": backend,
            "base-url": url,
            "model": str(model),  # a name would be looked up on the web
            "served-model-name": name,
            "output-file": str(directory / backend),
            "header": f"x-user-id={backend}",
            **load,
        }
        flags = ["--disable-tqdm", "--output-details"]
        runs.append(["bench_serving", *flags, *(w for key, v in words.items() for w in (f"--{key}", str(v)))])
    if importlib.util.find_spec("datasets") is None:  # imported for a picture benchmark, else never used
        (directory / "datasets.py").write_text("load_dataset = None\n")
    done = subprocess.run(
        [sys.executable, "-c", MAIN, json.dumps(runs)],
        env={**os.environ, "PYTHONPATH": f"{directory}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return {backend: json.loads((directory / backend).read_text()) for backend in LOADS}


def test_the_user_named_in_a_header_keeps_to_a_worker(router: Router) -> None:
    plans = []
    for user in ("ada", "ada", "eve"):
        client = openai.OpenAI(
            base_url=f"{router.url}/v1", api_key="-", max_retries=0, default_headers={"x-user-id": user}
        )
        for stream in (True, False):
            with client.chat.completions.with_streaming_response.create(
                model="demo-tiny",
                messages=HELLO,
                max_tokens=2,
                stream=stream,
            ) as answer:
                answer.read()
                plans.append(answer.headers["x-pdserve-plan"].split(",")[0])
    assert plans == ["decode=rendezvous", *["decode=session"] * 3, "decode=rendezvous", "decode=session"]
