"""vLLM's secondary tier on a real node, driven as vLLM's tiering manager does it. Runs where vLLM is
installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.kvpool.clients import until
from tests.support.kvpool.local_node import LocalNode

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here (see docs/vllm.md)"
)
CHUNK_BYTES = 24 * 1024
ROWS = 8


def config(**more: Any) -> Any:
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True)
    made = OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer",), 0),),
        worker_kv_bytes_per_block=CHUNK_BYTES,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="e",
        model=OffloadingModelConfig("org/m", "float16"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=parallel,
        kv_cache_layout="NHD",
    )
    return replace(made, **more)


class Engine:
    """A scheduler's side: its memory, and its steps."""

    def __init__(self, node: LocalNode, **given: Any) -> None:
        from vllm.v1.kv_offload.base import OffloadingSpec
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        class Spec(OffloadingSpec):  # type: ignore[misc]
            def get_manager(self) -> Any: ...
            def get_worker(self, kv_caches: Any) -> Any: ...

        pool = {"nodes": [{"node": node.config.name, "address": node.address}], "retry_after_s": 0.02}
        entry = {"type": "PdserveTier", "module_path": "pdserve.integrations.vllm", "pool": pool}
        self.memory = np.zeros((ROWS, CHUNK_BYTES), np.uint8)
        self.tier = SecondaryTierFactory.create_secondary_tier(
            entry, memoryview(self.memory), Spec(config(**given))
        )
        self._job = 0

    def look_up(self, keys: list[bytes]) -> list[str]:
        from vllm.v1.kv_offload.base import LookupResult, ReqContext

        request = ReqContext(req_id="r")
        self.tier.on_new_request(request)
        self.tier.on_schedule_end(None)

        def is_known() -> bool:
            found = [self.tier.lookup(key, request) for key in keys]
            self.tier.on_schedule_end(None)
            return LookupResult.RETRY not in found

        until(is_known)
        found = [self.tier.lookup(key, request).name for key in keys]
        self.tier.on_request_finished(request)
        return found

    def move(self, keys: list[bytes], rows: list[int], *, is_load: bool) -> Any:
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.base import TransferJob

        self._job += 1
        job = TransferJob(self._job, keys, np.array(rows), is_load, ReqContext(req_id="r"))
        (self.tier.submit_load if is_load else self.tier.submit_store)(job)
        assert self.tier.has_pending_work()
        self.tier.drain_jobs()
        [result] = self.tier.get_finished_jobs()
        assert result.job_id == self._job
        assert not self.tier.has_pending_work()
        return result


Start = Callable[..., Engine]


@pytest.fixture
def engine(node: LocalNode) -> Iterator[Start]:
    made: list[Engine] = []

    def make(**given: Any) -> Engine:
        made.append(Engine(node, **given))
        return made[-1]

    yield make
    for one in made:
        one.tier.shutdown()


def key(number: int, group: int = 0) -> bytes:
    from vllm.v1.kv_offload.base import make_offload_key

    return bytes(make_offload_key(number.to_bytes(32, "big"), group))


def test_chunks_of_one_engine_are_loaded_by_another(engine: Start) -> None:
    first = engine()
    first.memory[:] = np.random.default_rng(1).integers(0, 256, first.memory.shape, np.uint8)
    keys = [key(number) for number in range(3)]
    stored = first.move(keys, [5, 0, 2], is_load=False)
    assert stored.success
    assert stored.transfer_bytes == 3 * CHUNK_BYTES
    second = engine()
    assert second.look_up([*keys, key(9), key(0, group=1)]) == ["HIT"] * 3 + ["MISS"] * 2
    assert second.move(keys, [1, 2, 3], is_load=True).success
    assert np.array_equal(second.memory[[1, 2, 3]], first.memory[[5, 0, 2]])


def test_what_is_missing_is_named_and_a_miss_from_then_on(engine: Start) -> None:
    one = engine()
    one.move([key(1)], [0], is_load=False)
    result = one.move([key(1), key(2)], [1, 2], is_load=True)
    assert not result.success
    assert result.successful_keys == (key(1),)
    assert one.look_up([key(2)]) == ["MISS"]


@pytest.mark.parametrize("name", ["model", "kv_cache_layout"])
def test_other_models_and_layouts_share_nothing(engine: Start, name: str) -> None:
    from vllm.v1.kv_offload.config import OffloadingModelConfig

    engine().move([key(1)], [0], is_load=False)
    other = {"model": OffloadingModelConfig("org/m", "bfloat16"), "kv_cache_layout": "HND"}[name]
    assert engine(**{name: other}).look_up([key(1)]) == ["MISS"]


def test_a_pool_that_is_away_costs_misses(engine: Start, node: LocalNode) -> None:
    one = engine()
    one.move([key(1)], [0], is_load=False)
    node.kill()
    assert one.look_up([key(1)]) == ["MISS"]
    assert not one.move([key(1)], [1], is_load=True).success
    assert not one.move([key(2)], [1], is_load=False).success


def test_the_schedulers_thread_never_waits(engine: Start, node: LocalNode, tmp_path: Path) -> None:
    """A look-up that has not been answered says so."""
    from vllm.v1.kv_offload.base import LookupResult, ReqContext

    assert engine().tier.lookup(key(1), ReqContext(req_id="r")) is LookupResult.RETRY
