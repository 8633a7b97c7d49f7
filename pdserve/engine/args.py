"""SGLang's command line for a worker: a pure function of configuration, role, device and storage.

What the hand-off between workers rests on, and the flag that provides it:

| need | flag |
|---|---|
| every computed page goes to the pool | `--hicache-write-policy write_through` |
| a hand-off's pages are waited for, not overtaken by recomputation | `--hicache-storage-prefetch-policy
wait_complete` | | one page is worth fetching | `prefetch_threshold` = page size, in the storage backend's
extra config | | a worker's own counts of cached tokens | `--enable-cache-report`, `--enable-metrics` |
| one process that tokenises, serves and tracks requests | `--tokenizer-worker-num 1` (SGLang's default) |

A user's own flags come last, and SGLang takes the last of a repeated flag, so they win; those that would take
one of these needs away are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pdserve.engine.config import EngineConfig
from pdserve.engine.device import Device
from pdserve.errors import ConfigError

Role = Literal["prefill", "decode", "agg"]
Storage = Mapping[str, Any] | Literal["file", "mooncake"] | None
"""Extra config of the `dynamic` storage backend; a backend of SGLang's own; or None, plain SGLang without
HiCache.
"""

_CPU_MAX_TOTAL_TOKENS = 40_000
# SGLang takes this share of the memory that is free at its start. Its tokens bound the KV cache anyway;
# a small share would only make a start fail when a neighbour takes memory meanwhile.
_CPU_MEM_FRACTION = 0.9
_CPU_MAX_RUNNING_REQUESTS = 128  # bounds the request-to-token table: this many rows of the context length

# Flag -> why it is refused, or the option that says the same.
_OURS = "pages would no longer reach the other workers"
_REFUSED: dict[str, str] = {
    "--model-path": "set engine.model_path",
    "--model": "set engine.model_path",
    "--host": "set engine.host",
    "--port": "set engine.port",
    "--device": "set engine.device",
    "--served-model-name": "set engine.served_model_name",
    "--config": "it would hide flags from pdserve; put them after -- one by one",
    "--disable-radix-cache": _OURS,
    "--radix-cache-backend": _OURS,
    "--hicache-storage-backend": "the pool is the storage backend",
    "--hicache-storage-backend-extra-config": "the pool is the storage backend; set pool options instead",
    "--hicache-write-policy": _OURS,
    "--hicache-host-memory-mode": _OURS,
    "--hicache-storage-prefetch-policy": "decode workers would recompute what is being fetched",
    "--enable-lmcache": _OURS,
    "--strip-thinking-cache": "a conversation's next turn would wait for pages that are never stored",
    "--enable-unified-cache-external-linker": _OURS,
    "--disaggregation-mode": "pages are handed over through the pool, not by SGLang itself",
    "--speculative-algorithm": "the pool does not store the state of draft models yet",
    "--api-key": "set cluster_token",
    "--admin-api-key": "set cluster_token",
    "--tokenizer-worker-num": "a worker tracks its requests in one process",
    "--skip-tokenizer-init": "a worker tokenises the clients' requests",
    "--enable-http2": "a worker's routes run in SGLang's uvicorn server",
    "--grpc-mode": "a worker serves HTTP",
    "--smg-grpc-mode": "a worker serves HTTP",
    "--encoder-only": "a worker generates text",
    "--use-ray": "a worker's processes are its own children",
    "--nnodes": "a worker runs on one host",
}
_REFUSED_ON_CPU: dict[str, str] = {
    "--dp-size": "on CPU run more workers instead",
    "--data-parallel-size": "on CPU run more workers instead",
    "--hicache-io-backend": "on CPU only direct works",
    "--enable-torch-compile": "torch's compiler is off on CPU, so that a worker starts sooner",
    "--enable-lora": "LoRA needs pinned memory, which a CPU has none of",
}
# SGLang accepts any unambiguous beginning of a flag; these are flags of their own, though another begins with
# them.
_EXACT = frozenset({"--hicache-ratio", "--hicache-size"})


def server_argv(config: EngineConfig, role: Role, device: Device, storage: Storage) -> list[str]:
    """The words after `sglang serve` for one worker.

    Raises ConfigError, naming the flag, where `config` asks for what this device or the hand-off cannot have.
    """
    _refuse(config.extra_args, device)
    argv = [
        *("--model-path", config.model_path),
        *("--served-model-name", served_model_name(config)),
        *("--host", config.host),
        *("--port", str(config.port)),
        *("--device", device),
        *("--dtype", config.dtype),
        *("--kv-cache-dtype", config.kv_cache_dtype),
        *("--page-size", str(config.page_size)),
        *("--log-level", config.log_level),
        "--enable-metrics",
        *("--extra-metric-labels", json.dumps({"role": role})),
        "--enable-cache-report",
        # probes come every second; a worker's last lines should say something else
        *("--uvicorn-access-log-exclude-prefixes", "/pd/ready", "/pd/info", "/metrics"),
    ]
    if config.tool_call_parser:
        argv += ["--tool-call-parser", config.tool_call_parser]
    if config.context_length is not None:
        argv += ["--context-length", str(config.context_length)]
    argv += _sizes(config, device)
    if device == "cpu":
        # an idle scheduler on CPU would spin on a core that others need
        argv += ["--attention-backend", "torch_native", "--sleep-on-idle"]
    if storage is not None:
        argv += _hicache(config, device, storage)
    return argv + config.extra_args


def served_model_name(config: EngineConfig) -> str:
    """The name clients call the model by."""
    return config.served_model_name or Path(config.model_path).resolve().name


def _sizes(config: EngineConfig, device: Device) -> list[str]:
    cpu = device == "cpu"
    total = config.max_total_tokens or (_CPU_MAX_TOTAL_TOKENS if cpu else None)
    fraction = config.mem_fraction or (_CPU_MEM_FRACTION if cpu else None)
    running = config.max_running_requests or (_CPU_MAX_RUNNING_REQUESTS if cpu else None)
    argv: list[str] = []
    if total is not None:
        argv += ["--max-total-tokens", str(total)]
    if fraction is not None:
        argv += ["--mem-fraction-static", str(fraction)]
    if running is not None:
        argv += ["--max-running-requests", str(running)]
    return argv


def _hicache(config: EngineConfig, device: Device, storage: Mapping[str, Any] | str) -> list[str]:
    if device == "cpu" and config.io_backend != "direct":
        raise ConfigError(f"engine.io_backend: {config.io_backend!r} needs a GPU; on CPU use direct")
    if config.layout == "page_first_direct" and config.io_backend != "direct":
        raise ConfigError("engine.layout: page_first_direct needs engine.io_backend direct")
    if config.layout == "page_first" and config.io_backend == "direct":
        raise ConfigError(
            "engine.layout: page_first needs engine.io_backend kernel; with direct use page_first_direct"
        )
    size = (
        ["--hicache-size", str(config.hicache_size_gb)]
        if config.hicache_size_gb
        else ["--hicache-ratio", str(config.hicache_ratio)]
    )
    threshold = {"prefetch_threshold": config.page_size}
    backend, more = (storage, {}) if isinstance(storage, str) else ("dynamic", storage)
    return [
        "--enable-hierarchical-cache",
        *size,
        *("--hicache-mem-layout", config.layout),
        *("--hicache-io-backend", config.io_backend),
        *("--hicache-write-policy", "write_through"),
        *("--hicache-storage-backend", backend),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", json.dumps({**threshold, **more})),
    ]


def _refuse(extra_args: Sequence[str], device: Device) -> None:
    refused = {**_REFUSED, **(_REFUSED_ON_CPU if device == "cpu" else {})}
    for word in extra_args:
        flag = word.partition("=")[0].replace("_", "-")
        if not flag.startswith("--") or flag in _EXACT or len(flag) < 4:
            continue
        hit = flag if flag in refused else _abbreviated(flag, refused)
        if hit is not None:
            raise ConfigError(
                f"SGLang flag {word.partition('=')[0]} cannot be used in a worker: {refused[hit]}"
            )


def _abbreviated(flag: str, refused: Mapping[str, str]) -> str | None:
    """The one refused flag that SGLang could take `flag` for, when nothing else can be meant."""
    longer = [name for name in refused if name.startswith(flag)]
    return longer[0] if longer and len(flag) > len("--hicache") else None
