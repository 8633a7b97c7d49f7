"""A model directory that is there whole or not at all, whoever else makes the same one at the same time.

A stamp in the directory says what it holds. Files are written into a directory beside it, which then takes
its name.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from pdserve.errors import ConfigError, StartupError

_STAMP: Final = "pdserve_demo.json"


def write_whole(
    out_dir: Path, stamp: dict[str, Any], name: str, write_files: Callable[[Path], None]
) -> tuple[Path, bool]:
    """Make `out_dir` by `write_files(directory)`, unless it holds the model of that stamp already.

    `stamp["format"]` is the version of what `write_files` writes: a model that differs in it alone is
    replaced. `name` says for people what the model is. Returns the absolute path, and whether this call made
    it.

    Raises ConfigError when `out_dir` holds something else, StartupError when it cannot be written.
    """
    out_dir = out_dir.expanduser().resolve()
    if _holds(out_dir, stamp):
        return out_dir, False
    if not _may_replace(out_dir, stamp):
        raise ConfigError(f"{out_dir} exists and is not {name}: choose another --out or remove it")
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        with _scratch_directory(out_dir) as scratch:
            write_files(scratch)
            write_json(scratch / _STAMP, stamp)
            scratch.chmod(0o755)
            return out_dir, _take_name(scratch, out_dir, stamp)
    except OSError as error:
        raise StartupError(f"cannot write the demo model to {out_dir}: {error}") from error


def write_json(path: Path, content: dict[str, Any]) -> None:
    """As the files of a model directory are: indented, in UTF-8."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _holds(directory: Path, stamp: dict[str, Any]) -> bool:
    try:
        found = json.loads((directory / _STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(found == stamp)


def _may_replace(out_dir: Path, stamp: dict[str, Any]) -> bool:
    """Nothing is there, or an empty directory, or the same model of another format."""
    if not out_dir.exists():
        return True
    if not out_dir.is_dir():
        return False
    try:
        found = json.loads((out_dir / _STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return not any(out_dir.iterdir())
    return bool({**found, "format": stamp["format"]} == stamp)


def _take_name(scratch: Path, out_dir: Path, stamp: dict[str, Any]) -> bool:
    """Rename; False when another process did the same first."""
    if (out_dir / _STAMP).exists() and not _holds(out_dir, stamp):
        with _scratch_directory(out_dir) as old:
            out_dir.rename(old)  # another format's model: out of the way first
    try:
        scratch.rename(out_dir)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and _holds(out_dir, stamp):
            return False
        raise
    return True


@contextlib.contextmanager
def _scratch_directory(out_dir: Path) -> Iterator[Path]:
    scratch = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # gone already after the rename
