"""A small Qwen3 made on this machine: random weights from a fixed seed, written as a Hugging Face model
directory.

Random weights must still tell a right KV cache from a wrong one. A plainly initialised random model soon
repeats one token, whatever stands in its cache. So here the attention is sharp (query and key norms above 1:
scores of a few units, a few tokens win) and each layer's output outweighs the token embedding: a greedy
answer varies and depends on the whole prompt.

The model also gets biases on its output, which Qwen3 has no weights for: coordinate 0 of the residual stream
is the same for every token (the embeddings set it, no layer writes to it), so column 0 of the output matrix
adds a constant to each token's logit. With it, a greedy answer never ends by itself, unless a grammar leaves
nothing else, and does not fill a grammar's optional white space for ever.

With a sliding window it is a Mellum: the shapes and names of its weights are those of Qwen3, and three of
four layers see the last tokens only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final

from pdserve.engine.demo.chat import CHAT_TEMPLATE, END_OF_TEXT, TURN_END, tokenizer_config
from pdserve.engine.demo.directory import write_json, write_whole
from pdserve.engine.demo.tokenizer import MARK_TOKENS, SPECIAL_TOKENS, train_tokenizer
from pdserve.errors import ConfigError

_FORMAT = 5  # raise when any file this module writes changes
_QK_NORM = 2.0  # attention scores have deviation _QK_NORM**2: sharp, yet stable in bfloat16
_EMBEDDING_STD = 0.3  # small beside the layers' outputs, so the last token alone does not decide the next
_OUTPUT_STD = 2.0  # of the logits
_CONSTANT = 1.0  # coordinate 0 of the residual stream; the others have a deviation of 1 to 4 at the output

SLIDING: Final = "sliding_attention"
FULL: Final = "full_attention"
_LAYER_KINDS: Final = (SLIDING, FULL, SLIDING, SLIDING)

# Added to logits, in units of _CONSTANT over that deviation. Ordinary tokens have 0.
_BIAS_END = -30.0  # end of turn: chosen when a grammar is complete
_BIAS_MARK = -45.0  # a further tool call loses to the end
_BIAS_SPACE = -60.0  # white space only
_BIAS_NEVER = -90.0  # other special tokens, ids without text


@dataclass(frozen=True)
class DemoSize:
    """Geometry of one demo model, all counts."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    tokenizer_text_bytes: int

    def page_bytes(self, page_size: int, dtype_bytes: int) -> int:
        """Bytes of one KV page of `page_size` tokens, keys and values of all layers."""
        return page_size * self.layers * 2 * self.kv_heads * self.head_dim * dtype_bytes


SIZES: dict[str, DemoSize] = {
    "tiny": DemoSize(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=384,
        layers=4,
        heads=4,
        kv_heads=2,
        head_dim=32,
        context_length=8192,
        tokenizer_text_bytes=1_500_000,
    ),
    "small": DemoSize(
        vocab_size=16384,
        hidden_size=768,
        intermediate_size=2048,
        layers=12,
        heads=12,
        kv_heads=4,
        head_dim=64,
        context_length=32768,
        tokenizer_text_bytes=8_000_000,
    ),
    "medium": DemoSize(
        vocab_size=16384,
        hidden_size=1536,
        intermediate_size=4608,
        layers=18,
        heads=24,
        kv_heads=8,
        head_dim=64,
        context_length=32768,
        tokenizer_text_bytes=8_000_000,
    ),
}


@dataclass(frozen=True)
class DemoModel:
    """What `make_demo_model` made or found."""

    path: Path
    created: bool
    parameters: int
    weight_bytes: int


def make_demo_model(size: str, out_dir: Path, seed: int = 0, window_tokens: int | None = None) -> DemoModel:
    """Write the demo model of `size` (a key of SIZES) and `seed` to `out_dir`, whole or not at all.

    `window_tokens`: three of four layers see so many tokens; none: every layer sees all. A directory that
    already holds the same model is left as it is, at once. Weights are stored in bfloat16; they run with
    `--dtype float32` and `--dtype bfloat16` alike.

    Raises ConfigError for an unknown size, or when `out_dir` holds something else; StartupError when it
    cannot be written.
    """
    geometry = SIZES.get(size)
    if geometry is None:
        raise ConfigError(f"unknown demo model size {size!r}: choose one of {', '.join(SIZES)}")
    stamp: dict[str, Any] = {"format": _FORMAT, "size": size, "seed": seed}
    if window_tokens is not None:
        stamp["window_tokens"] = window_tokens

    def write_files(directory: Path) -> None:
        biases = _write_tokenizer(geometry, directory)
        config = _model_config(geometry)
        if window_tokens is not None:
            config = with_windows(config, window_tokens, [*islice(cycle(_LAYER_KINDS), geometry.layers)])
        write_json(directory / "config.json", config)
        write_json(directory / "generation_config.json", {"eos_token_id": _special_ids(), "do_sample": False})
        _write_weights(geometry, biases, directory / "model.safetensors", seed)

    path, created = write_whole(out_dir, stamp, f"the {size} demo model of seed {seed}", write_files)
    weights = path / "model.safetensors"
    return DemoModel(path, created, _parameter_count(geometry), weights.stat().st_size)


def _write_tokenizer(geometry: DemoSize, directory: Path) -> list[float]:
    """Train and save the tokenizer; returns each token id's output bias."""
    tokenizer = train_tokenizer(geometry.vocab_size, geometry.tokenizer_text_bytes)
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", tokenizer_config(geometry.context_length, CHAT_TEMPLATE))
    biases = [_BIAS_NEVER] * geometry.vocab_size
    for text, token in tokenizer.get_vocab(with_added_tokens=True).items():
        if text == TURN_END:
            biases[token] = _BIAS_END
        elif text in MARK_TOKENS:
            biases[token] = _BIAS_MARK
        elif text not in SPECIAL_TOKENS:
            biases[token] = 0.0 if tokenizer.decode([token]).strip() else _BIAS_SPACE
    return biases


def _special_ids() -> list[int]:
    return [SPECIAL_TOKENS.index(TURN_END), SPECIAL_TOKENS.index(END_OF_TEXT)]


def _model_config(geometry: DemoSize) -> dict[str, Any]:
    """`config.json` of a Hugging Face Qwen3 model."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": geometry.vocab_size,
        "hidden_size": geometry.hidden_size,
        "intermediate_size": geometry.intermediate_size,
        "num_hidden_layers": geometry.layers,
        "num_attention_heads": geometry.heads,
        "num_key_value_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
        "max_position_embeddings": geometry.context_length,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": geometry.layers,
        "initializer_range": round(1 / math.sqrt(geometry.hidden_size), 4),
        "bos_token_id": None,
        "eos_token_id": SPECIAL_TOKENS.index(TURN_END),
        "pad_token_id": SPECIAL_TOKENS.index(END_OF_TEXT),
        "use_cache": True,
    }


def with_windows(config: dict[str, Any], window_tokens: int, layers: Sequence[str]) -> dict[str, Any]:
    """`config.json` of a Mellum with the weights of that demo model. `layers`: SLIDING or FULL for each."""
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


def _weight_shapes(geometry: DemoSize) -> Iterator[tuple[str, tuple[int, ...], float | None]]:
    """(name, shape, standard deviation) of each tensor in file order; None marks a norm's weight.

    Each linear map keeps its input's scale: deviation 1/sqrt(inputs).
    """
    hidden, inner = geometry.hidden_size, geometry.intermediate_size
    q_rows, kv_rows = geometry.heads * geometry.head_dim, geometry.kv_heads * geometry.head_dim
    yield "model.embed_tokens.weight", (geometry.vocab_size, hidden), _EMBEDDING_STD
    for layer in range(geometry.layers):
        name = f"model.layers.{layer}."
        yield name + "input_layernorm.weight", (hidden,), None
        yield name + "self_attn.q_proj.weight", (q_rows, hidden), 1 / math.sqrt(hidden)
        yield name + "self_attn.k_proj.weight", (kv_rows, hidden), 1 / math.sqrt(hidden)
        yield name + "self_attn.v_proj.weight", (kv_rows, hidden), 1 / math.sqrt(hidden)
        yield name + "self_attn.o_proj.weight", (hidden, q_rows), 1 / math.sqrt(q_rows)
        yield name + "self_attn.q_norm.weight", (geometry.head_dim,), None
        yield name + "self_attn.k_norm.weight", (geometry.head_dim,), None
        yield name + "post_attention_layernorm.weight", (hidden,), None
        yield name + "mlp.gate_proj.weight", (inner, hidden), 1 / math.sqrt(hidden)
        yield name + "mlp.up_proj.weight", (inner, hidden), 1 / math.sqrt(hidden)
        yield name + "mlp.down_proj.weight", (hidden, inner), 1 / math.sqrt(inner)
    yield "model.norm.weight", (hidden,), None
    yield "lm_head.weight", (geometry.vocab_size, hidden), _OUTPUT_STD / math.sqrt(hidden)


def _parameter_count(geometry: DemoSize) -> int:
    return sum(math.prod(shape) for _, shape, _ in _weight_shapes(geometry))


def _write_weights(geometry: DemoSize, output_biases: list[float], path: Path, seed: int) -> None:
    """Draw every tensor in `_weight_shapes` order from one generator and save them in bfloat16."""
    import numpy
    import torch
    from safetensors.torch import save_file

    random = numpy.random.default_rng(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape, deviation in _weight_shapes(geometry):
        if deviation is None:
            sharp = name.endswith(("q_norm.weight", "k_norm.weight"))
            tensors[name] = torch.full(shape, _QK_NORM if sharp else 1.0, dtype=torch.bfloat16)
            continue
        values = random.standard_normal(shape, dtype=numpy.float32)
        values *= deviation
        tensors[name] = torch.from_numpy(values).to(torch.bfloat16)
    biases = torch.tensor(output_biases)
    tensors["lm_head.weight"][biases < 0] = 0
    tensors["lm_head.weight"][:, 0] = biases.to(torch.bfloat16)
    tensors["model.embed_tokens.weight"][:, 0] = _CONSTANT
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "layernorm.weight")):
            tensor[0] = 0  # no layer writes to the constant, or reads it
    save_file(tensors, str(path), metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes it readable by its owner only
