"""A model directory that is there whole or not at all, whoever else makes the same one at the same time.

A stamp in the directory says what it holds. Files are written into a directory beside it, which then takes
its name.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

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
        raise ConfigError(f"{out_dir} exists and is not {name}: choose another --out or remove it")
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
