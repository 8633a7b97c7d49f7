"""File systems of a test's own. The kernel lets only root (CAP_SYS_ADMIN) mount them: a machine that does not
leaves these tests out, and says so.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(directory: Path, fstype: str, options: str) -> Iterator[Path]:
    """A file system at a directory that is made for it."""
    directory.mkdir()
    command = ["mount", "-t", fstype, "-o", options, "none", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"the kernel does not let us mount: {done.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


@contextlib.contextmanager
def set_huge_pages(setting: Path, more: int) -> Iterator[None]:
    """So many more reserved huge pages, of the size that `setting` (nr_hugepages) is of."""
    before = int(setting.read_text())
    try:
        setting.write_text(str(before + more))
    except PermissionError:
        pytest.skip("the kernel does not let us reserve huge pages")
    try:
        if int(setting.read_text()) < before + more:
            pytest.skip("the machine has no memory for huge pages")
        yield
    finally:
        setting.write_text(str(before))
