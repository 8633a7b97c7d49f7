"""The identity of a worker's KV pages, from SGLang's own resolved arguments and model configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.configs.model_config import AttentionArch, ModelConfig

from pdserve.errors import StartupError
from pdserve.pages import KvGeometry, adapter_fingerprint, all_rank_suffixes, model_fingerprint

# Arguments of SGLang by which equal model files give other keys and values.
_VALUE_OPTIONS = (
    "quantization",
    "quantization_param_path",
    "modelopt_quant",
    "modelopt_checkpoint_restore_path",
    "quantize_and_serve",
    "rl_quant_profile",
    "uno_lora_path",
)

# SGLang's --kv-cache-dtype values by the torch dtype of the host pool's pages.
_KV_DTYPES = {"bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


@dataclass(frozen=True)
class KvIdentity:
    """What names a worker's pages: the geometry, and under which rank suffixes one prompt's pages
    are stored.
    """

    geometry: KvGeometry
    rank_suffixes: list[bytes]


def kv_identity(server_args: Any) -> KvIdentity:
    """`server_args` is SGLang's resolved ServerArgs.

    Raises StartupError when the model is no local directory: its revision could not be told from its name.
    """
    model_path = Path(server_args.model_path)
    if not model_path.is_dir():
        raise StartupError(
            f"model {server_args.model_path!r} is no local directory: download it first, and give its path"
        )
    if server_args.dcp_size > 1:
        raise StartupError("--dcp-size: the pool cannot name the pages of decode context parallelism yet")
    config = ModelConfig.from_server_args(server_args)
    dtype = str(config.dtype).removeprefix("torch.")
    replicated = config.attention_arch == AttentionArch.MLA
    wanted = server_args.kv_cache_dtype
    # as SGLang's `attn_tp_size`: what is left of the ranks after data and context parallel attention
    cp_size = server_args.attn_cp_size
    dp_size = max(server_args.attn_dp_size, server_args.dp_size if server_args.enable_dp_attention else 1)
    tp_size = server_args.tp_size // dp_size // cp_size
    geometry = KvGeometry(
        model=model_fingerprint(model_path),
        dtype=dtype,
        kv_dtype=dtype if wanted == "auto" else _KV_DTYPES.get(wanted, wanted),
        page_size=str(server_args.page_size),
        layout=server_args.hicache_mem_layout,
        tp_size="replicated" if replicated else str(tp_size),
        pp_size=str(server_args.pp_size),
        options=_options(server_args),
    )
    suffixes = all_rank_suffixes(
        replicated=replicated, tp_size=tp_size, pp_size=server_args.pp_size, cp_size=cp_size
    )
    return KvIdentity(geometry, suffixes)


def _options(server_args: Any) -> str:
    """Settings beyond the model's files that change its keys and values, those that are set, readable."""
    found = {name: getattr(server_args, name) for name in _VALUE_OPTIONS}
    if server_args.load_format == "dummy":
        found["load_format"] = "dummy"
    found["lora_paths"] = sorted(_adapter(entry) for entry in _entries(server_args.lora_paths))
    overrides = json.loads(server_args.json_model_override_args or "{}")
    found["json_model_override_args"] = json.dumps(overrides, sort_keys=True) if overrides else None
    return ",".join(f"{name}={value}" for name, value in sorted(found.items()) if value)


def _entries(lora_paths: Any) -> list[Any]:
    if isinstance(lora_paths, dict):
        return list(lora_paths.values())
    return list(lora_paths or [])


def _adapter(entry: Any) -> str:
    """Fingerprint of an adapter as --lora-paths gives it: PATH, NAME=PATH, a mapping, or a LoRARef."""
    if isinstance(entry, dict):
        entry = entry["lora_path"]
    path = Path(str(getattr(entry, "lora_path", entry)).rpartition("=")[2])
    if not path.is_dir():
        raise StartupError(f"LoRA adapter {path} is no local directory: download it first, and give its path")
    return adapter_fingerprint(path)
