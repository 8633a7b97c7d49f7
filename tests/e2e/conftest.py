"""Shared real processes. At most four SGLang servers run at a time: every test file but those of the cluster
stops its own, and the cluster's tests come last (tests/conftest.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pdserve.engine.demo_model import make_demo_model
from tests.e2e.cluster import PoolNode, Router, Worker
from tests.e2e.prompts import NEW_TOKENS, Answer, first_turns, second_turn


def engine_settings(model: Path, **more: Any) -> dict[str, Any]:
    """Engine settings that every test worker shares; float32, since exact tokens are compared."""
    return {
        "model_path": model,
        "served_model_name": "demo-tiny",
        "dtype": "float32",
        "page_size": 64,
        "context_length": 4096,
        "max_total_tokens": 40000,
        "hicache_size_gb": 1,
        **more,
    }


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny demo model, made here."""
    directory = tmp_path_factory.mktemp("model") / "demo-tiny"
    make_demo_model("tiny", directory, seed=0)
    return directory


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configurations, logs, sockets; short, because a Unix socket's path holds 107 bytes."""
    return tmp_path_factory.mktemp("run")


@dataclass(frozen=True)
class Reference:
    """What plain SGLang, without HiCache and pool, answers."""

    prompts: list[list[int]]
    first: list[Answer]
    second_prompts: list[list[int]]
    second: list[Answer]


def ask_all(worker: Worker, prompts: list[list[int]]) -> list[Answer]:
    """Greedy answers one after the other, straight from a worker."""
    return [Answer.of(worker.generate(prompt, NEW_TOKENS)) for prompt in prompts]


def ask_cold(worker: Worker, prompts: list[list[int]]) -> list[Answer]:
    """The same, each computed whole."""
    answers = []
    for prompt in prompts:
        worker.flush()
        answers.append(Answer.of(worker.generate(prompt, NEW_TOKENS)))
    return answers


@pytest.fixture(scope="session")
def reference(model: Path, run_dir: Path) -> Reference:
    """Computed cold: SGLang's cache is emptied before every prompt."""
    plain = Worker("agg", "plain", run_dir, engine_settings(model), settings={"storage": "none"})
    try:
        plain.start().wait_ready()
        prompts = first_turns()
        first = ask_cold(plain, prompts)
        second_prompts = [second_turn(p, a, i) for i, (p, a) in enumerate(zip(prompts, first, strict=True))]
        return Reference(prompts, first, second_prompts, ask_cold(plain, second_prompts))
    finally:
        plain.stop()


@dataclass
class Cluster:
    """Two disaggregated pairs on one pool node, each pair behind its own router and both behind a third."""

    pool: PoolNode
    prefill: list[Worker]
    decode: list[Worker]
    pairs: list[Router]
    router: Router

    @property
    def workers(self) -> list[Worker]:
        return [*self.prefill, *self.decode]

    def flush(self) -> None:
        """Empty every worker's own caches."""
        for worker in self.workers:
            worker.flush()


@pytest.fixture(scope="session")
def cluster(model: Path, run_dir: Path, reference: Reference) -> Iterator[Cluster]:
    """Started once for all tests; a test that kills the pool node starts it again."""
    pool = PoolNode(run_dir)
    pool.start()
    settings = {"nodes": [pool.ref], "retry_after_s": 0.2}
    prefill = [Worker("prefill", f"prefill{i}", run_dir, engine_settings(model), settings) for i in range(2)]
    decode = [Worker("decode", f"decode{i}", run_dir, engine_settings(model), settings) for i in range(2)]
    pairs = [
        Router(run_dir, prefill=[prefill[i]], decode=[decode[i]], name=f"router-pair{i}") for i in range(2)
    ]
    router = Router(run_dir, prefill=prefill, decode=decode, name="router-all")
    started = [*prefill, *decode]
    try:
        for worker in started:
            worker.start()
        for worker in started:
            worker.wait_ready()
        for one in [*pairs, router]:
            one.start()
        yield Cluster(pool, prefill, decode, pairs, router)
    finally:
        for one in [*pairs, router, *started, pool]:
            one.stop()
