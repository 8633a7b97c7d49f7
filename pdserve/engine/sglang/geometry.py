"""The identity of a worker's KV pages, from SGLang's own resolved arguments and model configuration.

Speculative decoding adds to a worker's pages: keys and values of the draft model. SGLang 0.5.23 has three
kinds of them (`BaseSpecWorker._build_hicache_draft_plan`):

| draft model | its keys and values |
|---|---|
| NEXTN and MTP layers of the model's own kind (EAGLE) | more layers of each KV page |
| EAGLE, EAGLE3, STANDALONE | a part of each page beside KV, `draft` |
| none: NGRAM | none |

Only how many drafted tokens are accepted depends on them, never an answer. Workers that share pages draft
alike all the same: a page without its draft part would be one of two things under one name.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch, ModelConfig, is_deepseek_dsa
from sglang.srt.model_loader.checkpoint_quantization import resolve_checkpoint_quant_spec

from pdserve.engine.model_dir import fingerprint_of, kept_fingerprint, pool_model
from pdserve.errors import StartupError
from pdserve.kvpool.protocol.page_tag import page_key_id
from pdserve.kvpool.weights.names import is_pool_url
from pdserve.pages import (
    DRAFT,
    KV,
    STATES,
    KvGeometry,
    PagePart,
    adapter_fingerprint,
    all_rank_suffixes,
    model_fingerprint,
    part_suffix,
)

logger = logging.getLogger(__name__)

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

# SGLang's names of host pools beside KV's: of layers with a sliding window, of the index of sparse attention,
# of layers with a state.
WINDOWS: Final = "swa"
INDEX: Final = "indexer"
MAMBA: Final = "mamba"
UNSEEN: Final = frozenset({INDEX, MAMBA})
"""Parts that no test of ours runs with SGLang: they need a GPU."""

# SGLang's --kv-cache-dtype values by the torch dtype of the host pool's pages.
_KV_DTYPES = {"bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
# Quantizations whose configuration in SGLang knows of FP8 KV, and so decides what "auto" is.
_OF_MODELOPT = "modelopt"
_OF_FP8 = ("fp8", "mxfp8")


@dataclass(frozen=True)
class KvIdentity:
    """What names a worker's pages: the geometry, and under which rank suffixes one prompt's pages
    are stored. `parts`: those beside KV. `pairs`: as in `pages.page_hashes`.
    """

    geometry: KvGeometry
    rank_suffixes: list[bytes]
    parts: list[PagePart] = field(default_factory=list)
    pairs: bool = False


def kv_identity(server_args: Any, page_key: str = "", pieces: int = 0) -> KvIdentity:
    """`server_args`: SGLang's arguments, resolved (`server_args.resolved`). `page_key`: pages end with a tag
    made with it, so workers with another one must not share their namespace. `pieces`: `page_pieces`.

    Raises StartupError when the model is neither a local directory nor in a pool (its revision could not be
    told from its name), or its pages are divided between ranks in a way that has no names here.
    """
    model_path, fingerprint = _model(server_args.model_path)
    if server_args.dcp_size > 1:
        raise StartupError("--dcp-size: the pool cannot name the pages of decode context parallelism yet")
    if server_args.attn_cp_size > 1:
        raise StartupError(
            "--attn-cp-size: the pool cannot name the pages of prefill context parallelism yet"
        )
    config = ModelConfig.from_server_args(server_args)
    dtype = str(config.dtype).removeprefix("torch.")
    replicated = config.attention_arch == AttentionArch.MLA
    wanted = server_args.kv_cache_dtype
    # as SGLang's `attn_tp_size`: what is left of the ranks after data parallel attention
    dp_size = max(server_args.attn_dp_size, server_args.dp_size if server_args.enable_dp_attention else 1)
    tp_size = server_args.tp_size // dp_size
    windows = _parts(config, server_args.page_size)
    drafted = drafts(server_args, config, has_parts=bool(windows), pieces=pieces)
    if pieces and windows:
        said = f"engine.page_pieces: this model keeps {', '.join(windows)} state beside its KV pages"
        raise StartupError(f"{said}, which has no pieces: give all workers one --tp-size")
    if pieces and replicated:
        raise StartupError("engine.page_pieces: all ranks of this model hold the same pages: leave it out")
    if pieces:
        _check_pieces(pieces, tp_size, int(config.get_total_num_kv_heads()), server_args.hicache_mem_layout)
        tp_size = pieces
    if drafted.is_part:
        windows[DRAFT] = 0  # of all pages
    geometry = KvGeometry(
        model=fingerprint,
        dtype=dtype,
        kv_dtype=_auto_kv_dtype(config, model_path) if wanted == "auto" else _KV_DTYPES.get(wanted, wanted),
        page_size=str(server_args.page_size),
        layout=server_args.hicache_mem_layout,
        tp_size="replicated" if replicated else str(tp_size),
        pp_size=str(server_args.pp_size),
        options=_options(server_args, page_key, drafted.option),
        parts=KvGeometry.parts_text(windows),
    )

    def suffixes(name: str) -> list[bytes]:
        is_shared = replicated and name not in STATES
        ranks = all_rank_suffixes(replicated=is_shared, tp_size=tp_size, pp_size=server_args.pp_size)
        return [part_suffix(rank, name, geometry.window_pages) for rank in ranks]

    parts = [PagePart(name, pages, suffixes(name)) for name, pages in windows.items()]
    return KvIdentity(geometry, suffixes(KV), parts, drafted.pairs)


def _model(model_path: str) -> tuple[Path, str]:
    """The directory of a model's configuration, and its fingerprint."""
    fingerprint = fingerprint_of(model_path)
    return pool_model(model_path).directory if is_pool_url(model_path) else Path(model_path), fingerprint


def check_cached(server_args: Any) -> None:
    """Raises StartupError for a model of which SGLang keeps no pages in host memory, or pages that have no
    names here: nothing of it would be shared, and only a log line of SGLang's would say so. Warns of `UNSEEN`
    parts.
    """
    config = ModelConfig.from_server_args(server_args)
    if unseen := sorted(UNSEEN & _parts(config, server_args.page_size).keys()):
        said = 'storage of %s pages was never tried with SGLang: compare answers with storage = "none"'
        logger.warning(said, ", ".join(unseen))
    if not config.is_hybrid_swa or config.full_attention_layer_ids:
        return
    if config.full_attention_layer_ids is None:
        raise StartupError(
            "this model compresses its KV cache, which pdserve does not store yet: "
            'set storage = "none" to run it without the pool'
        )
    raise StartupError(
        "all layers of this model have a sliding window, and SGLang then shares no pages: add "
        '--disable-hybrid-swa-memory to engine.extra_args, or set storage = "none"'
    )


def _parts(config: Any, page_size: int) -> dict[str, int]:
    """Parts beside KV, and `PagePart.window_pages` of each. SGLang rounds windows up to whole pages
    (`SWAComponent.full_window_pages`). With --disable-hybrid-swa-memory they are no part.
    """
    parts = {}
    window = config.sliding_window_size or config.attention_chunk_size
    if config.is_hybrid_swa and window:
        parts[WINDOWS] = -(-window // page_size)
    if config.attention_arch == AttentionArch.MLA and is_deepseek_dsa(config.hf_config):
        parts[INDEX] = 0  # of all pages
    if mambaish_config(config) is not None:
        parts[MAMBA] = 1  # the state at the end
    return parts


def _check_pieces(pieces: int, tp_size: int, kv_heads: int, layout: str) -> None:
    """Raises StartupError where ranks do not hold whole pieces of pages."""
    option = f"engine.page_pieces = {pieces}"
    if layout != "page_head":
        raise StartupError(f"{option} needs the layout page_head, and not {layout}")
    if kv_heads % pieces:
        raise StartupError(f"{option}: it must divide the model's {kv_heads} KV heads")
    if pieces % tp_size and not (tp_size % pieces == 0 and pieces == kv_heads):
        raise StartupError(
            f"{option}: a rank of --tp-size {tp_size} holds no whole pieces: take the largest --tp-size of "
            f"the workers that share pages, at most {kv_heads}"
        )


def longest_tokens(server_args: Any) -> int:
    """The longest prompt and answer together. `server_args`: resolved."""
    return int(ModelConfig.from_server_args(server_args).context_len)


def _auto_kv_dtype(config: Any, model_path: Path) -> str:
    """What SGLang keeps KV in when it is not told: FP8 where the checkpoint was quantized for it
    (`configure_kv_cache_dtype`), else the model's dtype.
    """
    method = config.quantization or ""
    if method.startswith(_OF_MODELOPT) or method in _OF_FP8:
        said = _quantization(config, model_path)
        scheme = said.get("kv_cache_scheme")
        algorithm = said.get("kv_cache_quant_algo")
        if method.startswith(_OF_MODELOPT) and isinstance(scheme, dict):
            algorithm = "FP8" if (scheme.get("type"), scheme.get("num_bits")) == ("float", 8) else None
        if str(algorithm).upper() == "FP8":
            return _KV_DTYPES["fp8_e4m3"]
    return str(config.dtype).removeprefix("torch.")


def _quantization(config: Any, model_path: Path) -> dict[str, Any]:
    """The checkpoint's own word on it: in config.json, or where ModelOpt first wrote it."""
    spec = resolve_checkpoint_quant_spec(config.hf_config)
    if spec is not None:
        declared: dict[str, Any] = spec.config
        return declared
    written = model_path / "hf_quant_config.json"
    found: dict[str, Any] = json.loads(written.read_text(encoding="utf-8")) if written.is_file() else {}
    nested: dict[str, Any] = found.get("quantization", found)
    return nested


def _options(server_args: Any, page_key: str, drafted: str) -> str:
    """Settings beyond the model's files that change its keys and values, those that are set, readable."""
    found = {name: getattr(server_args, name) for name in _VALUE_OPTIONS}
    if server_args.load_format == "dummy":
        found["load_format"] = "dummy"
    found["lora_paths"] = sorted(_adapter(entry) for entry in _entries(server_args.lora_paths))
    found["page_key"] = page_key_id(page_key) if page_key else None
    overrides = json.loads(server_args.json_model_override_args or "{}")
    found["json_model_override_args"] = json.dumps(overrides, sort_keys=True) if overrides else None
    found["draft"] = drafted
    return ",".join(f"{name}={value}" for name, value in sorted(found.items()) if value)


def _entries(lora_paths: Any) -> list[Any]:
    if isinstance(lora_paths, dict):
        return [f"{name}={path}" for name, path in lora_paths.items()]
    return list(lora_paths or [])


def _adapter(entry: Any) -> str:
    """Name, path and fingerprint of an adapter as --lora-paths gives it: PATH, NAME=PATH, a mapping, or a
    LoRARef. SGLang makes the adapter's id, a part of its pages' keys, of name and path
    (`LoRARef.deterministic_id`): workers share its pages only where both agree.
    """
    if isinstance(entry, str):
        name, path = entry.split("=", 1) if "=" in entry else (entry, entry)
    elif isinstance(entry, dict):
        name, path = entry["lora_name"], entry["lora_path"]
    else:
        name, path = entry.lora_name, entry.lora_path
    if not Path(path).is_dir():
        raise StartupError(f"LoRA adapter {path} is no local directory: download it first, and give its path")
    return f"{name}={path}@{adapter_fingerprint(Path(path))}"


WITHOUT_DRAFTS: Final = frozenset({None, "NGRAM"})
_OF_PAIRS: Final = frozenset({"EAGLE", "EAGLE3"})  # SpeculativeAlgorithm.is_eagle


@dataclass(frozen=True)
class Drafts:
    """Of a worker's draft model. All false where it has none."""

    is_part: bool = False
    """Its keys and values are a part of their own."""
    pairs: bool = False
    """See `pages.page_hashes`."""
    option: str = ""
    """What is said of it in the geometry."""


def drafts(server_args: Any, config: Any, *, has_parts: bool, pieces: int) -> Drafts:
    """`server_args`: resolved. `config`: of the model whose tokens are drafted. `has_parts`: it has parts
    beside KV. `pieces`: as of `kv_identity`.

    Raises StartupError for a draft model whose keys and values cannot be stored.
    """
    algorithm = server_args.speculative_algorithm
    if algorithm in WITHOUT_DRAFTS or not server_args.enable_hierarchical_cache:
        return Drafts()
    option = f"--speculative-algorithm {algorithm}"
    path = Path(server_args.speculative_draft_model_path or "")
    if not server_args.speculative_draft_model_path or not path.is_dir():
        raise StartupError(
            f"{option}: draft model {server_args.speculative_draft_model_path!r} is no local directory: "
            "download it first, and give its path as --speculative-draft-model-path"
        )
    if pieces or has_parts:
        why = "engine.page_pieces is set" if pieces else "this model keeps state beside its KV pages"
        raise StartupError(
            f"{option}: {why}, and pdserve has not seen SGLang store both: "
            + ("leave one of them out" if pieces else 'set storage = "none"')
        )
    own = ModelConfig.from_server_args(server_args, model_path=str(path), is_draft_model=True)
    is_part = algorithm != "EAGLE" or not own.num_nextn_predict_layers
    if is_part:
        _check_part(option, own, config, server_args.tp_size)
    said = [algorithm]
    if path.resolve() != Path(server_args.model_path).resolve():
        said.append(kept_fingerprint(path, model_fingerprint))
    if server_args.speculative_draft_kv_cache_dtype:
        said.append(server_args.speculative_draft_kv_cache_dtype)
    return Drafts(is_part, algorithm in _OF_PAIRS, ":".join(said))


def _check_part(option: str, own: Any, config: Any, tp_size: int) -> None:
    """Raises StartupError where a draft model's keys and values are no part that all ranks store."""
    if own.is_hybrid_swa:
        raise StartupError(
            f'{option}: the draft has sliding windows, which pdserve does not store: set storage = "none"'
        )
    is_shared = config.attention_arch == AttentionArch.MLA
    if is_shared and own.attention_arch != AttentionArch.MLA and tp_size > 1:
        raise StartupError(
            f"{option}: the ranks of this model share their pages, and those of the draft do not: SGLang "
            'then stores the draft of one rank alone. Take --tp-size 1, or storage = "none"'
        )
