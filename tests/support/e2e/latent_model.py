"""A tiny model with latent attention (MLA), as DeepSeek's: random weights, in a Hugging Face directory.

Its attention is sharp and its layers outweigh the embeddings, so that a wrong cache gives other tokens.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LAYERS = 3
LATENT = 64
ROTARY = 16
_HIDDEN, _INNER, _HEADS, _QUERY, _PLAIN, _VALUE, _WORDS = 128, 256, 4, 48, 32, 32, 4096
TOKEN_BYTES = LAYERS * (LATENT + ROTARY) * 4
"""Of a token's latent vectors, in float32."""


def make_latent_model(demo: Path, directory: Path, seed: int = 0) -> Path:
    """Write the model; its tokenizer is that of the demo model in `demo`."""
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, directory / name)
    (directory / "config.json").write_text(json.dumps(_config()))
    random = torch.Generator().manual_seed(seed)
    tensors = {name: _draw(name, shape, random) for name, shape in _shapes()}
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory


def _draw(name: str, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.full(shape, 2.0 if "_a_layernorm" in name else 1.0, dtype=torch.bfloat16)
    deviation = 0.3 if "embed" in name else 2.0 / shape[1] ** 0.5 if "lm_head" in name else shape[1] ** -0.5
    return (torch.randn(shape, generator=random) * deviation).to(torch.bfloat16)


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (_WORDS, _HIDDEN)
    yield "model.norm.weight", (_HIDDEN,)
    yield "lm_head.weight", (_WORDS, _HIDDEN)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        yield name + "input_layernorm.weight", (_HIDDEN,)
        yield name + "post_attention_layernorm.weight", (_HIDDEN,)
        yield name + "mlp.gate_proj.weight", (_INNER, _HIDDEN)
        yield name + "mlp.up_proj.weight", (_INNER, _HIDDEN)
        yield name + "mlp.down_proj.weight", (_HIDDEN, _INNER)
        name += "self_attn."
        yield name + "q_a_proj.weight", (_QUERY, _HIDDEN)
        yield name + "q_a_layernorm.weight", (_QUERY,)
        yield name + "q_b_proj.weight", (_HEADS * (_PLAIN + ROTARY), _QUERY)
        yield name + "kv_a_proj_with_mqa.weight", (LATENT + ROTARY, _HIDDEN)
        yield name + "kv_a_layernorm.weight", (LATENT,)
        yield name + "kv_b_proj.weight", (_HEADS * (_PLAIN + _VALUE), LATENT)
        yield name + "o_proj.weight", (_HIDDEN, _HEADS * _VALUE)


def _config() -> dict[str, Any]:
    """`config.json` of a DeepSeek-V2 whose layers are all dense. SGLang on a CPU knows its rotary scaling
    only.
    """
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "dtype": "bfloat16",
        "vocab_size": _WORDS,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "moe_intermediate_size": _INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "q_lora_rank": _QUERY,
        "kv_lora_rank": LATENT,
        "qk_nope_head_dim": _PLAIN,
        "qk_rope_head_dim": ROTARY,
        "v_head_dim": _VALUE,
        "first_k_dense_replace": LAYERS,
        "moe_layer_freq": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "max_position_embeddings": 8192,
        "rope_theta": 10_000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "use_cache": True,
    }
