"""Fingerprints kept from start to start: a changed file is always read again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdserve.engine import fingerprints
from pdserve.engine.fingerprints import kept_fingerprint

LONG_AGO_S = 1_000_000_000


class Model:
    """A model's directory, and how often its fingerprint was computed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.computed = 0
        path.mkdir()
        self.write("config.json", b"{}")
        self.write("a.safetensors", b"weights")

    def write(self, name: str, data: bytes) -> None:
        (self.path / name).write_bytes(data)
        os.utime(self.path / name, (LONG_AGO_S, LONG_AGO_S))

    def fingerprint(self, path: Path) -> str:
        self.computed += 1
        return f"{self.computed:016x}"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr(fingerprints, "SETTLED_S", -10.0)  # what was written just now is settled
    return Model(tmp_path / "model")


def test_the_fingerprint_of_unchanged_files_is_computed_once(model: Model, tmp_path: Path) -> None:
    for _ in range(3):
        assert kept_fingerprint(model.path, model.fingerprint, tmp_path / "kept") == "0" * 15 + "1"
    assert model.computed == 1
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["a.safetensors", "config.json", "b.safetensors", "quant_config.json"])
def test_a_change_of_the_same_length_with_the_same_time_is_seen(
    model: Model, tmp_path: Path, name: str
) -> None:
    kept_fingerprint(model.path, model.fingerprint, tmp_path / "kept")
    model.write(name, b"WEIGHTS" if name == "a.safetensors" else b"[]")
    kept_fingerprint(model.path, model.fingerprint, tmp_path / "kept")
    assert model.computed == 2


def test_files_changed_just_now_are_read_again(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprints, "SETTLED_S", 3600.0)
    for _ in range(2):
        kept_fingerprint(model.path, model.fingerprint, tmp_path / "kept")
    assert model.computed == 2


def test_files_changed_while_they_are_read_are_not_kept(model: Model, tmp_path: Path) -> None:
    def changing(path: Path) -> str:
        model.write("a.safetensors", b"more" * (model.computed + 1))
        return model.fingerprint(path)

    for _ in range(2):
        kept_fingerprint(model.path, changing, tmp_path / "kept")
    assert model.computed == 2


@pytest.mark.parametrize("damage", ["", "no fingerprint", "ABCDEF0123456789", "é"])
def test_a_damaged_entry_is_computed_again(model: Model, tmp_path: Path, damage: str) -> None:
    kept_fingerprint(model.path, model.fingerprint, tmp_path / "kept")
    [entry] = (tmp_path / "kept").iterdir()
    entry.write_text(damage)
    assert kept_fingerprint(model.path, model.fingerprint, tmp_path / "kept") == f"{2:016x}"
    assert kept_fingerprint(model.path, model.fingerprint, tmp_path / "kept") == f"{2:016x}"


def test_without_a_place_for_entries_it_is_computed(model: Model, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("a file is in the way")
    assert kept_fingerprint(model.path, model.fingerprint, tmp_path / "kept") == f"{1:016x}"


def test_old_entries_make_room(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "MAX_ENTRIES", 3)
    for count in range(1, 6):
        model.write("a.safetensors", b"x" * count)
        kept_fingerprint(model.path, model.fingerprint, tmp_path / "kept")
    assert len(list((tmp_path / "kept").iterdir())) == 3
