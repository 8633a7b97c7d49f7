"""Fingerprints kept from start to start: a changed file is always read again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdserve.engine import model_dir
from pdserve.engine.model_dir import kept_fingerprint

LONG_AGO_S = 1_000_000_000


class Model:
    """A model's directory, and how often its fingerprint was computed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = path.parent / "kept"
        self.computed = 0
        path.mkdir()
        self.write("config.json", b"{}")
        self.write("a.safetensors", b"weights")

    def write(self, name: str, data: bytes) -> None:
        (self.path / name).write_bytes(data)
        os.utime(self.path / name, (LONG_AGO_S, LONG_AGO_S))

    def kept(self) -> str:
        return kept_fingerprint(self.path, self.fingerprint, self.entries)

    def fingerprint(self, path: Path) -> str:
        self.computed += 1
        return f"{self.computed:016x}"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr(model_dir, "SETTLED_S", -10.0)  # what was written just now is settled
    return Model(tmp_path / "model")


def test_the_fingerprint_of_unchanged_files_is_computed_once(model: Model) -> None:
    for _ in range(3):
        assert model.kept() == "0" * 15 + "1"
    assert model.computed == 1
    assert model.entries.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["a.safetensors", "config.json", "b.safetensors", "quant_config.json"])
def test_a_change_of_the_same_length_with_the_same_time_is_seen(model: Model, name: str) -> None:
    model.kept()
    model.write(name, b"WEIGHTS" if name == "a.safetensors" else b"[]")
    model.kept()
    assert model.computed == 2


def test_files_changed_just_now_are_read_again(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_dir, "SETTLED_S", 3600.0)
    for _ in range(2):
        model.kept()
    assert model.computed == 2


def test_files_changed_while_they_are_read_are_not_kept(model: Model) -> None:
    def changing(path: Path) -> str:
        model.write("a.safetensors", b"more" * (model.computed + 1))
        return model.fingerprint(path)

    for _ in range(2):
        kept_fingerprint(model.path, changing, model.entries)
    assert model.computed == 2


@pytest.mark.parametrize("damage", ["", "no fingerprint", "ABCDEF0123456789", "é"])
def test_a_damaged_entry_is_computed_again(model: Model, damage: str) -> None:
    model.kept()
    [entry] = model.entries.iterdir()
    entry.write_text(damage)
    assert model.kept() == f"{2:016x}"
    assert model.kept() == f"{2:016x}"


def test_without_a_place_for_entries_it_is_computed(model: Model) -> None:
    model.entries.write_text("a file is in the way")
    assert model.kept() == f"{1:016x}"


def test_old_entries_make_room(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_dir, "MAX_ENTRIES", 3)
    for count in range(1, 6):
        model.write("a.safetensors", b"x" * count)
        model.kept()
    assert len(list(model.entries.iterdir())) == 3
