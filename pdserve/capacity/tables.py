"""What the tables of a cluster file say of GPUs and memory. Pure.

A worker's flags for SGLang count as SGLang reads them: they win over the table, and the last of a repeated
one counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from pdserve.capacity.facts import PoolNeed, Role, WorkerNeed
from pdserve.errors import ConfigError
from pdserve.sizes import parse_bytes

AUTO: Final = "auto"
"""`capacity_bytes` of a pool node: what the machine has room for."""
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_SHM: Final = "/dev/shm"
_FLAGS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("--tp", "--tp-size", "--tensor-parallel-size"), "tp"),
    **dict.fromkeys(("--pp", "--pp-size", "--pipeline-parallel-size"), "pp"),
    **dict.fromkeys(("--dp", "--dp-size", "--data-parallel-size"), "dp"),
    **dict.fromkeys(("--attn-dp-size", "--attention-data-parallel-size"), "attention_dp"),
    "--page-size": "page_size",
    "--kv-cache-dtype": "kv_cache_dtype",
    "--mem-fraction-static": "mem_fraction",
    "--hicache-size": "hicache_size_gb",
    "--hicache-ratio": "hicache_ratio",
    "--context-length": "context_length",
    "--attention-backend": "attention_backend",
    "--prefill-attention-backend": "prefill_backend",
    "--decode-attention-backend": "decode_backend",
    "--speculative-algorithm": "draft_algorithm",
    "--speculative-draft-model-path": "draft_path",
    "--speculative-draft-kv-cache-dtype": "draft_kv_cache_dtype",
    "--device": "device",
}
_OURS: Final = ("--base-gpu-id", "--gpu-id-step")


class _Engine(msgspec.Struct, frozen=True):
    """Those of a worker's `[engine]` options that matter here; the worker itself checks them all."""

    model_path: str = ""
    device: str = AUTO
    page_size: int | None = None
    page_pieces: int = 0
    kv_cache_dtype: str = AUTO
    mem_fraction: float | None = None
    hicache_host_memory_mode: Literal["cache", "buffer_only"] = "cache"
    hicache_size_gb: int = 0
    hicache_ratio: float | None = None
    context_length: int | None = None
    extra_args: list[str] = []


class _Worker(msgspec.Struct, frozen=True):
    engine: _Engine = _Engine()
    storage: str = "pool"
    gpus: list[int] | int | None = None
    env: dict[str, str] = {}


class _Flags(msgspec.Struct, frozen=True):
    tp: int = 1
    pp: int = 1
    dp: int = 1
    attention_dp: int = 1
    page_size: int | None = None
    kv_cache_dtype: str | None = None
    mem_fraction: float | None = None
    hicache_size_gb: int | None = None
    hicache_ratio: float | None = None
    context_length: int | None = None
    attention_backend: str = ""
    prefill_backend: str = ""
    decode_backend: str = ""
    draft_algorithm: str = ""
    draft_path: str = ""
    draft_kv_cache_dtype: str = ""
    device: str | None = None


def worker_need(
    name: str, role: Role, where: str, table: Mapping[str, Any], extra_args: Sequence[str] = ()
) -> tuple[WorkerNeed, str] | None:
    """(what a worker's table asks for, its model's path); None: it runs on the CPU.

    `where`: the table in the cluster file. `extra_args`: of the command line. Raises ConfigError.
    """
    try:
        worker = msgspec.convert(table, _Worker)
        words = [*worker.engine.extra_args, *extra_args]
        given = _given(words)
        flags = msgspec.convert(given, _Flags, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"'{where}': {error}") from None
    engine = worker.engine
    if (flags.device or engine.device) == "cpu":
        return None
    for flag in _OURS:
        if any(word.partition("=")[0] == flag for word in words):
            raise ConfigError(
                f"'{where}': {flag}: GPUs are given to workers by `up`: write gpus = [..] instead"
            )
    splits_attention = "--enable-dp-attention" in words
    need = WorkerNeed(
        name=name,
        role=role,
        tp=flags.tp,
        pp=flags.pp,
        dp=1 if splits_attention else flags.dp,
        attention_dp=max(flags.attention_dp, flags.dp if splits_attention else 1),
        gpus=_gpus(where, worker),
        page_size=flags.page_size or engine.page_size,
        page_pieces=engine.page_pieces,
        kv_cache_dtype=flags.kv_cache_dtype or engine.kv_cache_dtype,
        mem_fraction=flags.mem_fraction or engine.mem_fraction,
        buffer_only=engine.hicache_host_memory_mode == "buffer_only",
        hicache_size_gb=engine.hicache_size_gb if flags.hicache_size_gb is None else flags.hicache_size_gb,
        hicache_ratio=flags.hicache_ratio or engine.hicache_ratio,
        context_length=flags.context_length or engine.context_length,
        has_storage=worker.storage != "none",
        backends=tuple(filter(None, (flags.attention_backend, flags.prefill_backend, flags.decode_backend))),
        one_pool="--disable-hybrid-swa-memory" in words,
        draft_algorithm=flags.draft_algorithm,
        draft_path=flags.draft_path,
        draft_kv_cache_dtype=flags.draft_kv_cache_dtype,
    )
    if isinstance(worker.gpus, int) and worker.gpus != need.ranks:
        raise ConfigError(f"'{where}.gpus' is {worker.gpus}, and its flags need {need.ranks}")
    if min(need.tp, need.pp, need.dp, need.attention_dp) < 1 or need.tp % need.attention_dp:
        raise ConfigError(
            f"'{where}': --tp-size must be a multiple of the data parallel groups, both at least 1"
        )
    return need, engine.model_path


def pool_need(name: str, where: str, table: Mapping[str, Any]) -> PoolNeed:
    """What a pool node's table asks for. Raises ConfigError."""
    capacity, slab = table.get("capacity_bytes", AUTO), table.get("slab_bytes")
    try:
        return PoolNeed(
            name=name,
            capacity_bytes=None if capacity == AUTO else parse_bytes(capacity),
            slab_bytes=None if slab is None else parse_bytes(slab),
            in_shm=str(table.get("arena_dir", _SHM)).startswith(_SHM)
            and table.get("huge_pages", "off") in ("off", "advise"),
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"'{where}': {error}") from None


def node_count(words: Sequence[str]) -> int:
    """Hosts that a worker's ranks are divided between, by SGLang's words. Raises ConfigError."""
    value = "1"
    for i, word in enumerate(words):
        flag, is_joined, joined = word.partition("=")
        if flag == "--nnodes":
            value = joined if is_joined else "".join(words[i + 1 : i + 2])
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"--nnodes must be a number of hosts, found {value!r}")
    return int(value)


def _given(words: Sequence[str]) -> dict[str, str]:
    """The last value of each flag that matters."""
    given = {}
    for i, word in enumerate(words):
        flag, is_joined, value = word.partition("=")
        if flag in _FLAGS and (is_joined or i + 1 < len(words)):
            given[_FLAGS[flag]] = value if is_joined else words[i + 1]
    return given


def _gpus(where: str, worker: _Worker) -> tuple[int, ...] | None:
    if isinstance(worker.gpus, list):
        return tuple(worker.gpus)
    if VISIBLE not in worker.env:
        return None
    words = worker.env[VISIBLE].split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise ConfigError(f"'{where}.env': {VISIBLE} = {worker.env[VISIBLE]!r}: write gpus = [..] instead")
    return tuple(int(word) for word in words)
