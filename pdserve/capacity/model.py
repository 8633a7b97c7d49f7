"""Facts of a model from its config.json, and what follows for its KV pages. Pure.

Bytes of a token on one rank:

    attention with heads   layers / pp x max(1, kv_heads / tp) x (head_dim + v_head_dim) x dtype
    latent attention       layers / pp x (kv_lora_rank + qk_rope_head_dim) x dtype
    what drafts tokens     its own layers, in the same way (drafts.py)

Read against SGLang 0.5.23: `configs/model_config.py` (heads, hybrid models, context),
`arg_groups/overrides.py` and `arg_groups/model_overrides/` (page sizes).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from pdserve.capacity.facts import Draft, Gpu, Model, WorkerNeed
from pdserve.errors import ConfigError

DEFAULT_PAGE_TOKENS: Final = 64
_TEXT_PARTS: Final = ("text_config", "llm_config", "language_config")
_DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
_KV_DTYPE_BYTES: Final = {"bf16": 2, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "float32": 4}
WITH_SCALES: Final = frozenset({"mxfp8", "nvfp4", "fp4_mx_block16"})
"""KV types with scales beside the values, which SGLang keeps in host memory and never stores."""
_KEY_VALUE_LAYERS: Final = ("full_attention", "attention", "sliding_attention", "chunked_attention")
# SGLang's `is_hybrid_swa_model`: for these, layers with a window have a pool of their own
_WINDOW_POOLS: Final = (
    *("GptOss", "Llama4", "Gemma4", "MiMoV2", "Step3p5", "Step3p7", "Laguna", "Mellum", "DeepseekV4"),
    *("GraniteSWA", "GraniteMoeSWA"),
)
_WINDOW_SHARE: Final = 0.8
"""Tokens in the pool of layers with a window, over those in the main pool: SGLang's ratio."""
_BACKEND_PAGES: Final[Mapping[str, tuple[int, ...]]] = {
    "flashmla": (64,),
    "trtllm_mla": (64, 32),
    "cutedsl_mla": (64, 32),
    "trtllm_mha": (64, 16, 32, 128),
    "hpc_ops": (64,),
}
"""Page sizes that an attention backend takes; it changes another to the first."""


def model_facts(name: str, config: Mapping[str, Any], weight_bytes: int) -> Model:
    """`config`: the object in config.json. Raises ConfigError where it does not describe a language model."""
    text: Mapping[str, Any] = next((config[part] for part in _TEXT_PARTS if part in config), config)
    architecture = str(next(iter(config.get("architectures") or ()), ""))
    try:
        layers, heads = int(text["num_hidden_layers"]), int(text["num_attention_heads"])
        context_tokens = _context_tokens(text)
        kinds = _layer_kinds(text, layers)
        sliding = kinds.count("sliding_attention") + kinds.count("chunked_attention")
        sliding = sliding if architecture.startswith(_WINDOW_POOLS) else 0
        other = sum(kind not in _KEY_VALUE_LAYERS for kind in kinds)
        latent = int(text.get("kv_lora_rank") or 0)
        if latent:
            kv_heads, token_values = 0, latent + int(text["qk_rope_head_dim"])
        else:
            kv_heads = int(text.get("num_key_value_heads") or heads)
            head_dim = int(text.get("head_dim") or int(text["hidden_size"]) // heads)
            token_values = head_dim + int(text.get("v_head_dim") or head_dim)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{name}: its config.json does not describe a language model: {error}") from None
    return Model(
        name=name,
        architecture=architecture,
        weight_bytes=weight_bytes,
        layers=layers - sliding - other,
        kv_heads=kv_heads,
        token_values=token_values,
        dtype_bytes=_dtype_bytes(config, text),
        context_tokens=context_tokens,
        sliding_layers=sliding,
        other_layers=other,
        has_indexer="index_head_dim" in text,
        mtp_layers=int(text.get("num_nextn_predict_layers") or 0),
    )


def token_bytes(model: Model, worker: WorkerNeed) -> int:
    """Bytes that a token's keys and values take on one rank, on the average over a full device."""
    main, windows, drafts = part_bytes(model, worker)
    return main + int(_WINDOW_SHARE * windows) + drafts


def part_bytes(model: Model, worker: WorkerNeed) -> tuple[int, int, int]:
    """The same in the main pool, in that of layers with a window, and in that of the draft model. Each has
    pages of its own.
    """
    packed = apart = 0
    if model.draft is not None:
        drafted = _layer_bytes(model.draft, worker, model.draft.layers, worker.draft_kv_cache_dtype)
        packed, apart = (drafted, 0) if model.draft.is_packed else (0, drafted)
    in_main = model.layers + (model.sliding_layers if worker.one_pool else 0)
    in_windows = 0 if worker.one_pool else model.sliding_layers
    main = _layer_bytes(model, worker, in_main) + packed
    return main, _layer_bytes(model, worker, in_windows), apart


def _layer_bytes(model: Model | Draft, worker: WorkerNeed, layers: int, kv_dtype: str = "") -> int:
    heads = max(1, model.kv_heads // (worker.tp // worker.attention_dp))
    size = _KV_DTYPE_BYTES.get(kv_dtype or worker.kv_cache_dtype, model.dtype_bytes)
    return -(-layers // worker.pp) * (heads if model.kv_heads else 1) * model.token_values * size


def rank_weight_bytes(model: Model, worker: WorkerNeed) -> int:
    """Of the model and of what drafts for it, on one rank."""
    drafts = model.draft.weight_bytes if model.draft is not None else 0
    return model.weight_bytes // (worker.tp * worker.pp) + drafts // worker.tp


def page_sizes(model: Model, gpu: Gpu | None, backends: Iterable[str]) -> tuple[tuple[int, ...], str]:
    """(page sizes that can be, the best first; why); none: any can be. SGLang changes others silently."""
    if model.architecture.startswith("DeepseekV4"):
        return (256,), f"{model.architecture} takes no other"
    if model.architecture.startswith("MiniMaxM3"):
        return (128,), f"{model.architecture} takes no other"
    if model.has_indexer:
        return (64,), "sparse attention takes no other"
    for backend in backends:
        if backend == "fa4" and model.kv_heads and gpu is not None and gpu.is_sm100:
            return (128,), "--attention-backend fa4 takes no other here"
        if backend in _BACKEND_PAGES:
            return _BACKEND_PAGES[backend], f"--attention-backend {backend} takes no other"
    if model.kv_heads and gpu is not None and gpu.is_sm100 and not tuple(backends):
        return _BACKEND_PAGES["trtllm_mha"], f"{gpu.name} runs attention backend trtllm_mha"
    return (), ""


def _layer_kinds(text: Mapping[str, Any], layers: int) -> list[str]:
    if kinds := text.get("layer_types"):
        return [str(kind) for kind in kinds][:layers]
    if every := text.get("full_attention_interval"):  # Qwen3-Next: the last of each group
        return ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]
    return ["full_attention"] * layers


def _context_tokens(text: Mapping[str, Any]) -> int:
    """As SGLang's `get_context_length`."""
    scaling = text.get("rope_scaling") or {}
    is_whole = "original_max_position_embeddings" in scaling or scaling.get("rope_type") == "llama3"
    factor = 1.0 if is_whole else float(scaling.get("factor") or 1.0)
    return int(factor * int(text["max_position_embeddings"]))


def _dtype_bytes(config: Mapping[str, Any], text: Mapping[str, Any]) -> int:
    quantization: Mapping[str, Any] = config.get("quantization_config") or {}
    method = str(quantization.get("quant_method", ""))
    if method.startswith("modelopt") or method in ("fp8", "mxfp8"):
        scheme = quantization.get("kv_cache_scheme")
        is_fp8 = isinstance(scheme, dict) and scheme.get("num_bits") == 8
        if is_fp8 or str(quantization.get("kv_cache_quant_algo", "")).upper() == "FP8":
            return 1
    named = next(
        (part[key] for part in (text, config) for key in ("dtype", "torch_dtype") if key in part), ""
    )
    return _DTYPE_BYTES.get(str(named), 2)
