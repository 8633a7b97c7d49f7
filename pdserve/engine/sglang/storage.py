"""The pool as SGLang's `dynamic` storage backend: its settings, and a trial that SGLang takes them as meant.

SGLang calls a backend's zero-copy methods (interface v1) only where its extra config asks for them.
Otherwise every page would be copied through Python, or no page would be found. In the trial SGLang attaches a
backend that notes its calls to a fake host pool, and moves one batch of pages each way. A part beside KV goes
with it by interface v2: it is read after KV, for the last pages that came, and is written before.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import threading
from queue import Queue
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import torch
from msgspec.structs import replace
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (
    HybridCacheController,
    PrefetchOperation,
    StorageOperation,
)
from sglang.srt.runtime_context import get_parallel

from pdserve.engine.sglang.children.ssd_tokens import SsdTokens
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.kvpool.hicache.ssd_pages import came_from_ssd
from pdserve.pages import KvGeometry
from pdserve.security.tokens import withhold_secret
from pdserve.sglang_places import places

HUGE_PAGES_ENV: Final = "SGLANG_HUGEPAGE_SIZE"

PLACES: Final = (
    *places(
        "sglang.srt.mem_cache.hicache_storage",
        "HiCacheStorage.batch_exists(keys, extra_info)",
        "HiCacheStorage.batch_get_v1(keys, host_indices, extra_info)",
        "HiCacheStorage.batch_set_v1(keys, host_indices, extra_info)",
        "HiCacheStorage.register_mem_pool_host(mem_pool_host)",
        "HiCacheStorage.register_mem_host_pool_v2(host_pool, host_pool_name)",
        "HiCacheStorage.on_host_pools_registered(self)",
        "HiCacheStorage.batch_exists_v2(keys, pool_transfers, extra_info)",
        "HiCacheStorage.batch_get_v2(transfers, extra_info)",
        "HiCacheStorage.batch_set_v2(transfers, extra_info)",
        "PoolTransfer(name, keys, host_indices, hit_policy)",
        "PoolTransferResult(kv_hit_pages, extra_pool_hit_pages, restorable_prefix_pages)",
        "HiCacheStorageConfig(tp_rank, tp_size, pp_rank, pp_size, attn_cp_size, dcp_size)",
        "HiCacheStorageConfig(is_mla_model, dp_rank, extra_config)",
    ),
    *places("sglang.srt.mem_cache.pool_host.mha", "MHATokenToKVPoolHost.get_page_buffer_meta(indices)"),
    *places(
        "sglang.srt.mem_cache.pool_host.common",
        "ShmHostTensorAllocator.__init__ sets fds, mms",
        "get_allocator_type uses hicache_storage_backend_extra_config",
    ),
    *places("sglang.srt.mem_cache.pool_host.base", "HostKVCache.__init__ sets allocator"),
    *places(
        "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller",
        "HybridCacheController.attach_storage_backend(storage_backend, storage_backend_extra_config)",
        "HybridCacheController._page_transfer_with_stable_layout(operation) uses _page_transfer",
        "HybridCacheController._page_backup_with_stable_layout(operation) uses _page_backup",
        "HybridCacheController.attach_storage_backend uses on_host_pools_registered",
        "HybridCacheController._storage_hit_query uses batch_exists_v2, restorable_prefix_pages",
        "HybridCacheController._sync_prefetch_hit_query uses restorable_prefix_pages",
    ),
)


def pool_storage(
    pool: PoolClientConfig, namespace: str, geometry: KvGeometry, longest_tokens: int = 0
) -> dict[str, Any]:
    """Extra config of SGLang's `dynamic` storage backend, which is read by `hicache.BackendSettings`. It
    holds no secret: SGLang logs and shows it. `longest_tokens`: of a request, to be checked against host
    memory. The ranks of one start on one host get one group.
    """
    return {
        "backend_name": "pdserve",
        "module_path": "pdserve.kvpool.hicache.backend",
        "class_name": "PdserveHiCache",
        "interface_v1": 1,
        **_allocator(pool),
        "pdserve": {
            "pool": msgspec.to_builtins(
                replace(pool, token_file=None, page_key_file=None), enc_hook=withhold_secret
            ),
            "namespace": namespace,
            "geometry": geometry.as_dict(),
            "longest_tokens": longest_tokens,
            "group": secrets.token_hex(8),
        },
    }


def _allocator(pool: PoolClientConfig) -> dict[str, str]:
    """A host pool that the page mover can map; SGLang makes none of these of huge pages."""
    return {"allocator": "shm"} if pool.page_mover and not os.environ.get(HUGE_PAGES_ENV) else {}


class TrialBackend(HiCacheStorage):  # type: ignore[misc]  # SGLang ships no types
    """Notes what SGLang calls; one page of each read comes from an SSD."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self.calls: list[tuple[str, list[str], list[int]]] = []

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        self.calls.append(("get", list(keys), host_indices.tolist()))
        came_from_ssd(1)
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


def wrong_attachment(page_size: int = 4) -> str:
    """What SGLang does with our settings that it should not; empty where all is as meant. Milliseconds."""
    settings = {
        **pool_storage(PoolClientConfig(), "trial", _GEOMETRY),
        "prefetch_threshold": page_size,
        "module_path": __name__,
        "class_name": TrialBackend.__name__,
    }
    controller = _controller(page_size)
    counted = SsdTokens()
    # as `ssd_tokens.install` puts it into the class, before SGLang attaches
    controller._page_get_zero_copy = functools.partial(
        counted.counting(HiCacheController._page_get_zero_copy), controller
    )
    extra, threshold, *_ = controller.parse_storage_backend_extra_config(json.dumps(settings))
    with get_parallel().override(attn_dcp_size=1):
        controller.attach_storage_backend(
            "dynamic", prefetch_threshold=threshold, storage_backend_extra_config=extra
        )
    chosen = controller.page_get_func, controller.page_set_func
    if chosen != (controller._page_get_zero_copy, controller._page_set_zero_copy):
        return f"SGLang moves pages by {' and '.join(one.__name__ for one in chosen)}"
    if controller.prefetch_threshold != page_size:
        return f"SGLang fetches from {controller.prefetch_threshold} tokens on, not from one page"
    keys = ["a", "b"]
    indices = torch.arange(len(keys) * page_size)
    last = indices[-page_size:]
    fetched = PrefetchOperation(SimpleNamespace(rid="rid"), [], pool_transfers=[_window(["?"], last)])
    fetched.hash_value, fetched.host_indices = keys, indices
    HybridCacheController._page_transfer_with_stable_layout(controller, fetched)
    stored = StorageOperation(indices, [], None, keys, pool_transfers=[_window(keys[1:], last)])
    HybridCacheController._page_backup_with_stable_layout(controller, stored)
    calls, kv, part = controller.storage_backend.calls, (keys, indices.tolist()), (keys[1:], last.tolist())
    if calls != [("get", *kv), ("get swa", *part), ("set swa", *part), ("set", *kv)]:
        return f"SGLang moves pages not by interface v1, or their parts not by v2: {calls}"
    if stored.completed_tokens != len(indices):
        return "SGLang does not take written pages as stored"
    if counted.of("rid") != page_size:
        return "SGLang does not read pages by _page_get_zero_copy"
    return ""


def _window(keys: list[str], indices: torch.Tensor) -> PoolTransfer:
    return PoolTransfer(PoolName.SWA, indices, keys=keys, hit_policy=PoolHitPolicy.TRAILING_PAGES)


_GEOMETRY = KvGeometry(
    model="m", dtype="d", kv_dtype="d", page_size="4", layout="page_first", tp_size="1", pp_size="1"
)


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
