"""A store of pages in a directory that all workers share, such as a mounted file system. A page is a file."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np

from pdserve.errors import PoolError, PoolUnavailable
from pdserve.kvpool.protocol.page_bytes import PageBuffers
from pdserve.kvpool.stores.base import StoreSettings, read_options


class DirectoryOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`pool.options`."""

    path: str


class DirectoryStore:
    """A `PageStore`."""

    lacks: ClassVar = ("limit of its size: remove old files yourself", "checksums")

    @staticmethod
    def check_options(settings: StoreSettings) -> None:
        """A worker with bad options does not start."""
        read_options(settings, "directory", DirectoryOptions)

    def __init__(self, settings: StoreSettings) -> None:
        options = read_options(settings, "directory", DirectoryOptions)
        self._root = Path(options.path)
        # a namespace may hold characters that a file's name may not
        self._pages = self._root / hashlib.sha256(settings.namespace.encode()).hexdigest()

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """A file under its final name is whole."""
        self._reach()
        return [self._file(key).exists() for key in keys]

    def get(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> list[bool]:
        """One after the other."""
        self._reach()
        return [self._read(self._file(key), page) for key, page in zip(keys, pages, strict=True)]

    def put(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> list[bool]:
        """One after the other."""
        self._reach()
        return [self._write(self._file(key), page) for key, page in zip(keys, pages, strict=True)]

    def clear(self) -> int:
        """The files of the namespace are removed."""
        self._reach()
        files = [file for file in self._pages.glob("*") if not file.name.startswith(".")]
        for file in files:
            file.unlink(missing_ok=True)
        return len(files)

    def check(self) -> dict[str, PoolError | None]:
        """Whether the directory is there."""
        try:
            self._reach()
        except PoolError as error:
            return {"directory": error}
        return {"directory": None}

    def close(self) -> None:
        """Nothing is open."""

    def _reach(self) -> None:
        try:
            self._pages.mkdir(exist_ok=True)  # not its parents: a file system that is not mounted is a fault
        except OSError as error:
            raise PoolUnavailable(f"{self._root}: {error.strerror}") from error

    def _file(self, key: bytes) -> Path:
        return self._pages / key.hex()

    def _read(self, file: Path, page: PageBuffers) -> bool:
        try:
            data = np.fromfile(file, np.uint8)
        except OSError:
            return False
        if len(data) != sum(segment.nbytes for segment in page):
            return False
        start = 0
        for segment in page:
            segment[:] = data[start : start + segment.nbytes]
            start += segment.nbytes
        return True

    def _write(self, file: Path, page: PageBuffers) -> bool:
        """Under another name first, so that nobody reads half a page."""
        if file.exists():
            return True
        try:
            descriptor, name = tempfile.mkstemp(prefix=".", dir=self._pages)
        except OSError:
            return False
        draft = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as out:
                for segment in page:
                    out.write(segment.data)
            draft.replace(file)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink()
            return False
        return True
