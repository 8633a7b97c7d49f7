"""A tiny model that sees images, as Qwen2-VL does: the demo model's weights, and a random encoder."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer

from tests.support.e2e.qwen2 import qwen2_weights

PATCH: Final = 14
MERGE: Final = 2
TOKEN_PIXELS: Final = PATCH * MERGE
"""Of each side of the square that a token stands for."""
_MARKS: Final = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_WIDTH, _INNER, _DEPTH, _HEADS = 32, 64, 2, 2
_NEVER: Final = -90.0
_TEMPLATE: Final = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'image' %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part.type == 'text' %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def make_vision_model(demo: Path, directory: Path, seed: int = 0) -> Path:
    """`demo`: the tiny demo model's directory. Returns `directory`."""
    shutil.copytree(demo, directory, ignore=shutil.ignore_patterns("pdserve_demo.json"))
    marks = _mark_tokens(directory)
    config = json.loads((directory / "config.json").read_text())
    hidden, words = config["hidden_size"], 16 * math.ceil((max(marks.values()) + 1) / 16)
    config |= {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "vocab_size": max(words, config["vocab_size"]),
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
        "vision_start_token_id": marks["<|vision_start|>"],
        "vision_end_token_id": marks["<|vision_end|>"],
        "image_token_id": marks["<|image_pad|>"],
        "video_token_id": marks["<|video_pad|>"],
        "vision_config": {
            "model_type": "qwen2_vl",
            "depth": _DEPTH,
            "embed_dim": _WIDTH,
            "hidden_size": hidden,
            "mlp_ratio": _INNER // _WIDTH,
            "num_heads": _HEADS,
            "in_chans": 3,
            "in_channels": 3,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
        },
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(_images()))
    random = torch.Generator().manual_seed(seed)
    weights = _longer(qwen2_weights(demo), config["vocab_size"], random) | {
        name: _draw(name, shape, random) for name, shape in _shapes(hidden)
    }
    weights["visual.merger.mlp.2.weight"][0] = 0  # coordinate 0 is as of words
    weights["visual.merger.mlp.2.bias"][0] = 1
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory


def _mark_tokens(directory: Path) -> dict[str, int]:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in _MARKS])
    tokenizer.save(str(directory / "tokenizer.json"))
    path = directory / "tokenizer_config.json"
    said = {**json.loads(path.read_text()), "chat_template": _TEMPLATE, "processor_class": "Qwen2VLProcessor"}
    path.write_text(json.dumps(said))
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": _TEMPLATE}))
    return {mark: tokenizer.token_to_id(mark) for mark in _MARKS}


def _images() -> dict[str, Any]:
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "min_pixels": 4 * TOKEN_PIXELS**2,
        "max_pixels": 400 * TOKEN_PIXELS**2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.25, 0.25, 0.25],
    }


def _longer(weights: dict[str, torch.Tensor], words: int, random: torch.Generator) -> dict[str, torch.Tensor]:
    """With rows for more tokens, which are never answered."""
    embeddings, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    more = words - len(embeddings)
    new = (torch.randn(more, embeddings.shape[1], generator=random) * 0.3).to(torch.bfloat16)
    new[:, 0] = embeddings[0, 0]
    never = torch.zeros(more, head.shape[1], dtype=torch.bfloat16)
    never[:, 0] = _NEVER
    return weights | {
        "model.embed_tokens.weight": torch.cat((embeddings, new)),
        "lm_head.weight": torch.cat((head, never)),
    }


def _draw(name: str, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.full(shape, float(name.endswith("weight")), dtype=torch.bfloat16)  # of a norm; a bias
    return (torch.randn(shape, generator=random) / math.prod(shape[1:]) ** 0.5).to(torch.bfloat16)


def _shapes(hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "visual.patch_embed.proj.weight", (_WIDTH, 3, 2, PATCH, PATCH)
    for layer in range(_DEPTH):
        name = f"visual.blocks.{layer}."
        for part, shape in (("attn.qkv", (3 * _WIDTH, _WIDTH)), ("attn.proj", (_WIDTH, _WIDTH))):
            yield f"{name}{part}.weight", shape
            yield f"{name}{part}.bias", shape[:1]
        for part, shape in (("mlp.fc1", (_INNER, _WIDTH)), ("mlp.fc2", (_WIDTH, _INNER))):
            yield f"{name}{part}.weight", shape
            yield f"{name}{part}.bias", shape[:1]
        for part in ("norm1", "norm2"):
            yield f"{name}{part}.weight", (_WIDTH,)
            yield f"{name}{part}.bias", (_WIDTH,)
    merged = _WIDTH * MERGE**2
    yield "visual.merger.ln_q.weight", (_WIDTH,)
    yield "visual.merger.ln_q.bias", (_WIDTH,)
    for part, shape in (("mlp.0", (merged, merged)), ("mlp.2", (hidden, merged))):
        yield f"visual.merger.{part}.weight", shape
        yield f"visual.merger.{part}.bias", shape[:1]
