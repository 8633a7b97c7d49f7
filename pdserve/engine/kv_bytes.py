"""Bytes that a token's keys and values take on one rank, by a model's config.json. Pure.

    attention with heads   layers x kv_heads x (head_dim + v_head_dim) x dtype
    latent attention       layers x (kv_lora_rank + qk_rope_head_dim) x dtype

It sizes the cache of a worker on a CPU, where SGLang would take what memory is left. On GPUs SGLang measures.
Read against SGLang 0.5.23: `configs/model_config.py` (heads, hybrid models).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pdserve.errors import ConfigError

WITH_SCALES: Final = frozenset({"mxfp8", "nvfp4", "fp4_mx_block16"})
"""KV types with scales beside the values, which SGLang keeps in host memory and never stores."""
_TEXT_PARTS: Final = ("text_config", "llm_config", "language_config")
_DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
_KV_DTYPE_BYTES: Final = {"bf16": 2, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "float32": 4}
_KEY_VALUE_LAYERS: Final = ("full_attention", "attention", "sliding_attention", "chunked_attention")
# SGLang's `is_hybrid_swa_model`: for these, layers with a window have a pool of their own
_WINDOW_POOLS: Final = (
    *("GptOss", "Llama4", "Gemma4", "MiMoV2", "Step3p5", "Step3p7", "Laguna", "Mellum", "DeepseekV4"),
    *("GraniteSWA", "GraniteMoeSWA"),
)
_WINDOW_SHARE: Final = 0.8
"""Tokens in the pool of layers with a window, over those in the main pool: SGLang's ratio."""


def token_bytes(config: Mapping[str, Any], dtype: str = "auto", kv_cache_dtype: str = "auto") -> int:
    """On the average over a full device. `config`: the object in config.json; `dtype`: of activations, where
    it is not the model's. Raises ConfigError where it does not describe a language model.
    """
    text: Mapping[str, Any] = next((config[part] for part in _TEXT_PARTS if part in config), config)
    architecture = str(next(iter(config.get("architectures") or ()), ""))
    try:
        layers, heads = int(text["num_hidden_layers"]), int(text["num_attention_heads"])
        kinds = _layer_kinds(text, layers)
        sliding = kinds.count("sliding_attention") + kinds.count("chunked_attention")
        sliding = sliding if architecture.startswith(_WINDOW_POOLS) else 0
        other = sum(kind not in _KEY_VALUE_LAYERS for kind in kinds)
        latent = int(text.get("kv_lora_rank") or 0)
        if latent:
            numbers = latent + int(text["qk_rope_head_dim"])
        else:
            head_dim = int(text.get("head_dim") or int(text["hidden_size"]) // heads)
            kv_heads = int(text.get("num_key_value_heads") or heads)
            numbers = kv_heads * (head_dim + int(text.get("v_head_dim") or head_dim))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"config.json does not describe a language model: {error}") from None
    own_bytes = _DTYPE_BYTES[dtype] if dtype in _DTYPE_BYTES else _own_dtype_bytes(config, text)
    layer_bytes = numbers * _KV_DTYPE_BYTES.get(kv_cache_dtype, own_bytes)
    return (layers - sliding - other) * layer_bytes + int(_WINDOW_SHARE * sliding * layer_bytes)


def _layer_kinds(text: Mapping[str, Any], layers: int) -> list[str]:
    if kinds := text.get("layer_types"):
        return [str(kind) for kind in kinds][:layers]
    if every := text.get("full_attention_interval"):  # Qwen3-Next: the last of each group
        return ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]
    return ["full_attention"] * layers


def _own_dtype_bytes(config: Mapping[str, Any], text: Mapping[str, Any]) -> int:
    """Of a number in the KV cache, as the checkpoint says."""
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
