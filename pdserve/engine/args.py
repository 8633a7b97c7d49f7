"""SGLang's command line for a worker: a pure function of configuration, role, device and storage.

What the hand-off between workers rests on, and the flag that provides it:

| need | flag |
|---|---|
| every computed page goes to the pool | `--hicache-write-policy write_through` |
| a hand-off's pages are waited for, not recomputed | `--hicache-storage-prefetch-policy wait_complete` |
| one page is worth fetching | `prefetch_threshold` = page size, in the storage backend's extra config |
| a worker's own counts of cached tokens | `--enable-cache-report`, `--enable-metrics` |
| one process that tokenises, serves and tracks requests | `--tokenizer-worker-num 1` (SGLang's default) |

A user's own flags come last, and SGLang takes the last of a repeated flag, so they win. `NEEDED` names the
arguments that must stay as they are here: the start compares their resolved values (`sglang/server_args.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pdserve.engine.config import EngineConfig, Role
from pdserve.engine.device import Device
from pdserve.engine.handoff import DirectConfig, direct_argv
from pdserve.errors import ConfigError
from pdserve.kvpool.weights.names import is_pool_url, parse_url
from pdserve.security.tls import TlsConfig

Storage = Mapping[str, Any] | Literal["file", "mooncake"] | None
"""Extra config of the `dynamic` storage backend; a backend of SGLang's own; or None, plain SGLang without
HiCache.
"""

_CPU_MAX_TOTAL_TOKENS = 40_000
_CPU_MAX_KV_BYTES = 512 * 2**20  # HiCache takes twice as much again: two workers and a node fit into 8 GB
# SGLang takes this share of the memory that is free at its start. Its tokens bound the KV cache anyway;
# a small share would only make a start fail when a neighbour takes memory meanwhile.
_CPU_MEM_FRACTION = 0.9
_TEXT_PARTS = ("text_config", "llm_config", "language_config")  # of a multimodal model's config.json
_HOST_RATIO = {"cache": 2.0, "buffer_only": 1.2}  # SGLang's own host pool as a multiple of the device's
_CPU_MAX_RUNNING_REQUESTS = 128  # bounds the request-to-token table: this many rows of the context length

_OURS = "pages would no longer reach the other workers"
_CHILDREN = "a worker's processes are its own children"
NEEDED: Mapping[str, str] = {
    "model_path": "set engine.model_path",
    "host": "set engine.host",
    "port": "set engine.port",
    "device": "set engine.device",
    "served_model_name": "set engine.served_model_name",
    "disable_radix_cache": _OURS,
    "radix_cache_backend": _OURS,
    "enable_hierarchical_cache": _OURS,
    "hicache_storage_backend": "the pool is the storage backend",
    "hicache_storage_backend_extra_config": "the pool is the storage backend; set pool options instead",
    "hicache_write_policy": _OURS,
    "hicache_host_memory_mode": "set engine.hicache_host_memory_mode",
    "hicache_storage_prefetch_policy": "decode workers would recompute what is being fetched",
    "enable_lmcache": _OURS,
    "enable_flexkv": _OURS,
    "prefill_only_disable_kv_cache": "it leaves no pages to share",
    "elastic_ep_backend": "ranks that come and go would store pages under other names",
    "strip_thinking_cache": "a conversation's next turn would wait for pages that are never stored",
    "enable_unified_cache_external_linker": _OURS,
    "disaggregation_mode": "set handoff",
    "disaggregation_transfer_backend": "set direct.transfer",
    "disaggregation_bootstrap_port": "set direct.bootstrap_port",
    "disaggregation_decode_enable_radix_cache": _OURS,
    "disaggregation_decode_enable_offload_kvcache": "a decode worker's pages go to the pool by HiCache",
    "api_key": "set cluster_token",
    "admin_api_key": "set cluster_token",
    "ssl_certfile": "set tls.certificate",
    "ssl_keyfile": "set tls.key",
    "ssl_ca_certs": "set tls.client_ca",
    "enable_ssl_refresh": "the files of tls are read again when they change",
    "enable_metrics": "a worker reports SGLang's times and counts",
    "enable_cache_report": "a worker reports SGLang's counts of cached tokens",
    "tokenizer_worker_num": "a worker tracks its requests in one process",
    "skip_tokenizer_init": "a worker tokenises the clients' requests",
    "enable_http2": "a worker's routes run in SGLang's uvicorn server",
    "grpc_mode": "a worker serves HTTP",
    "smg_grpc_mode": "a worker serves HTTP",
    "encoder_only": "a worker generates text",
    "use_ray": _CHILDREN,
}
"""SGLang's arguments that no flag of a user may change, with the reason or the option to set instead."""
NEEDED_ON_CPU: Mapping[str, str] = {
    "attn_dp_size": "SGLang's attention on CPU has no data parallelism, run more workers instead",
    "hicache_io_backend": "on CPU only direct works",
    "enable_torch_compile": "torch's compiler is off on CPU, so that a worker starts sooner",
    "lora_backend": "on CPU only torch_native works",
}


def needed(device: Device) -> Mapping[str, str]:
    """The arguments that must stay as a worker sets them on `device`."""
    return {**NEEDED, **(NEEDED_ON_CPU if device == "cpu" else {})}


def server_argv(
    config: EngineConfig,
    role: Role,
    device: Device,
    storage: Storage,
    tls: TlsConfig | None = None,
    direct: DirectConfig | None = None,
) -> list[str]:
    """The words after `sglang serve` for one worker. `direct`: None where pages are handed over by the pool.

    Raises ConfigError where options of `config` exclude each other on this device.
    """
    argv = [
        *("--model-path", config.model_path),
        *("--served-model-name", served_model_name(config)),
        *("--host", config.host),
        *("--port", str(config.port)),
        *("--device", device),
        *("--dtype", config.dtype),
        *("--page-size", str(config.page_size)),
        *("--log-level", "warning"),
        *("--tool-call-parser", "auto"),  # by the chat template
        "--enable-metrics",
        *("--extra-metric-labels", json.dumps({"role": role})),
        "--enable-cache-report",
        # probes come every second; a worker's last lines should say something else
        *("--uvicorn-access-log-exclude-prefixes", "/pd/ready", "/pd/info", "/metrics"),
    ]
    if "--enable-priority-scheduling" in config.extra_args:
        # without it SGLang puts requests without a priority behind all others, those below 0 too
        argv += ["--default-priority-value", "0"]
    if tls is not None and tls.as_server:
        argv += ["--ssl-certfile", str(tls.certificate), "--ssl-keyfile", str(tls.key)]
        # unused (sglang/http_server.py): without one SGLang warns that nothing is checked
        argv += ["--ssl-ca-certs", str(tls.client_ca or tls.certificate)]
    argv += _sizes(config, device)
    if device == "cpu":
        # an idle scheduler on CPU would spin on a core that others need
        argv += ["--attention-backend", "torch_native", "--lora-backend", "torch_native", "--sleep-on-idle"]
        argv += ["--disable-custom-all-reduce"]
    elif role == "prefill":
        # it answers with one token, so that graphs of decoding are never run: they cost memory and a start
        argv += ["--disable-decode-cuda-graph"]
    if storage is not None:
        argv += _hicache(config, device, storage)
    if direct is not None:
        argv += direct_argv(direct, role)
    return argv + config.extra_args


def served_model_name(config: EngineConfig) -> str:
    """The name clients call the model by. Raises ConfigError for a URL that is none."""
    if config.served_model_name:
        return config.served_model_name
    if is_pool_url(config.model_path):
        return parse_url(config.model_path).model.name  # of all revisions: clients need not know which it is
    return Path(config.model_path).resolve().name


def cpu_total_tokens(config: EngineConfig, model: Mapping[str, Any]) -> int:
    """`max_total_tokens` on a CPU where it is not set: SGLang would take what memory is left. `model`: the
    object in config.json.
    """
    try:
        each = _token_bytes(model, config.dtype)
    except (KeyError, TypeError, ValueError):
        return _CPU_MAX_TOTAL_TOKENS  # of an unknown kind: SGLang will say what is wrong with it
    fitting = _CPU_MAX_KV_BYTES // max(1, each) // config.page_size * config.page_size
    return min(_CPU_MAX_TOTAL_TOKENS, max(config.page_size, fitting))


def _token_bytes(model: Mapping[str, Any], dtype: str) -> int:
    """Most that a token's keys and values take: of heads in all layers, or of latent attention. Layers with
    windows or states take less.
    """
    text: Mapping[str, Any] = next((model[part] for part in _TEXT_PARTS if part in model), model)
    layers, heads = int(text["num_hidden_layers"]), int(text["num_attention_heads"])
    if latent := int(text.get("kv_lora_rank") or 0):
        numbers = latent + int(text["qk_rope_head_dim"])
    else:
        head_dim = int(text.get("head_dim") or int(text["hidden_size"]) // heads)
        kv_heads = int(text.get("num_key_value_heads") or heads)
        numbers = kv_heads * (head_dim + int(text.get("v_head_dim") or head_dim))
    own = next((part[key] for part in (text, model) for key in ("dtype", "torch_dtype") if key in part), "")
    return layers * numbers * (4 if (own if dtype == "auto" else dtype) == "float32" else 2)


def _sizes(config: EngineConfig, device: Device) -> list[str]:
    total = config.max_total_tokens or (_CPU_MAX_TOTAL_TOKENS if device == "cpu" else None)
    argv = [] if total is None else ["--max-total-tokens", str(total)]
    if device == "cpu":
        argv += ["--mem-fraction-static", str(_CPU_MEM_FRACTION)]
        argv += ["--max-running-requests", str(_CPU_MAX_RUNNING_REQUESTS)]
    return argv


def _hicache(config: EngineConfig, device: Device, storage: Mapping[str, Any] | str) -> list[str]:
    layout, io_backend = _copies(config, device)
    backend, more = (storage, {}) if isinstance(storage, str) else ("dynamic", storage)
    return [
        "--enable-hierarchical-cache",
        *("--hicache-host-memory-mode", config.hicache_host_memory_mode),
        *_host_size(config, device),
        *("--hicache-mem-layout", layout),
        *("--hicache-io-backend", io_backend),
        *("--hicache-write-policy", "write_through"),
        *("--hicache-storage-backend", backend),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", json.dumps(extra_config(config, more))),
    ]


def extra_config(config: EngineConfig, storage: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's extra config of a storage backend: `storage`'s own, and from how much on it fetches."""
    return {"prefetch_threshold": config.page_size, **storage}


def _copies(config: EngineConfig, device: Device) -> tuple[str, str]:
    """(layout, I/O backend). Raises ConfigError for a layout that the device or `page_pieces` does not take.

    On a GPU the backend "direct" would hold up the scheduler at each copy.
    """
    layout = config.layout
    if config.page_pieces:
        if layout not in ("auto", "page_head"):
            raise ConfigError("engine.page_pieces needs engine.layout page_head")
        return "page_head", "kernel"
    if layout == "page_head":
        raise ConfigError("engine.layout: page_head is for engine.page_pieces, which is 0")
    if layout == "auto":
        layout = "page_first_direct" if device == "cpu" else "page_first"
    if layout == "page_first" and device == "cpu":
        raise ConfigError("engine.layout: page_first needs a GPU; on CPU use page_first_direct")
    return layout, "direct" if device == "cpu" or layout == "page_first_direct" else "kernel"


def _host_size(config: EngineConfig, device: Device) -> list[str]:
    if config.hicache_size_gb:
        return ["--hicache-size", str(config.hicache_size_gb)]
    if config.hicache_ratio is None and device != "cpu":
        return []  # an explicit ratio would switch off SGLang's own look at what the machine has
    ratio = config.hicache_ratio or _HOST_RATIO[config.hicache_host_memory_mode]
    return ["--hicache-ratio", str(ratio)]
