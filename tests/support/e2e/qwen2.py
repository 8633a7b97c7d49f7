"""The demo model's weights under the names of Qwen2's layers, which have no norms of queries and keys."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file

_SHARP: Final = 2.0  # of queries and keys: stands for the norms' weights


def qwen2_weights(demo: Path) -> dict[str, torch.Tensor]:
    """`demo`: the tiny demo model's directory."""
    found = load_file(demo / "model.safetensors")
    weights = {
        name: one for name, one in found.items() if not name.endswith(("q_norm.weight", "k_norm.weight"))
    }
    for part, scale in (("q_proj", _SHARP), ("k_proj", _SHARP), ("v_proj", 1.0)):
        for name in [name for name in weights if name.endswith(f"{part}.weight")]:
            weights[name] = weights[name] * scale
            weights[name.replace("weight", "bias")] = torch.zeros(len(weights[name]), dtype=torch.bfloat16)
    return weights
