"""Contenders of other engines and other stacks, which serve the same loads. Pure.

| name | what it is |
|---|---|
| `dynamo` | NVIDIA Dynamo's frontend and KV router with one aggregated worker of SGLang, on a pool node |
| `dynamo-disagg` | the same with a prefill and a decode worker; KV goes between them by Mooncake over TCP |
| `vllm` | vLLM alone, asked directly |
| `vllm-cpu` | vLLM with LMCache and its own memory, asked directly; it has the pool's memory too |
| `vllm-disk` | vLLM with LMCache, its own memory and its own disk tier, asked directly |
| `vllm-pool` | vLLM with LMCache, its own memory and a pool node, asked directly |

Workers of Dynamo have the sizes of those of `contenders`. vLLM's cache holds as many tokens as SGLang's, and
LMCache's memory as many as SGLang's host memory. LMCache stores nothing of a step's tokens that have no room
there at once, so where a tier is below it keeps half of that memory free (`HALF_FREE`).

They need environments of their own, which launch/dynamo.sh and launch/vllm.sh make in a checkout.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.serving.contenders import RESERVED, Contender, Setting
from pdserve.sizes import parse_bytes

DYNAMO: Final = {"dynamo": "agg", "dynamo-disagg": "disagg"}
"""Names, and what launch/dynamo.sh calls them."""
DYNAMO_PORTS: Final = (0, 100, 101, 200, 201, 300, 301)
"""Ports that launch/dynamo.sh listens on, from the one it is given."""
VLLM: Final = ("vllm", "vllm-cpu", "vllm-disk", "vllm-pool")
FOREIGN: Final = (*DYNAMO, *VLLM)
DYNAMO_ENVIRONMENT: Final = ".venv-dynamo"
VLLM_ENVIRONMENT: Final = ".venv-vllm"
ENVIRONMENTS: Final[Mapping[str, tuple[Collection[str], tuple[str, ...]]]] = {
    DYNAMO_ENVIRONMENT: (DYNAMO, ("ai-dynamo", "ai-dynamo-runtime")),
    VLLM_ENVIRONMENT: (VLLM, ("vllm", "vllm-cpu", "lmcache", "torch")),
}
"""Directories of a checkout: whose they are, and the packages whose versions are kept with results."""
GIB: Final = 1 << 30
VLLM_ENV: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # by its default one of two processors would not compute
    "HF_HUB_OFFLINE": "1",
    "VLLM_API_KEY": "",  # asked directly, it asks for no token
}
ALONE: Final = "none"
HALF_FREE: Final = ("--eviction-trigger-watermark", "0.5", "--eviction-ratio", "0.5")
"""By its defaults a fifth is free, and a prompt that is longer is never stored."""


def dynamo_argv(name: str, setting: Setting, script: Path, port: int) -> list[str]:
    """The command line that serves a Dynamo contender at `port`. `script`: launch/dynamo.sh."""
    sizes = {
        "--page-size": setting.page_size,
        "--dtype": setting.dtype,
        "--max-total-tokens": setting.device_tokens,
        "--hicache-ratio": setting.host_ratio,
        RESERVED: setting.page_size,
    }
    return [
        *(str(script), DYNAMO[name], "--model", setting.model_path, "--port", str(port), "--workers", "1"),
        *("--run-dir", f"{setting.directory}/{name}", "--arena-dir", f"{setting.arena_directory}/{name}"),
        *("--pool-capacity", setting.pool_capacity, "--"),
        *(str(word) for pair in sizes.items() for word in pair),
        *setting.extra_args,
    ]


def vllm_contender(
    name: str, setting: Setting, python: Path, router_port: int, worker_port: int
) -> Contender:
    """One of VLLM. `python`: the interpreter with vLLM and LMCache."""
    directory = f"{setting.directory}/{name}"
    blocks = setting.device_tokens // setting.page_size
    worker: dict[str, Any] = {
        "python": str(python),
        "model_path": setting.model_path,
        "port": worker_port,
        "args": [
            *("--enforce-eager", "--no-enable-log-requests", "--dtype", setting.dtype),
            *("--block-size", str(setting.page_size), "--max-model-len", str(setting.device_tokens)),
            *("--num-gpu-blocks-override", str(blocks + 1)),  # one block is never used
            *("--gpu-memory-utilization", "0.1"),
            *setting.extra_args,
        ],
        "env": VLLM_ENV,
    }
    tables: dict[str, Any] = {
        "cluster": {"name": name, "run_dir": directory, "restart": "never", "stop_on_loss": True},
        "router": {**setting.router, "port": router_port},
        "vllm": [worker],
    }
    if name == "vllm":
        worker["lmcache"] = ALONE
    else:
        tables["lmcache"] = [{"python": str(python), **_lmcache(name, setting)}]
    if name == "vllm-pool":
        arena = {"arena_dir": f"{setting.arena_directory}/{name}", "keep": False}
        tables["pool"] = [{"capacity_bytes": setting.pool_capacity, **arena}]
    return Contender(name, tables, worker_port, router_port)


def _lmcache(name: str, setting: Setting) -> dict[str, Any]:
    memory_bytes = int(setting.host_ratio * setting.device_tokens * setting.kv_token_bytes)
    args = ["--supported-transfer-mode", "auto"]
    if name == "vllm-cpu":
        memory_bytes += parse_bytes(setting.pool_capacity)
    else:
        args += HALF_FREE
    if name == "vllm-disk":
        disk = {"type": "fs_native", "base_path": f"{setting.directory}/{name}/pages"}
        args += ["--l2-adapter", json.dumps(disk)]
    return {
        "l1_size_gb": memory_bytes / GIB or 1.0,
        "chunk_size": setting.page_size,
        "storage": "pool" if name == "vllm-pool" else "none",
        "args": args,
    }
