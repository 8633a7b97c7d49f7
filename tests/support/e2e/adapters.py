"""LoRA adapters of the demo model with random weights, large enough to change every answer."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 8
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def make_adapter(directory: Path, model: Path, seed: int) -> Path:
    """In PEFT's format: both factors of the attention's four matrices in each layer."""
    config = json.loads((model / "config.json").read_text())
    hidden, heads, kv_heads = (
        config["hidden_size"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
    )
    width, kv_width = heads * config["head_dim"], kv_heads * config["head_dim"]
    sizes = {
        "q_proj": (hidden, width),
        "k_proj": (hidden, kv_width),
        "v_proj": (hidden, kv_width),
        "o_proj": (width, hidden),
    }
    dice = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inside, outside) in sizes.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(RANK, inside, generator=dice) / inside**0.5
            weights[f"{place}.lora_B.weight"] = torch.randn(outside, RANK, generator=dice) / RANK**0.5
    directory.mkdir()
    save_file(weights, directory / "adapter_model.safetensors")
    said = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(ATTENTION),
        "base_model_name_or_path": "demo",
        "task_type": "CAUSAL_LM",
    }
    (directory / "adapter_config.json").write_text(json.dumps(said))
    return directory
