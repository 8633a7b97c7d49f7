"""SGLang's HiCache storage backend on the pool: the `dynamic` backend of SGLang 0.5.23, interfaces v1 and v2.

SGLang calls this object from four threads of a scheduler process (query, get, backup, and the scheduler
itself for statistics):

    batch_exists(keys)                  how long a prefix of the chain the pool has
    batch_get_v1(keys, host_indices)    pool -> host KV pool, at most 128 pages
    batch_set_v1(keys, host_indices)    host KV pool -> pool, at most 128 pages

Of some models SGLang keeps more than keys and values of full attention, each in a host pool of its own
(`pages.PagePart`). Then it asks by interface v2, and writes the other parts of pages before KV:

    batch_exists_v2(keys, transfers)    which prefixes of the chain can be restored with all their parts
    batch_get_v2(transfers)             pool -> host pools, after KV
    batch_set_v2(transfers)             host pools -> pool, before KV

SGLang needs three guarantees. An exception would kill the calling thread for good, so nothing is raised, and
a list of full length is always returned. A slow call stalls every later one, so each ends within the client's
time-outs (seconds at most), and a pool that is down is refused at once (client/node_health.py). When
`batch_get_v1` returns, nothing writes into the host pages any more. There is no negative cache: a page that
was missing a millisecond ago may have been committed since.

Pages move without a copy of ours: `get_page_buffer_meta` gives the address of each segment of a page in the
host pool (two for page_first layouts, 2 x layers for layer_first, one for MLA), and the transport reads and
writes there, on the calling thread (page_access.py).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
import torch
from msgspec.structs import replace
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolTransfer,
    PoolTransferResult,
)

from pdserve.errors import ConfigError, PoolRefused, PoolUnavailable, StartupError
from pdserve.kvpool.client.config import PAGE_KEY_VARIABLE, POOL_TOKEN_VARIABLE, PoolClientConfig
from pdserve.kvpool.hicache.host_pool import HostPool
from pdserve.kvpool.hicache.owners import tenant_of_call
from pdserve.kvpool.hicache.page_access import RankPages
from pdserve.pages import DRAFT, KV, STATES, KvGeometry, part_suffix, piece_suffixes, restorable_lengths
from pdserve.security.tokens import Secret, decode_secret

logger = logging.getLogger(__name__)

WARN_EVERY_S = 10.0
BY_HEAD = "page_head"  # SGLang's layout of pages in pieces, see `piece_suffixes`


class BackendSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker passes to the backend inside SGLang's `--hicache-storage-backend-extra-config`, under
    "pdserve".
    """

    pool: PoolClientConfig
    namespace: str
    geometry: KvGeometry
    longest_tokens: int = 0
    """Of a request, where host memory is SGLang's `buffer_only`: it must have room for one. Else 0."""


class PdserveHiCache(HiCacheStorage):  # type: ignore[misc]  # SGLang ships no types
    """One rank's view of the pool. Built by SGLang in each scheduler process."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        """Raises StartupError where the configuration cannot work at all; an absent pool is not
        such a case.
        """
        self._config = storage_config
        self._settings = _read_settings(storage_config)
        _check_ranks(storage_config, self._settings.geometry)
        self._pools: dict[str, HostPool] = {}  # by part
        self._pages: RankPages | None = None  # once all parts are registered
        self._is_registered = False  # all parts but those of draft models
        self._warned_at_s = 0.0

    # -- start and end

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Called once, before SGLang's storage threads start, with the host pool of KV. Raises StartupError
        when it does not fit the geometry that the worker declared: its pages would be stored under a wrong
        name.
        """
        self.mem_pool_host = mem_pool_host
        declared = self._settings.geometry
        self._add(KV, mem_pool_host)
        kv_dtype = str(mem_pool_host.dtype).removeprefix("torch.")
        # SGLang keeps FP8 as bytes. Which FP8 they are is told apart by what was declared.
        is_fp8 = kv_dtype == "uint8" and declared.kv_dtype.startswith("float8_")
        if declared.kv_dtype not in ("auto", kv_dtype) and not is_fp8:
            raise StartupError(
                f"SGLang keeps KV in {kv_dtype}, but this worker declared {declared.kv_dtype} to the pool: "
                "say which with --kv-cache-dtype in engine.extra_args"
            )
        _check_room(mem_pool_host, self._settings.longest_tokens)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Called for each host pool, KV's among them. Raises StartupError for a part that the worker did not
        declare: the pages of the others would be of no use without it.
        """
        name = str(getattr(host_pool_name, "value", host_pool_name))  # an enum of strings
        if name == KV:
            return
        if name not in self._settings.geometry.window_pages or self._pages is not None:
            raise StartupError(
                f"this model keeps {name} state beside its KV pages, which pdserve does not store yet: "
                "run it without the pool"
            )
        self._add(name, host_pool)
        if self._is_registered:
            self._open()

    def on_host_pools_registered(self) -> None:
        """All host pools are known, but those of draft models: SGLang registers them last. Raises
        StartupError where one that was declared is not there, or the pool refuses us.
        """
        for name in self._settings.geometry.window_pages:
            if name not in self._pools and name != DRAFT:
                raise StartupError(
                    f"SGLang keeps no {name} pages of this model, which pdserve expected of it"
                )
        self._is_registered = True
        self._open()

    def _open(self) -> None:
        """Reach the pool, once all declared parts are registered. Raises StartupError: it refuses us."""
        if not self._pools.keys() >= self._settings.geometry.window_pages.keys():
            return
        pages = RankPages(
            self._settings.pool,
            self._settings.namespace,
            self._settings.geometry.as_dict(),
            self._pools,
            name=f"hicache{self._config.tp_rank}",
        )
        self._pages = pages
        for node, error in pages.check().items():
            if isinstance(error, PoolRefused):
                raise StartupError(str(error))
            if error is not None:
                logger.warning("pool node %s cannot be reached, starting without it: %s", node, error)

    def close(self) -> None:
        if self._pages is not None:
            self._pages.close()

    # -- the v1 contract

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many pages of the chain, from its start, the pool has. Never raises."""
        try:
            [present] = self._opened.present(keys, [KV], tenant_of_call(extra_info))
            return leading_pages(present)
        except Exception as error:  # boundary: an exception would kill SGLang's query thread for good
            self._complain("lookup", error)
            return 0

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Fill the host pages of `keys`. `host_indices`: int64 [pages * page_size]. Never raises."""
        return self._move("get", KV, keys, host_indices, tenant_of_call(extra_info))

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store the host pages of `keys`. `host_indices`: int64 [pages * page_size]. Never raises."""
        return self._move("put", KV, keys, host_indices, tenant_of_call(extra_info))

    # -- the v2 contract

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Which prefixes of the chain can be restored, with the parts that `pool_transfers` name. Never
        raises.
        """
        try:
            windows = {KV: 0, **{str(one.name): window_pages(one) for one in pool_transfers or []}}
            present = self._opened.present(keys, list(windows), tenant_of_call(extra_info))
            return lookup_result(windows, present)
        except Exception as error:  # boundary: an exception would kill SGLang's query thread for good
            self._complain("lookup", error)
            return PoolTransferResult(0, {}, [])

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Fill the host pages of the transfers' keys, each in its part's host pool. Never raises."""
        tenant = tenant_of_call(extra_info)
        return {name: self._move("get", name, *pages, tenant) for name, pages in _by_part(transfers)}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store the host pages of the transfers' keys. Never raises."""
        tenant = tenant_of_call(extra_info)
        return {name: self._move("put", name, *pages, tenant) for name, pages in _by_part(transfers)}

    # -- the namespace

    def clear(self) -> None:
        """`POST /hicache/storage-backend/clear`: drop our namespace's pages, nobody else's."""
        try:
            dropped = self._opened.clear()
            logger.info("cleared namespace %s: %d pages", self._settings.namespace, dropped)
        except Exception as error:  # boundary: called on SGLang's scheduler thread
            self._complain("clear", error)

    def get_stats(self) -> None:
        """SGLang's per-step statistics hook; our counters reach the worker's /metrics by themselves."""
        return

    # -- the abstract remainder of SGLang's base class, unused with interface_v1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        return None

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[None]:
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return False

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    # -- details

    def _add(self, part: str, host_pool: Any) -> None:
        """Raises StartupError: its pages are not of the declared size or layout, or have no addresses."""
        declared = self._settings.geometry
        expected = {"page_size": "1" if part in STATES else declared.page_size, "layout": declared.layout}
        for field, value in expected.items():
            if (actual := str(getattr(host_pool, field))) != value:
                raise StartupError(
                    f"SGLang's host pool of {part} has {field} {actual}, but this worker's namespace "
                    f"{self._settings.namespace} is declared with {value}"
                )
        config = self._config
        pieces = declared.tp_size if part == KV and declared.layout == BY_HEAD else config.tp_size
        is_replicated = config.is_mla_model and part not in STATES
        ranks = piece_suffixes(
            replicated=is_replicated,
            tp_rank=config.tp_rank,
            tp_size=config.tp_size,
            pp_rank=config.pp_rank,
            pp_size=config.pp_size,
            pieces=int(pieces),
        )
        suffixes = tuple(part_suffix(rank, part, declared.window_pages) for rank in ranks)
        try:
            self._pools[part] = HostPool(host_pool, suffixes)
        except (ValueError, NotImplementedError) as error:
            raise StartupError(
                f"SGLang moves no {part} pages of layout {host_pool.layout} ({error}): unset engine.layout"
            ) from error

    @property
    def _opened(self) -> RankPages:
        if self._pages is None:
            if self._is_registered:
                raise StartupError(f"SGLang keeps no {DRAFT} pages, which pdserve expected of it")
            raise PoolUnavailable("SGLang has registered no host pool yet")
        return self._pages

    def _move(
        self,
        what: Literal["get", "put"],
        part: str,
        keys: list[str],
        host_indices: torch.Tensor,
        tenant: str,
    ) -> list[bool]:
        try:
            pages = self._opened
            return (pages.put if what == "put" else pages.get)(part, keys, host_indices, tenant)
        except Exception as error:  # boundary: an exception would kill one of SGLang's threads for good
            self._complain(f"{what} of {part} pages", error)
            return [False] * len(keys)

    def _complain(self, what: str, error: Exception) -> None:
        now_s = time.monotonic()
        if now_s - self._warned_at_s < WARN_EVERY_S:
            return
        self._warned_at_s = now_s
        if isinstance(error, PoolUnavailable):
            logger.warning("pool %s: %s; treated as a miss", what, error)
        else:
            text = "pool %s failed inside pdserve (a bug; treated as a miss): %s"
            logger.error(text, what, error, exc_info=error)


def _by_part(transfers: list[PoolTransfer]) -> Iterator[tuple[str, tuple[list[str], torch.Tensor]]]:
    return ((str(one.name), (one.keys or [], one.host_indices)) for one in transfers)


def _check_ranks(config: HiCacheStorageConfig, declared: KvGeometry) -> None:
    """Raises StartupError where SGLang divides pages between its ranks in another way than was declared."""
    if config.dcp_size > 1:
        raise StartupError("decode context parallelism divides pages in a way that the pool cannot name yet")
    if config.attn_cp_size > 1:
        # of MLA's ranks SGLang 0.5.23 has the first alone write: the pages of the others would never come
        raise StartupError("prefill context parallelism divides pages in a way that the pool cannot name yet")
    of_ranks = declared.tp_size if declared.layout == BY_HEAD else str(config.tp_size)
    tp_size = "replicated" if config.is_mla_model else of_ranks
    actual = {"tp_size": tp_size, "pp_size": str(config.pp_size)}
    for field, value in actual.items():
        if getattr(declared, field) != value:
            raise StartupError(
                f"SGLang runs with {field} {value}, but this worker declared "
                f"{getattr(declared, field)} to the pool"
            )


def _check_room(mem_pool_host: Any, longest_tokens: int) -> None:
    """Raises StartupError where a request's pages could never pass through host memory.

    SGLang 0.5.23 stages the new pages of a request together, and those that it fetches for one
    (`BufferModePipeline._backup_oversize`, `_reject_oversized_prefetch`). More than host memory holds are
    neither stored nor fetched, ever, and only a counter says so.
    """
    needed = min(longest_tokens, int(mem_pool_host.device_capacity_tokens)) if longest_tokens else 0
    if mem_pool_host.size < needed:
        raise StartupError(
            f"host memory has room for {mem_pool_host.size:,} tokens on their way, but a request may have "
            f"{needed:,}, whose pages would never be stored or fetched: raise engine.hicache_ratio or "
            "hicache_size_gb, or a lower --context-length"
        )


def _read_settings(storage_config: HiCacheStorageConfig) -> BackendSettings:
    extra = storage_config.extra_config or {}
    try:
        settings = msgspec.convert(extra.get("pdserve"), BackendSettings, dec_hook=decode_secret)
    except msgspec.ValidationError as error:
        raise ConfigError(f"HiCache extra config of pdserve: {error}") from error
    token = settings.pool.token or os.environ.get(POOL_TOKEN_VARIABLE, "")
    page_key = settings.pool.page_key or os.environ.get(PAGE_KEY_VARIABLE, "")
    pool = replace(settings.pool, token=Secret(token), page_key=Secret(page_key))
    return replace(settings, pool=pool)


def leading_pages(present: Sequence[bool]) -> int:
    """The number of pages from the start that are there."""
    return present.index(False) if False in present else len(present)


def window_pages(transfer: PoolTransfer) -> int:
    """See `PagePart.window_pages`. SGLang says it by the number of keys. It fills them in when it reads."""
    if transfer.hit_policy != PoolHitPolicy.TRAILING_PAGES:
        return 0
    return max(1, len(transfer.keys or ()))


def lookup_result(windows: Mapping[str, int], present: Sequence[Sequence[bool]]) -> PoolTransferResult:
    """`windows`: by part, KV first. `present`: for each part and each page of the chain, whether it is there.

    All lengths are answered: one rank may lack a page that another has, and SGLang intersects them.
    """
    kv_pages = leading_pages(present[0])
    parts = [(window, there[:kv_pages]) for window, there in zip(windows.values(), present, strict=True)]
    longest = [max(restorable_lengths([part]), default=0) for part in parts]
    hits = {name: pages for name, pages in zip(windows, longest, strict=True) if pages}
    lengths = restorable_lengths(parts)
    return PoolTransferResult(max(lengths, default=0), hits, lengths)
