"""The demo model: made whole, once, the same each time; its tokenizer and template hold what SGLang needs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from pdserve.engine.demo.model import FULL, SIZES, SLIDING, DemoModel, make_demo_model
from pdserve.engine.demo.tokenizer import SPECIAL_TOKENS
from pdserve.errors import ConfigError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> DemoModel:
    return make_demo_model("tiny", tmp_path_factory.mktemp("models") / "tiny", seed=0)


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def test_second_call_changes_nothing(tiny: DemoModel) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in tiny.path.iterdir()}
    again = make_demo_model("tiny", tiny.path, seed=0)
    assert tiny.created
    assert not again.created
    assert {path.name: path.stat().st_mtime_ns for path in tiny.path.iterdir()} == before


def test_same_seed_makes_same_files(tiny: DemoModel, tmp_path: Path) -> None:
    assert digests(make_demo_model("tiny", tmp_path / "again", seed=0).path) == digests(tiny.path)


def test_another_seed_makes_other_weights(tiny: DemoModel, tmp_path: Path) -> None:
    other = digests(make_demo_model("tiny", tmp_path / "other", seed=1).path)
    assert other["model.safetensors"] != digests(tiny.path)["model.safetensors"]
    assert other["tokenizer.json"] == digests(tiny.path)["tokenizer.json"]


def test_a_window_changes_what_layers_see_and_no_weight(tiny: DemoModel, tmp_path: Path) -> None:
    windowed = make_demo_model("tiny", tmp_path / "windowed", window_tokens=256)
    changed = {name for name, digest in digests(windowed.path).items() if digests(tiny.path)[name] != digest}
    config = json.loads((windowed.path / "config.json").read_text())
    assert changed == {"config.json", "pdserve_demo.json"}
    assert (config["sliding_window"], config["layer_types"]) == (256, [SLIDING, FULL, SLIDING, SLIDING])
    with pytest.raises(ConfigError, match="is not the tiny demo model"):
        make_demo_model("tiny", windowed.path)


def test_directory_with_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("keep me")
    with pytest.raises(ConfigError, match="is not the tiny demo model"):
        make_demo_model("tiny", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_model_of_an_older_version_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "pdserve_demo.json").write_text('{"format": 0, "size": "tiny", "seed": 0}')
    assert make_demo_model("tiny", tmp_path / "model").created
    assert (tmp_path / "model" / "config.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_unknown_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose one of tiny, small"):
        make_demo_model("huge", tmp_path / "model")


def test_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pdserve.engine.demo.model._write_weights", fail)
    with pytest.raises(KeyboardInterrupt):
        make_demo_model("tiny", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_sizes_are_as_documented() -> None:
    assert SIZES["tiny"].page_bytes(page_size=64, dtype_bytes=2) == 64 * 1024
    assert SIZES["small"].page_bytes(page_size=64, dtype_bytes=2) == 768 * 1024


def test_tokenizer_round_trips_any_text(tiny: DemoModel) -> None:
    tokenizer = Tokenizer.from_file(str(tiny.path / "tokenizer.json"))
    text = "def f(x):\n\treturn x  # naïve 敏捷 🚀 \x00 <tool_call>{}</tool_call>"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens_have_the_configured_ids(tiny: DemoModel) -> None:
    tokenizer = Tokenizer.from_file(str(tiny.path / "tokenizer.json"))
    config = json.loads((tiny.path / "config.json").read_text())
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]
    assert config["eos_token_id"] == tokenizer.token_to_id("<|im_end|>")
    assert tokenizer.get_vocab_size() <= config["vocab_size"]
