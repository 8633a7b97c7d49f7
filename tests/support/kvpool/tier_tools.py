"""Pages and memory for the tests of tiers, and the tier that they are measured by: one in memory."""

from __future__ import annotations

import mmap
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pdserve.errors import StartupError
from pdserve.kvpool.protocol.page_bytes import checksum_page
from pdserve.kvpool.tiers.base import (
    CORRUPT,
    GONE,
    LOADED,
    REFUSED,
    STORED,
    PageMemory,
    PageName,
    PutResult,
    ReadResult,
    TierPage,
    TierSettings,
    padded,
)
from tests.support.kvpool.node_model import KIB, key


def memory(length: int) -> PageMemory:
    """Aligned memory for one page, filled with what must not be taken for it."""
    found = np.frombuffer(mmap.mmap(-1, padded(length)), np.uint8)
    found[:] = 0xEE
    return found


def contents(n: int, length: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(n).integers(0, 256, length, np.uint8)


def page(
    n: int, length: int = 8 * KIB, space: int = 1, sequence: int | None = None, checksum: bool = True
) -> tuple[TierPage, PageMemory]:
    data = memory(length)
    data[:length] = contents(n, length)
    digest = checksum_page([data[:length]]) if checksum else 0
    return TierPage(space, key(n), length, digest, n + 1 if sequence is None else sequence), data


def name(n: int, length: int = 8 * KIB, space: int = 1) -> PageName:
    return PageName(space, key(n), length)


class MemoryTier:
    """The reference: what it "stores" outlives it in `DISKS`, by path."""

    DISKS: ClassVar[dict[Path, dict[str, Any]]] = {}
    OPEN: ClassVar[set[Path]] = set()

    def __init__(self, settings: TierSettings) -> None:
        if settings.path in self.OPEN:
            raise StartupError(f"node {settings.node}: {settings.path} is in use")
        if settings.path.exists():
            raise StartupError(f"node {settings.node}: {settings.path} is no place for a memory tier")
        self.OPEN.add(settings.path)
        self._settings = settings
        self._disk = self.DISKS.setdefault(settings.path, {"pages": OrderedDict(), "text": None})
        self._pages: OrderedDict[tuple[int, bytes], tuple[TierPage, bytes]] = self._disk["pages"]
        self.capacity_bytes = settings.capacity_bytes
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        return sum(found.length_bytes for found, _ in list(self._pages.values()))

    def namespaces(self) -> str | None:
        text: str | None = self._disk["text"]
        return text

    def save_namespaces(self, text: str | None) -> str:
        self._disk["text"] = text
        return ""

    def scan(self, known: Collection[int]) -> Iterator[list[TierPage]]:
        with self._lock:
            for where in [where for where in self._pages if where[0] not in known]:
                del self._pages[where]
            found = [page for page, _ in self._pages.values()]
        yield found

    def put(self, pages: Sequence[TierPage], data: Sequence[PageMemory]) -> PutResult:
        statuses = []
        for found, bytes_ in zip(pages, data, strict=True):
            if found.length_bytes > self.capacity_bytes // 4:
                statuses.append(REFUSED)
                continue
            with self._lock:
                self._pages.pop((found.space, found.key), None)
            while self._pages and self.used_bytes + found.length_bytes > self.capacity_bytes:
                where, (oldest, _) = next(iter(self._pages.items()))
                self._settings.leaving([PageName(*where, oldest.length_bytes)])
                del self._pages[where]
            with self._lock:
                self._pages[found.space, found.key] = (found, bytes_[: found.length_bytes].tobytes())
            statuses.append(STORED)
        return PutResult(statuses)

    def read(self, names: Sequence[PageName], into: Sequence[PageMemory]) -> list[ReadResult]:
        return [self._read(wanted, data) for wanted, data in zip(names, into, strict=True)]

    def _read(self, wanted: PageName, data: PageMemory) -> ReadResult:
        with self._lock:
            found, bytes_ = self._pages.get((wanted.space, wanted.key), (None, b""))
        if found is None or found.length_bytes != wanted.length_bytes:
            return ReadResult(GONE)
        data[: len(bytes_)] = np.frombuffer(bytes_, np.uint8)
        if found.checksum and checksum_page([data[: len(bytes_)]]) != found.checksum:
            return ReadResult(CORRUPT)
        return ReadResult(LOADED, found)

    def forget(self, names: Sequence[PageName]) -> None:
        with self._lock:
            for wanted in names:
                self._pages.pop((wanted.space, wanted.key), None)

    def forget_space(self, space: int) -> None:
        with self._lock:
            for where in [where for where in self._pages if where[0] == space]:
                del self._pages[where]

    def erase(self, space: int, keys: Collection[bytes] | None = None) -> str:
        with self._lock:
            for where in [one for one in self._pages if one[0] == space and (keys is None or one[1] in keys)]:
                del self._pages[where]
        return ""

    def maintain(self) -> bool:
        return False

    def close(self) -> None:
        self.OPEN.discard(self._settings.path)


def key_file() -> Path:
    """A file with two keys for pages in tiers."""
    file = Path(tempfile.mkdtemp(prefix="pdserve-keys-")) / "keys.toml"
    file.touch(mode=0o600)
    entries = (f'[[keys]]\nsecret = "{digit * 64}"\n' for digit in "ab")
    file.write_text("".join(entries))
    return file
