"""A tiny model with a layer that drafts the next token but one (MTP): the demo model's weights under another
architecture's name.

MiMo's layers have the shapes and names of Qwen2's. The layer that drafts is a copy of the last one. It draws
among `ALIKE` tokens as the model does. So one in so many drafted tokens is right by chance. Which ones are
depends on everything that the layer has seen.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

from tests.support.e2e.qwen2 import qwen2_weights

ALIKE: Final = 6
_FIRST: Final = 300  # of the tokens in answers
_NEVER: Final = -90.0
_LAYER: Final = "model.mtp_layers.0."


def make_mtp_model(demo: Path, directory: Path, seed: int = 0) -> Path:
    """`demo`: the tiny demo model's directory. Returns `directory`."""
    shutil.copytree(demo, directory, ignore=shutil.ignore_patterns("pdserve_demo.json"))
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    path.write_text(json.dumps(config))
    weights = qwen2_weights(demo)
    others = torch.ones(config["vocab_size"], dtype=torch.bool)
    others[_FIRST : _FIRST + ALIKE] = False
    weights["lm_head.weight"][others] = 0
    weights["lm_head.weight"][others, 0] = _NEVER
    weights |= _drafting(weights, config, seed)
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory


def _drafting(weights: dict[str, torch.Tensor], config: dict[str, int], seed: int) -> dict[str, torch.Tensor]:
    """The layer that drafts. Coordinate 0 of what it reads stays as in the token's embedding."""
    last = f"model.layers.{config['num_hidden_layers'] - 1}."
    hidden = config["hidden_size"]
    random = torch.Generator().manual_seed(seed)
    of_states = torch.randn(hidden, hidden, generator=random) / hidden**0.5
    of_states[0] = 0
    read = {"input_proj.weight": torch.cat((of_states, torch.eye(hidden)), dim=1).to(torch.bfloat16)}
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    read |= {f"{norm}.weight": torch.ones(hidden, dtype=torch.bfloat16) for norm in norms}
    copied = {name.removeprefix(last): one.clone() for name, one in weights.items() if name.startswith(last)}
    return {_LAYER + name: tensor for name, tensor in (read | copied).items()}
