"""What serves the same load beside each other: cluster files of `pdserve up`, from plain SGLang to pdserve
disaggregated. Pure.

| name | what it is |
|---|---|
| `plain` | SGLang alone, asked directly |
| `file` | SGLang with HiCache and its own file backend, asked directly |
| `mooncake` | SGLang with HiCache and its own Mooncake backend, over TCP, asked directly |
| `agg` | one aggregated worker on a pool node, behind the router |
| `agg-once` | as `agg`, but host memory keeps no pages; what this frees is given to the pool |
| `disagg` | one prefill and one decode worker on a pool node, behind the router |
| `disagg-direct` | the same, with the direct hand-off, of Mooncake over TCP on CPU |
| `agg-two` | two aggregated workers on a pool node, behind the router |
| `elastic` | two elastic workers on a pool node, behind the router |
| `dead` | as `agg`, asked directly; its pool node was killed before the first ask |

All workers have the same model, page size and KV memory of the device, and all but those of `plain` and
`agg-once` the same host memory for KV; `disagg`, `agg-two` and `elastic` have two of them. Mooncake's store
has the pool's memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from benchmarks.serving.load.plan import Shape, make_load, total_tokens
from pdserve.sizes import parse_bytes

PAGE_TRACE: Final = "PDSERVE_PAGE_TRACE"  # kvpool/hicache/page_trace.py
DEAD: Final = "dead"
ONCE: Final = "agg-once"
ON_POOL: Final = ("agg", ONCE, "disagg", "disagg-direct", "agg-two", "elastic")
OURS: Final = ON_POOL
NEED_MOONCAKE: Final = ("mooncake",)
NAMES: Final = ("plain", "file", "mooncake", *OURS, DEAD)
ASKED_FOR: Final = (ONCE, "disagg-direct", "agg-two", "elastic", DEAD)
"""Compared only where they are named."""
_ONCE_RATIO: Final = 1.2  # room for a long fetch beside a long write
_ON_THEIR_WAY: Final = {"hicache_host_memory_mode": "buffer_only", "hicache_ratio": _ONCE_RATIO}
RESERVED: Final = "--num-reserved-decode-tokens"
"""SGLang's own decode workers take a prompt when there is room for so many tokens more, 512 where it is not
said. A small cache never has that beside the longest prompts, and they would wait for ever.
"""
_DIRECT: Final = {"handoff": "direct", "direct": {"trusted_network": True}}
FILE_DIRECTORY: Final = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What all contenders have in common. `directory`: for pages and arenas, on this host."""

    model_path: str
    directory: str
    device_tokens: Annotated[int, Meta(ge=1)]
    host_ratio: float = 2.0
    page_size: int = 64
    dtype: str = "bfloat16"
    kv_token_bytes: Annotated[int, Meta(ge=0)] = 0
    """What a token takes in the device's KV cache: `agg-once` needs it."""
    pool_capacity: str = "2GiB"
    trace_pages: bool = False
    """Workers write when their pages moved into `trace_path`."""
    pull_step_tokens: int | None = None
    """Prompts of twice as many are pulled in such steps while they are computed; none: as is usual."""
    arena_directory: str = "/dev/shm/pdserve"
    router: Mapping[str, Any] = {}
    """More options of the router."""
    extra_args: tuple[str, ...] = ()


class Contender(msgspec.Struct, frozen=True):
    """`tables`: a cluster file. `port`: where to ask."""

    name: str
    tables: Mapping[str, Any]
    port: int
    router_port: int


def contender(
    name: str, setting: Setting, router_port: int, worker_port: int, mooncake_master: str = ""
) -> Contender:
    """One of NAMES. Ports are free ones. `mooncake_master`: HOST:PORT, for NEED_MOONCAKE."""
    directory = f"{setting.directory}/{name}"
    engine: dict[str, Any] = {
        "model_path": setting.model_path,
        "page_size": setting.page_size,
        "dtype": setting.dtype,
        "max_total_tokens": setting.device_tokens,
        "hicache_ratio": setting.host_ratio,
        "extra_args": list(setting.extra_args),
    }
    worker: dict[str, Any] = {"engine": engine, "cluster_token": "", "insecure": True}  # we ask it directly
    if name == "disagg-direct":
        engine["extra_args"] += [RESERVED, str(setting.page_size)]
    router: dict[str, Any] = {**setting.router, "port": router_port}
    if setting.pull_step_tokens is not None:
        worker["pull_step_tokens"] = setting.pull_step_tokens
        router["pull_ahead_tokens"] = 2 * setting.pull_step_tokens
    alone = {"engine": {"port": worker_port}}
    roles: dict[str, dict[str, Any]] = {
        "plain": {"agg": [{**alone, "storage": "none"}]},
        "file": {
            "agg": [
                {
                    "engine": {"port": worker_port, "layout": "layer_first"},
                    "storage": "file",
                    "env": {FILE_DIRECTORY: f"{directory}/pages"},
                }
            ]
        },
        "mooncake": {"agg": [{**alone, "storage": "mooncake", "env": _mooncake(mooncake_master)}]},
        "agg": {"agg": [{}]},
        ONCE: {"agg": [{"engine": _ON_THEIR_WAY}]},
        DEAD: {"agg": [alone]},
        "disagg": {"prefill": [{}], "decode": [{}]},
        "disagg-direct": {"prefill": [_DIRECT], "decode": [_DIRECT]},
        "agg-two": {"agg": [{}, {}]},
        "elastic": {"elastic": [{}, {}]},
    }
    own = roles[name]
    if name in (*ON_POOL, DEAD):
        arena = {"arena_dir": f"{setting.arena_directory}/{name}", "keep": False}
        if setting.trace_pages:
            for role in own:
                own[role] = [
                    {**table, "env": {PAGE_TRACE: trace_path(setting, name, role)}} for table in own[role]
                ]
        capacity = _with_freed(setting) if name == ONCE else setting.pool_capacity
        own["pool"] = [{"capacity_bytes": capacity, **arena}]
    tables = {
        "cluster": {"name": name, "run_dir": directory, "restart": "never", "stop_on_loss": name != DEAD},
        "router": router,
        "worker": worker,
        **own,
    }
    return Contender(name, tables, router_port if name in OURS else worker_port, router_port)


def _with_freed(setting: Setting) -> int:
    """The pool's capacity and the host memory that a worker of `agg-once` does not take, in bytes."""
    freed_ratio = setting.host_ratio - _ONCE_RATIO
    freed_bytes = int(freed_ratio * setting.device_tokens * setting.kv_token_bytes)
    return parse_bytes(setting.pool_capacity) + freed_bytes


def _mooncake(master: str) -> dict[str, str]:
    """The worker brings no memory of its own to the store, as it brings none to the pool."""
    return {
        "MOONCAKE_MASTER": master,
        "MOONCAKE_PROTOCOL": "tcp",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "0",
        "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1",
    }


def trace_path(setting: Setting, name: str, role: str) -> str:
    """Where a contender's worker writes when its pages moved."""
    return f"{setting.directory}/{name}/{role}-pages.jsonl"


def device_tokens(total_tokens: int, longest_tokens: int, share: float, page_size: int) -> int:
    """Tokens of the device's KV cache, whole pages: `share` of what all sessions have at their end, but room
    for the longest one, with a tenth to spare, at least.
    """
    wanted = max(int(share * total_tokens), int(1.1 * longest_tokens)) + page_size
    return -(-wanted // page_size) * page_size


def cache_tokens(shapes: Collection[Shape], share: float, concurrency: int, page_size: int) -> int:
    """The device's KV cache for all these loads: below 1 `share` is of the smallest, so that none fits, else
    of the largest; room for `concurrency` of the longest sessions (0: of all) in any case.
    """
    loads = [make_load(shape, 0) for shape in shapes]
    total = (min if share < 1 else max)(map(total_tokens, loads))
    longest = max(load.longest_tokens * (concurrency or len(load.sessions)) for load in loads)
    return device_tokens(total, longest, share, page_size)
