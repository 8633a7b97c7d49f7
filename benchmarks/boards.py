"""Counters that the processes of a run share: rows of int64 in a file that all of them map."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Rows: TypeAlias = npt.NDArray[np.int64]


def new_rows(path: Path, rows: int, columns: int) -> Rows:
    """Make the file; all are 0."""
    path.write_bytes(np.zeros((rows, columns), np.int64).tobytes())
    return open_rows(path, columns)


def open_rows(path: Path | str, columns: int) -> Rows:
    """Shape [rows, columns], shared by all who open it."""
    with Path(path).open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.int64).reshape(-1, columns)
