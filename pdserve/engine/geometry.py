"""The identity of a worker's KV pages, from SGLang's own resolved arguments and model configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.configs.model_config import AttentionArch, ModelConfig

from pdserve.errors import StartupError
from pdserve.pages import KvGeometry, all_rank_suffixes, model_fingerprint

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
    config = ModelConfig.from_server_args(server_args)
    dtype = str(config.dtype).removeprefix("torch.")
    replicated = config.attention_arch == AttentionArch.MLA
    wanted = server_args.kv_cache_dtype
    geometry = KvGeometry(
        model=model_fingerprint(model_path),
        dtype=dtype,
        kv_dtype=dtype if wanted == "auto" else _KV_DTYPES.get(wanted, wanted),
        page_size=str(server_args.page_size),
        layout=server_args.hicache_mem_layout,
        tp_size="replicated" if replicated else str(server_args.tp_size),
        pp_size=str(server_args.pp_size),
    )
    suffixes = all_rank_suffixes(
        replicated=replicated, tp_size=server_args.tp_size, pp_size=server_args.pp_size
    )
    return KvIdentity(geometry, suffixes)
