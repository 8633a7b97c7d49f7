"""A small Qwen3 made on this machine, for tests and benchmarks, and for who has no network: random weights
from a fixed seed, written as a Hugging Face model directory.

    python -m tests.support.random_model small models/demo-small

Random weights must still tell a right KV cache from a wrong one. A plainly initialised random model soon
repeats one token, whatever stands in its cache. So here the attention is sharp (query and key norms above 1:
scores of a few units, a few tokens win) and each layer's output outweighs the token embedding: a greedy
answer varies and depends on the whole prompt.

The model also gets biases on its output, which Qwen3 has no weights for: coordinate 0 of the residual stream
is the same for every token (the embeddings set it, no layer writes to it), so column 0 of the output matrix
adds a constant to each token's logit. With it, a greedy answer never ends by itself, unless a grammar leaves
nothing else, and does not fill a grammar's optional white space for ever.

Its tokenizer is a byte-level BPE (every byte is a token, so any text round-trips), trained on the paragraphs
below and on the sources of Python's standard library, read in name order. The result is the same each time
for one Python installation; another Python version gives other merges.
"""

from __future__ import annotations

import math
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy
import torch
from safetensors.torch import save_file
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from pdserve.engine.demo.chat import END_OF_TEXT, TURN_END, TURN_START, chat_template, tokenizer_config
from pdserve.engine.demo.smollm2 import write_json, write_whole

CHAT_TEMPLATE: Final = chat_template("", thinks=True)
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
# Marks that SGLang's qwen tool-call and reasoning parsers look for; ordinary text to a client, so not
# special.
MARK_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

# GPT-4's split, as used by Qwen: contractions, words, single digits, punctuation, white space.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_PARAGRAPHS = """
A cache is a promise that work done once need not be done again. A page of attention keys
and values depends on every token before it and on nothing after it, so two conversations
that begin alike may share what they have in common. The prefill worker reads the prompt and
fills pages; the decode worker writes the answer one token at a time.

Please tell me about the weather in Paris, the price of bread in Berlin, and the best way
from Lisbon to Porto. What is the capital of Peru? Who wrote the first program? How many
days are there in February? Write a short poem about rain. You are a helpful assistant.
Answer in one sentence. Think step by step, then give the final answer as JSON.

Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Le cœur déçu mais l'âme
plutôt naïve, Louÿs rêva de crapaüter en canoë. El pingüino Wenceslao hizo kilómetros bajo
exhaustiva lluvia. 敏捷的棕色狐狸跳过了懒狗。
いろはにほへと ちりぬるを。 Съешь ещё этих мягких французских булок, да
выпей чаю. 😀 🚀 ✓

{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius", "days": 3}}
{"role": "user", "content": "Hello!"}
{"type": "object", "properties": {"answer": {"type": "string"}}, "required": []}
"""

_QK_NORM = 2.0  # attention scores have deviation _QK_NORM**2: sharp, yet stable in bfloat16
_EMBEDDING_STD = 0.3  # small beside the layers' outputs, so the last token alone does not decide the next
_OUTPUT_STD = 2.0  # of the logits
_CONSTANT = 1.0  # coordinate 0 of the residual stream; the others have a deviation of 1 to 4 at the output

# Added to logits, in units of _CONSTANT over that deviation. Ordinary tokens have 0.
_BIAS_END = -30.0  # end of turn: chosen when a grammar is complete
_BIAS_MARK = -45.0  # a further tool call loses to the end
_BIAS_SPACE = -60.0  # white space only
_BIAS_NEVER = -90.0  # other special tokens, ids without text


@dataclass(frozen=True)
class Size:
    """Geometry of one model, all counts."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    tokenizer_text_bytes: int


SIZES: Final = {
    "tiny": Size(4096, 128, 384, 4, 4, 2, 32, 8192, 1_500_000),
    "small": Size(16384, 768, 2048, 12, 12, 4, 64, 32768, 8_000_000),
    "medium": Size(16384, 1536, 4608, 18, 24, 8, 64, 32768, 8_000_000),
}
"""2 M parameters for tests, 100 M and 500 M for benchmarks."""


def make_random_model(size: str, out_dir: Path, seed: int = 0) -> Path:
    """Write the model of `size` (a key of SIZES) and `seed` to `out_dir`, whole or not at all, unless it is
    there. Weights are stored in bfloat16; they run with `--dtype float32` and `--dtype bfloat16` alike.

    Raises ConfigError when `out_dir` holds something else; StartupError when it cannot be written.
    """
    geometry = SIZES[size]

    def write_files(directory: Path) -> None:
        biases = _write_tokenizer(geometry, directory)
        write_json(directory / "config.json", _model_config(geometry))
        write_json(directory / "generation_config.json", {"eos_token_id": _special_ids(), "do_sample": False})
        _write_weights(geometry, biases, directory / "model.safetensors", seed)

    stamp = {"size": size, "seed": seed}
    path, _ = write_whole(out_dir, stamp, f"the {size} demo model of seed {seed}", write_files)
    return path


def _write_tokenizer(geometry: Size, directory: Path) -> list[float]:
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


def _model_config(geometry: Size) -> dict[str, Any]:
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


def _weight_shapes(geometry: Size) -> Iterator[tuple[str, tuple[int, ...], float | None]]:
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


def _write_weights(geometry: Size, output_biases: list[float], path: Path, seed: int) -> None:
    """Draw every tensor in `_weight_shapes` order from one generator and save them in bfloat16."""
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


def training_texts(limit_bytes: int) -> Iterator[str]:
    """The paragraphs, then the standard library's top-level sources in name order, up to
    `limit_bytes`.
    """
    yield _PARAGRAPHS
    left = limit_bytes
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        left -= len(text)
        if left < 0:
            return
        yield text


def train_tokenizer(vocab_size: int, text_limit_bytes: int) -> Tokenizer:
    """A byte-level BPE tokenizer of at most `vocab_size` tokens, special tokens first (ids 0, 1, 2)."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=vocab_size - len(MARK_TOKENS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts(text_limit_bytes), trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARK_TOKENS])
    return tokenizer


if __name__ == "__main__":
    make_random_model(sys.argv[1], Path(sys.argv[2]))
