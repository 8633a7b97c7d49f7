"""The directory tier: one file per page in a mounted directory (NFS, a parallel file system).

    <path>/lock                        locked by the node that uses the directory, if locks work there
           namespaces.json             in the first tier: the node's list of namespaces, after a reboot
           pages/s<space>/<k>/<key>    k: first byte of the key; all in hex
           trash/...                   forgotten spaces and stray files, removed in the background

A file is one block like a segment's record header (ssd/segment_format.py; nonce and block are 0), then the
page's bytes. It is written under a temporary name and renamed, so a page is there completely or not at all. A
page is checked when it is read. Several nodes may share a mount, each with its own directory.

The index is made by listing folders: it needs names and sizes and opens no file. When the capacity is
reached, the least recently used files are removed.

In version 1 a folder had the decimal number of its namespace as its name, and pages contained that number.
Such folders are renamed once, when this version first opens the tier.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from pdserve.kvpool.protocol.page_bytes import checksum_bytes
from pdserve.kvpool.tiers.base import (
    CORRUPT,
    GONE,
    LOADED,
    READ_FAILED,
    REFUSED,
    STORED,
    WRITE_FAILED,
    PageMemory,
    PageName,
    PutResult,
    ReadResult,
    TierPage,
    TierSettings,
)
from pdserve.kvpool.tiers.durable_files import (
    NotOurs,
    claim_directory,
    open_new,
    open_own,
    read_options,
    read_text,
    save_text,
    sync_directory,
)
from pdserve.kvpool.tiers.ssd.segment_format import (
    BLOCK_BYTES,
    MAX_PAGE_BYTES,
    decode_record_header,
    encode_record_header,
)

logger = logging.getLogger(__name__)

LEAVING_PAGES: Final = 64  # pages per call of `leaving`
TRASH_RETRY_S: Final = 60.0  # pause before another try to remove a file
_KEY_CHARS: Final = 64


class DirectoryOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The directory tier has no options of its own."""


class DirectoryTier:
    """A `Tier` in any directory."""

    def __init__(self, settings: TierSettings) -> None:
        read_options(settings, "directory", DirectoryOptions)
        self._settings = settings
        self._path = settings.path
        self._pages = settings.path / "pages"
        self._trash = settings.path / "trash"
        self.capacity_bytes = settings.capacity_bytes
        self._lock_fd = claim_directory(settings, "pages", "trash")
        self._lock = threading.Lock()
        self._index: OrderedDict[tuple[int, bytes], int] = (
            OrderedDict()
        )  # -> length; least recently used first
        self._used_bytes = 0
        self._emptying: Iterator[bool] | None = None  # a pass through the trash
        self._empty_at_s = 0.0  # when the next pass may begin
        self._closed = False

    @property
    def used_bytes(self) -> int:
        """See `Tier`."""
        return self._used_bytes

    def namespaces(self) -> str | None:
        """See `Tier`."""
        return read_text(self._path / "namespaces.json")

    def save_namespaces(self, text: str | None) -> str:
        """See `Tier`."""
        return save_text(self._path / "namespaces.json", text)

    # --- starting

    def adopt_numbers(self, spaces: Mapping[int, int]) -> str:
        """See `NumberedTier`."""
        problem = ""
        for folder in _entries(self._pages):
            space = spaces.get(int(folder.name)) if folder.name.isdecimal() else None
            if space is not None:
                try:
                    Path(folder.path).rename(self._folder(space))
                except OSError as error:
                    problem = f"{folder.path}: {error.strerror or error}"
        return problem

    def scan(self, known: Collection[int]) -> Iterator[list[TierPage]]:
        """See `Tier`. Checksums and sequences are in the files, which are not opened: reported as 0."""
        ages: list[tuple[float, int, bytes]] = []
        for folder in _entries(self._pages):
            space = _space(folder) if _is_folder(folder) else -1
            if space not in known:
                problem = self._discard(Path(folder.path))
                if problem:
                    logger.warning("node %s: %s", self._settings.node, problem)
                continue
            for shard in _entries(Path(folder.path)):
                if not _is_folder(shard):  # a link leads to what is not ours
                    _unlink(Path(shard.path))
                    continue
                pages = []
                for found, modified_s in self._files(space, Path(shard.path)):
                    ages.append((modified_s, space, found.key))
                    pages.append(found)
                if pages:
                    yield pages
        with self._lock:
            for _, space, key in sorted(ages):
                if (space, key) in self._index:
                    self._index.move_to_end((space, key))

    def _files(self, space: int, shard: Path) -> Iterator[tuple[TierPage, float]]:
        for entry in _entries(shard):
            try:
                key = bytes.fromhex(entry.name) if len(entry.name) == _KEY_CHARS else b""
                found = entry.stat(follow_symlinks=False)
            except (ValueError, OSError):
                key = b""
            length = found.st_size - BLOCK_BYTES if key and stat.S_ISREG(found.st_mode) else 0
            if not 0 < length <= MAX_PAGE_BYTES or Path(entry.path) != self._file(space, key):
                _unlink(Path(entry.path))  # a temporary name, cut short, or put there by somebody
                continue
            self._add(space, key, length)
            yield TierPage(space, key, length, 0, 0), found.st_mtime

    # --- writing

    def put(self, pages: Sequence[TierPage], data: Sequence[PageMemory]) -> PutResult:
        """See `Tier`."""
        statuses = []
        problem = ""
        for page, memory in zip(pages, data, strict=True):
            size = BLOCK_BYTES + page.length_bytes
            if size > self.capacity_bytes or page.length_bytes > MAX_PAGE_BYTES:
                statuses.append(REFUSED)
                continue
            if problem:
                statuses.append(WRITE_FAILED)
                continue
            self._make_room(size)
            try:
                self._write(page, memory)
            except OSError as error:
                problem = f"{self._path}: {error.strerror or error}"
                statuses.append(WRITE_FAILED)
                continue
            self._add(page.space, page.key, page.length_bytes)
            statuses.append(STORED)
        return PutResult(statuses, problem)

    def _write(self, page: TierPage, memory: PageMemory) -> None:
        path = self._file(page.space, page.key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        head = bytearray(BLOCK_BYTES)
        data = memory[: page.length_bytes].data
        encode_record_header(head, 0, 0, 0, page, page.checksum or checksum_bytes(data))
        temporary = path.with_suffix(".tmp")
        try:
            with os.fdopen(open_new(temporary), "wb", buffering=0) as file:
                for part in (memoryview(head), data):
                    while part:
                        part = part[file.write(part) :]
            temporary.replace(path)
        except OSError:
            _unlink(temporary)
            raise

    def _make_room(self, size: int) -> None:
        while self._used_bytes + size > self.capacity_bytes and self._index:
            leaving: list[PageName] = []
            freed = 0
            with self._lock:
                for (space, key), length in self._index.items():
                    if (
                        len(leaving) == LEAVING_PAGES
                        or self._used_bytes - freed + size <= self.capacity_bytes
                    ):
                        break
                    leaving.append(PageName(space, key, length))
                    freed += BLOCK_BYTES + length
            self._settings.leaving(leaving)
            self.forget(leaving)

    # --- reading

    def read(self, names: Sequence[PageName], into: Sequence[PageMemory]) -> list[ReadResult]:
        """See `Tier`."""
        return [self._read(name, memory) for name, memory in zip(names, into, strict=True)]

    def _read(self, name: PageName, memory: PageMemory) -> ReadResult:
        with self._lock:
            if self._index.get((name.space, name.key)) != name.length_bytes:
                return ReadResult(GONE)
            self._index.move_to_end((name.space, name.key))
        head = bytearray(BLOCK_BYTES)
        data = memory[: name.length_bytes].data
        try:
            fd = open_own(self._file(name.space, name.key), os.O_RDONLY)
            try:
                whole = os.preadv(fd, [head, data], 0) == BLOCK_BYTES + name.length_bytes
            finally:
                os.close(fd)
        except FileNotFoundError:
            return ReadResult(GONE)
        except NotOurs:
            return ReadResult(CORRUPT)
        except OSError as error:
            logger.warning("node %s: %s: %s", self._settings.node, self._path, error.strerror)
            return ReadResult(READ_FAILED)
        page_and_digest = _decode(head, name)
        if not whole or page_and_digest is None:
            return ReadResult(CORRUPT)
        page, digest = page_and_digest
        if (page.space, page.key, page.length_bytes) != (name.space, name.key, name.length_bytes):
            return ReadResult(CORRUPT)
        if checksum_bytes(data) != digest:
            return ReadResult(CORRUPT)
        return ReadResult(LOADED, page)

    # --- forgetting

    def forget(self, names: Sequence[PageName]) -> None:
        """See `Tier`."""
        for name in names:
            if self._remove(name.space, name.key):
                _unlink(self._file(name.space, name.key))

    def forget_space(self, space: int) -> None:
        """See `Tier`."""
        with self._lock:
            keys = [key for of, key in self._index if of == space]
        for key in keys:
            self._remove(space, key)
        problem = self._discard(self._folder(space))
        if problem:
            logger.warning("node %s: %s", self._settings.node, problem)

    def _discard(self, folder: Path) -> str:
        """Move the folder to the trash, from which `maintain` removes it. Returns "" or an error text."""
        try:
            self._trash.mkdir(mode=0o700, exist_ok=True)
            folder.rename(self._trash / secrets.token_hex(8))
            self._empty_at_s = 0.0
            sync_directory(self._pages)
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"{folder}: {error.strerror or error}"
        return ""

    def maintain(self) -> bool:
        """See `Tier`. A step removes one folder of the trash."""
        if self._emptying is None:
            now_s = time.monotonic()
            if now_s < self._empty_at_s:
                return False
            self._empty_at_s = now_s + TRASH_RETRY_S
            self._emptying = self._empty_trash()
        more = next(self._emptying, False)
        if not more:
            self._emptying = None
        return more

    def _empty_trash(self) -> Iterator[bool]:
        """Remove one folder or file per step. Entries that cannot be removed stay until the next pass."""
        for entry in _entries(self._trash):
            for path in (*_entries_of_folder(entry), entry):
                shutil.rmtree(path, ignore_errors=True)
                _unlink(Path(path))  # it is not a folder
                yield True

    def close(self) -> None:
        """See `Tier`."""
        if not self._closed:
            self._closed = True
            os.close(self._lock_fd)

    # --- the index

    def _add(self, space: int, key: bytes, length_bytes: int) -> None:
        with self._lock:
            old = self._index.pop((space, key), None)
            self._index[space, key] = length_bytes
            self._used_bytes += length_bytes + BLOCK_BYTES - (0 if old is None else old + BLOCK_BYTES)

    def _remove(self, space: int, key: bytes) -> bool:
        with self._lock:
            length = self._index.pop((space, key), None)
            if length is not None:
                self._used_bytes -= length + BLOCK_BYTES
        return length is not None

    def _file(self, space: int, key: bytes) -> Path:
        return self._folder(space) / f"{key[0]:02x}" / key.hex()

    def _folder(self, space: int) -> Path:
        return self._pages / f"s{space:016x}"


def _entries(path: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError:
        return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is one itself, and no symbolic link, whose target is not ours."""
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _entries_of_folder(entry: os.DirEntry[str]) -> list[os.DirEntry[str]]:
    """The entries of a folder; of anything else none."""
    return _entries(Path(entry.path)) if _is_folder(entry) else []


def _space(folder: os.DirEntry[str]) -> int:
    """The space of a folder's pages, from its name. -1: it is no folder of a space."""
    digits = folder.name.removeprefix("s")
    try:
        return int(digits, 16) if folder.name == f"s{int(digits, 16):016x}" else -1
    except ValueError:
        return -1


def _decode(head: bytearray, name: PageName) -> tuple[TierPage, int] | None:
    """(page, digest) from a file's head, or None. A page of version 1 is in its folder's space."""
    record = decode_record_header(head, 0, 0)
    if record is not None:
        return record.page, record.digest
    record = decode_record_header(head, 0, 0, version=1)
    if record is None:
        return None
    return msgspec.structs.replace(record.page, space=name.space), record.digest


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):  # the next start finds it again
        path.unlink()
