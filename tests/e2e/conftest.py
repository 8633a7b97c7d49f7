"""Shared real processes. At most four SGLang servers run at a time: first those that stand alone, all
started at the same moment, then the cluster's, whose tests come last (tests/conftest.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pdserve.engine.demo.model import make_demo_model
from tests.support.e2e.cluster import PoolNode, Router, Worker
from tests.support.e2e.prompts import NEW_TOKENS, Answer, first_turns, second_turn
from tests.support.kvpool.etcd_server import EtcdServer


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


@dataclass
class Alone:
    """Workers that are not of one cluster, and the pool nodes of some, by name. They start together: the
    start of one keeps one core busy, with imports most of all, and a small machine has two.
    """

    workers: dict[str, Worker]
    pools: dict[str, PoolNode]
    etcd: EtcdServer

    def start(self, wanted: set[str]) -> None:
        """The wanted workers, without waiting for them."""
        for pool in self.pools.values():
            pool.start()
        for name in wanted & self.workers.keys():
            self.workers[name].start()

    def stop(self) -> None:
        for one in (*self.workers.values(), *self.pools.values()):
            one.stop()
        self.etcd.kill()


@pytest.fixture(scope="session")
def alone(request: pytest.FixtureRequest, model: Path, run_dir: Path) -> Iterator[Alone]:
    """Started are the workers that collected tests ask for, by the names of the fixtures below."""
    peers = [f"unix:{run_dir}/ucxpool{i}.sock" for i in range(2)]
    more = {"cluster": {"peers": peers}}
    ssd = {"kind": "ssd", "path": run_dir / "ssd", "capacity_bytes": "512MiB", "write": "all"}
    pools = {
        "aggpool": PoolNode(run_dir, "aggpool", extra={"tiers": [ssd]}),
        **{name: PoolNode(run_dir, name, "128MiB", extra=more) for name in ("ucxpool0", "ucxpool1")},
    }
    etcd = EtcdServer(run_dir)
    registered = {"etcd": {"endpoints": [etcd.url]}}
    exact = engine_settings(model)
    other = engine_settings(model, dtype="bfloat16", layout="layer_first")
    shm = {"nodes": [pools["aggpool"].ref], "checksum": False}
    ucx = {"nodes": [pools[f"ucxpool{i}"].ref for i in range(2)], "data_path": "ucx", "checksum": False}
    file = engine_settings(model, layout="layer_first")
    pages = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(run_dir / "pages")}
    alone = Alone(
        {
            "plain_worker": Worker("agg", "plain", run_dir, exact, settings={"storage": "none"}),
            "agg_worker": Worker("agg", "agg", run_dir, exact, shm, settings=registered),
            "ucx_worker": Worker("agg", "agg-ucx", run_dir, other, ucx),
            "file_worker": Worker("agg", "agg-file", run_dir, file, settings={"storage": "file"}, env=pages),
        },
        pools,
        etcd,
    )
    try:
        alone.start({name for item in request.session.items for name in getattr(item, "fixturenames", ())})
        yield alone
    finally:
        alone.stop()


@pytest.fixture(scope="session")
def plain_worker(alone: Alone) -> Worker:
    """SGLang without HiCache and pool."""
    return alone.workers["plain_worker"].wait_ready()


@pytest.fixture(scope="session")
def agg_worker(alone: Alone) -> Worker:
    """Pages of float32 in the pool, over mapped memory, page_first_direct."""
    return alone.workers["agg_worker"].wait_ready()


@pytest.fixture(scope="session")
def ucx_worker(alone: Alone) -> Worker:
    """Pages of bfloat16 on two pool nodes, over UCX, layer_first."""
    return alone.workers["ucx_worker"].wait_ready()


@pytest.fixture(scope="session")
def file_worker(alone: Alone) -> Worker:
    """Pages of float32 in SGLang's own file backend, layer_first."""
    return alone.workers["file_worker"].wait_ready()


@pytest.fixture(scope="session")
def reference(plain_worker: Worker) -> Reference:
    """Computed cold: SGLang's cache is emptied before every prompt."""
    prompts = first_turns()
    first = ask_cold(plain_worker, prompts)
    second_prompts = [second_turn(p, a, i) for i, (p, a) in enumerate(zip(prompts, first, strict=True))]
    return Reference(prompts, first, second_prompts, ask_cold(plain_worker, second_prompts))


CHUNK_TOKENS = 512
PULL_AHEAD = {"pull_ahead_tokens": 2 * CHUNK_TOKENS}


@dataclass
class Cluster:
    """Two disaggregated pairs on one pool node, each pair behind its own router and both behind a third. The
    first pair computes prompts in chunks, and pulls long ones ahead.
    """

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
def cluster(model: Path, run_dir: Path, alone: Alone, reference: Reference) -> Iterator[Cluster]:
    """Started once for all tests; a test that kills the pool node starts it again."""
    alone.stop()
    pool = PoolNode(run_dir)
    pool.start()
    settings = {"nodes": [pool.ref], "retry_after_s": 0.2}
    chunked = engine_settings(model, extra_args=["--chunked-prefill-size", str(CHUNK_TOKENS)])
    prefill = [
        Worker("prefill", "prefill0", run_dir, chunked, settings),
        Worker("prefill", "prefill1", run_dir, engine_settings(model), settings),
    ]
    stepwise = {"pull_step_tokens": CHUNK_TOKENS}
    decode = [
        Worker("decode", f"decode{i}", run_dir, engine_settings(model), settings, stepwise) for i in range(2)
    ]
    pairs = [
        Router(run_dir, prefill=[prefill[0]], decode=[decode[0]], name="router-pair0", extra=PULL_AHEAD),
        Router(run_dir, prefill=[prefill[1]], decode=[decode[1]], name="router-pair1"),
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
