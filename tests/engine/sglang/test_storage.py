"""What SGLang is told of the pool as its storage, and that SGLang takes it as meant."""

from __future__ import annotations

import json
import threading
from queue import Queue
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (
    HybridCacheController,
    PrefetchOperation,
    StorageOperation,
)
from sglang.srt.runtime_context import get_parallel

from pdserve.engine.sglang.storage import pool_storage
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.pages import KvGeometry

GEOMETRY = KvGeometry(
    model="m", dtype="d", kv_dtype="d", page_size="4", layout="page_first", tp_size="1", pp_size="1"
)


class TrialBackend(HiCacheStorage):  # type: ignore[misc]  # SGLang ships no types
    """Notes what SGLang calls; does nothing."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self.calls: list[tuple[str, list[str], list[int]]] = []

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        self.calls.append(("get", list(keys), host_indices.tolist()))
        return [True] * len(keys)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        self.calls.append(("set", list(keys), host_indices.tolist()))
        return [True] * len(keys)

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        return {one.name: self._noted("get", one) for one in transfers}

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        return {one.name: self._noted("set", one) for one in transfers}

    def _noted(self, way: str, one: PoolTransfer) -> list[bool]:
        keys, indices = one.keys or [], one.host_indices
        self.calls.append((f"{way} {one.name}", list(keys), [] if indices is None else indices.tolist()))
        return [True] * len(keys)

    def get(self, *_: Any, **__: Any) -> None: ...
    def batch_get(self, *_: Any, **__: Any) -> None: ...
    def set(self, *_: Any, **__: Any) -> bool:
        return False

    def batch_set(self, *_: Any, **__: Any) -> bool:
        return False

    def exists(self, key: str) -> bool:
        return False


def test_pages_move_by_the_zero_copy_methods_and_parts_beside_kv_after_them() -> None:
    """SGLang attaches a backend that notes its calls to a fake host pool, and moves one batch each way."""
    page_size = 4
    settings = {
        **pool_storage(PoolClientConfig(), "trial", GEOMETRY),
        "prefetch_threshold": page_size,
        "module_path": __name__,
        "class_name": TrialBackend.__name__,
    }
    controller = _controller(page_size)
    extra, threshold, *_ = controller.parse_storage_backend_extra_config(json.dumps(settings))
    with get_parallel().override(attn_dcp_size=1):
        controller.attach_storage_backend(
            "dynamic", prefetch_threshold=threshold, storage_backend_extra_config=extra
        )
    assert controller.page_get_func == controller._page_get_zero_copy
    assert controller.page_set_func == controller._page_set_zero_copy
    assert controller.prefetch_threshold == page_size
    keys = ["a", "b"]
    indices = torch.arange(len(keys) * page_size)
    last = indices[-page_size:]
    fetched = PrefetchOperation(SimpleNamespace(rid="rid"), [], pool_transfers=[_window(["?"], last)])
    fetched.hash_value, fetched.host_indices = keys, indices
    HybridCacheController._page_transfer_with_stable_layout(controller, fetched)
    stored = StorageOperation(indices, [], None, keys, pool_transfers=[_window(keys[1:], last)])
    HybridCacheController._page_backup_with_stable_layout(controller, stored)
    calls, kv, part = controller.storage_backend.calls, (keys, indices.tolist()), (keys[1:], last.tolist())
    assert calls == [("get", *kv), ("get swa", *part), ("set swa", *part), ("set", *kv)]
    assert stored.completed_tokens == len(indices), "written pages are taken as stored"


def _window(keys: list[str], indices: torch.Tensor) -> PoolTransfer:
    return PoolTransfer(PoolName.SWA, indices, keys=keys, hit_policy=PoolHitPolicy.TRAILING_PAGES)


def _controller(page_size: int) -> Any:
    """SGLang's cache controller as far as it moves pages, with a fake host pool and without threads."""
    pool = SimpleNamespace(page_size=page_size, layout="page_first", size=64, logical_size=64, entries=[])
    pool.entry_map = {}
    controller = object.__new__(HybridCacheController)
    controller.enable_storage = False
    controller.storage_stop_event = threading.Event()
    controller.prefetch_sync_queue = Queue()
    controller.storage_host_pool = controller.mem_pool_host = pool
    controller.host_memory_mode = "cache"
    controller.page_size = page_size
    controller.pp_group = controller.pp_prefetch_command_group = None
    controller._stop_storage_threads = controller._start_storage_threads = lambda: None
    controller._create_sync_groups = list
    controller._generate_storage_config = lambda _model, extra: SimpleNamespace(
        is_mla_model=False, tp_rank=0, is_storage_writer=True, extra_config=extra
    )
    return controller
