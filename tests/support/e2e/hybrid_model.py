"""A tiny model with sliding windows: the demo model's weights under another architecture's name.

Mellum's layers have the shapes and names of Qwen3's. Three of its four layers see a window only; SGLang keeps
these in a host pool of their own.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

WINDOW_TOKENS: Final = 128
SLIDING: Final = "sliding_attention"
FULL: Final = "full_attention"
LAYERS: Final = (SLIDING, FULL, SLIDING, SLIDING)


def make_hybrid_model(demo: Path, directory: Path, layers: tuple[str, ...] = LAYERS) -> Path:
    """`demo`: the tiny demo model's directory. Returns `directory`."""
    shutil.copytree(demo, directory, ignore=shutil.ignore_patterns("pdserve_demo.json"))
    path = directory / "config.json"
    config = json.loads(path.read_text())
    del config["rope_scaling"]
    rope = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    config |= {
        "architectures": ["MellumForCausalLM"],
        "model_type": "mellum",
        "layer_types": list(layers),
        "mlp_layer_types": ["dense"] * len(layers),
        "sliding_window": WINDOW_TOKENS,
        "rope_parameters": {FULL: rope, SLIDING: rope},
        # of layers with experts, of which there are none
        "moe_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
    path.write_text(json.dumps(config))
    return directory
