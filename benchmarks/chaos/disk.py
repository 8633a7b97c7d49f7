"""A place for a node's SSD tier that can be full.

With the right to mount, it is a small tmpfs, and a file that takes all that is left of it makes it full: the
node sees ENOSPC. Without that right the node's own limit on the size of files (RLIMIT_FSIZE, which the owner
of a process may lower from outside and raise again) is put below that of a segment: the node sees EFBIG.
"""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

LARGEST_BYTES: Final = 64 << 20  # taken at a time
SMALLEST_BYTES: Final = 4096
FILE_BYTES: Final = 1 << 20  # a node's log stays below it, its segments do not


class Disk:
    """One node's. `mounted`: whether it is a file system of its own."""

    def __init__(self, path: Path, *, mounted: bool) -> None:
        self.path = path
        self._mounted = mounted
        self._filler = path / "filler"

    def fill(self, pid: int) -> None:
        """Leave the process no space. Raises OSError."""
        if not self._mounted:
            _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (FILE_BYTES, most))
            return
        fd = os.open(self._filler, os.O_WRONLY | os.O_CREAT, 0o600)
        at, size_bytes = 0, LARGEST_BYTES
        try:
            while size_bytes >= SMALLEST_BYTES:
                try:
                    os.posix_fallocate(fd, at, size_bytes)
                    at += size_bytes
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size_bytes //= 2
        finally:
            os.close(fd)

    def free(self, pid: int) -> None:
        """Give it back. Raises OSError."""
        if self._mounted:
            self._filler.unlink(missing_ok=True)
            return
        _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, most))


@contextmanager
def small_disk(path: Path, size_bytes: int) -> Iterator[Disk]:
    """A directory, with a file system of this size where that may be mounted."""
    path.mkdir(parents=True)
    options = f"size={size_bytes},mode=700"
    command = ["mount", "-t", "tmpfs", "-o", options, "pdserve-chaos", str(path)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:  # there is no such command
        mounted = False
    try:
        yield Disk(path, mounted=mounted)
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(path)], capture_output=True, check=False)
