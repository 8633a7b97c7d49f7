"""A tiny model with sliding windows: the demo model's weights, in layers that a test chooses.

SGLang keeps the layers with a window in a host pool of their own.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

SLIDING: Final = "sliding_attention"
FULL: Final = "full_attention"
WINDOW_TOKENS: Final = 128
LAYERS: Final = (SLIDING, FULL, SLIDING, SLIDING)


def make_hybrid_model(demo: Path, directory: Path, layers: tuple[str, ...] = LAYERS) -> Path:
    """`demo`: the tiny demo model's directory. Returns `directory`."""
    shutil.copytree(demo, directory, ignore=shutil.ignore_patterns("pdserve_demo.json"))
    path = directory / "config.json"
    path.write_text(json.dumps(with_windows(json.loads(path.read_text()), WINDOW_TOKENS, layers)))
    return directory


def with_windows(config: dict[str, Any], window_tokens: int, layers: tuple[str, ...]) -> dict[str, Any]:
    """`config.json` of a Mellum, whose weights have the shapes and names of Qwen3's. `layers`: SLIDING or
    FULL for each.
    """
    config = {name: value for name, value in config.items() if name != "rope_scaling"}
    rope = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    return config | {
        "architectures": ["MellumForCausalLM"],
        "model_type": "mellum",
        "layer_types": list(layers),
        "mlp_layer_types": ["dense"] * len(layers),
        "sliding_window": window_tokens,
        "rope_parameters": {FULL: rope, SLIDING: rope},
        # of layers with experts, of which there are none
        "moe_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
