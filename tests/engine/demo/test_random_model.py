"""The model with random weights: the same each time; its tokenizer holds what SGLang needs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.support.random_model import SPECIAL_TOKENS, make_random_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model("tiny", tmp_path_factory.mktemp("models") / "tiny", seed=0)


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def test_a_seed_makes_the_same_files_and_another_one_other_weights(tiny: Path, tmp_path: Path) -> None:
    assert digests(make_random_model("tiny", tmp_path / "again", seed=0)) == digests(tiny)
    other = digests(make_random_model("tiny", tmp_path / "other", seed=1))
    assert other["model.safetensors"] != digests(tiny)["model.safetensors"]
    assert other["tokenizer.json"] == digests(tiny)["tokenizer.json"]


def test_tokenizer_round_trips_any_text(tiny: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    text = "def f(x):\n\treturn x  # naïve 敏捷 🚀 \x00 <tool_call>{}</tool_call>"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens_have_the_configured_ids(tiny: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    config = json.loads((tiny / "config.json").read_text())
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]
    assert config["eos_token_id"] == tokenizer.token_to_id("<|im_end|>")
    assert tokenizer.get_vocab_size() <= config["vocab_size"]
