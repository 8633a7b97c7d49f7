"""What a worker says of itself, as the router reads it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from pdserve.engine.drain import Drain
from pdserve.engine.http.timing import WorkerMetrics
from pdserve.engine.sglang.engine import Engine
from pdserve.engine.worker import Worker, _info_router
from pdserve.pages import KvGeometry
from pdserve.router.fleet.worker import WorkerInfo, WorkerLoad

GEOMETRY = KvGeometry(
    model="m", dtype="half", kv_dtype="half", page_size="64", layout="l", tp_size="1", pp_size="1"
)


def rank(running: int, waiting: int, queued: int, used: int, total: int) -> Any:
    return SimpleNamespace(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_waiting_uncached_tokens=queued,
        num_used_tokens=used,
        max_total_num_tokens=total,
        max_running_requests=16,
    )


def manager(ranks: Any = (), *, deterministic: bool = False, status: str = "Up", orders: str = "") -> Any:
    return SimpleNamespace(
        served_model_name="m",
        model_config=SimpleNamespace(context_len=9, is_multimodal=False),
        mm_processor=None,
        is_generation=True,
        tokenizer=None,
        server_args=SimpleNamespace(
            chat_template=None,
            enable_deterministic_inference=deterministic,
            enable_priority_scheduling=bool(orders),
            schedule_low_priority_values_first=orders == "low_first",
        ),
        server_status=SimpleNamespace(value=status),
        lora_ref_cache={"b": None, "a": None},
        load_snapshot_reader=SimpleNamespace(read_all=lambda: list(ranks)),
    )


class Pool:
    """Nodes with what is wrong with each, or a pool client that is broken itself."""

    namespace = "ns"
    geometry = GEOMETRY.as_dict()

    def __init__(self, nodes: dict[str, Exception | None] | None = None) -> None:
        self._nodes = nodes

    async def check(self) -> dict[str, Exception | None]:
        if self._nodes is None:
            raise RuntimeError("the client is closed")
        return self._nodes


def ask(path: str, made: Any, pool: Pool | None = None, *, drains: bool = False) -> tuple[int, Any]:
    """A worker's answer where SGLang has made this tokenizer manager."""
    answer = TestClient(app_of(made, pool or Pool({"a": None}), drains=drains)).get(path)
    return answer.status_code, answer.json()


def app_of(made: Any, pool: Pool, *, drains: bool = False) -> FastAPI:
    drain = Drain(30.0, 3.0, set)
    if drains:
        drain.begin(0.0)
    engine = Engine(drain, WorkerMetrics())
    engine.tokenizer_manager = made
    identity: Any = SimpleNamespace(geometry=GEOMETRY, rank_suffixes=[b""], parts=[], pairs=False)
    config: Any = SimpleNamespace(engine=SimpleNamespace(model_path="m"), handoff="pool")
    reached: Any = pool
    metrics = WorkerMetrics()
    worker = Worker("agg", config, identity, engine, reached, drain, metrics)
    app = FastAPI()
    app.include_router(_info_router(worker))
    return app


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("orders", ["", "high_first", "low_first"])
def test_a_worker_says_whether_a_seed_counts_and_which_priorities_come_first(
    deterministic: bool, orders: str
) -> None:
    _, said = ask("/pd/info", manager(deterministic=deterministic, orders=orders))
    info = msgspec.convert(said, WorkerInfo)
    assert (info.deterministic, info.priorities) == (deterministic, orders or "none")


def test_the_load_of_all_ranks_is_what_the_router_reads() -> None:
    status, said = ask("/pd/ready", manager([rank(1, 2, 300, 40, 1000), rank(3, 0, 0, 1100, 1000)]))
    assert (status, said["ready"], said["draining"], said["pool"]) == (200, True, False, "up")
    assert msgspec.convert(said["load"], WorkerLoad) == WorkerLoad(4, 2, 300, 960, 32)


@pytest.mark.parametrize(
    ("made", "pool", "drains", "status", "said"),
    [
        (manager(), Pool({"a": None}), False, 200, (True, False, "up")),
        (manager(), Pool({"a": None, "b": OSError()}), False, 200, (True, False, "down")),
        (manager(), Pool({}), False, 200, (True, False, "down")),
        (manager(), Pool({"a": None}), True, 503, (False, True, "up")),
        (manager(status="Starting"), Pool({"a": None}), False, 503, (False, False, "up")),
        (None, Pool({"a": None}), False, 503, (False, False, "up")),
    ],
    ids=["up", "a node down", "no nodes", "draining", "starting", "nothing made yet"],
)
def test_readiness_is_sglangs_the_pools_and_the_drains(
    made: Any, pool: Pool, drains: bool, status: int, said: tuple[bool, bool, str]
) -> None:
    answered, body = ask("/pd/ready", made, pool, drains=drains)
    assert (answered, (body["ready"], body["draining"], body["pool"])) == (status, said)
    assert body["load"] is None
    assert "reason" not in body


def test_readiness_which_everybody_may_ask_names_no_namespace_but_says_when_the_process_is_another() -> None:
    """The namespace names the model and its files; `/pd/info` is for who has the token."""
    client = TestClient(app_of(manager(), Pool({"a": None})))
    said, info = client.get("/pd/ready").json(), client.get("/pd/info").json()
    assert "namespace" not in said
    assert info["namespace"] == "ns"
    assert said["info_tag"] == info["info_tag"]
    other = TestClient(app_of(manager(), Pool({"a": None}))).get("/pd/ready").json()
    assert other["info_tag"] != said["info_tag"], "of another process, whatever its namespace"


@pytest.mark.parametrize(
    ("made", "pool", "reason"),
    [
        (SimpleNamespace(), Pool({}), "AttributeError: 'types.SimpleNamespace' object has no attribute"),
        (manager([SimpleNamespace()]), Pool({}), "AttributeError"),
        (manager(), Pool(None), "RuntimeError: the client is closed"),
    ],
    ids=["SGLang changed", "its load changed", "the pool client fails"],
)
def test_readiness_that_cannot_be_told_says_why(made: Any, pool: Pool, reason: str) -> None:
    status, said = ask("/pd/ready", made, pool)
    assert (status, said["ready"], said["load"]) == (503, False, None)
    assert said["reason"].startswith(reason)
