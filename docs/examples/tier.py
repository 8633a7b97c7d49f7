"""A storage tier that keeps pages in an SQLite database. The oldest pages leave when it is full."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Collection, Iterator, Sequence

import msgspec
import numpy as np

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
from pdserve.kvpool.tiers.durable_files import claim_directory, read_options

BLOCK_BYTES = 65536  # SQLite's page size
SCHEMA = """
CREATE TABLE IF NOT EXISTS pages (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    space TEXT, key BLOB, checksum TEXT, digest TEXT, sequence INTEGER, length INTEGER, data BLOB,
    UNIQUE (space, key));
CREATE TABLE IF NOT EXISTS names (id INTEGER PRIMARY KEY, text TEXT);
"""


class SqliteOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options in the node's configuration: there are none."""


class SqliteTier:
    """A `Tier`. One connection, one lock: reads wait for each other."""

    def __init__(self, settings: TierSettings) -> None:
        read_options(settings, "sqlite", SqliteOptions)
        self._settings = settings
        self.capacity_bytes = settings.capacity_bytes
        self._lock_fd = claim_directory(settings)
        self._lock = threading.Lock()
        self._writing = threading.Lock()  # a text must not wait for the end of a batch's transaction
        self._closed = False
        self._database = sqlite3.connect(
            settings.path / "pages.sqlite", isolation_level=None, check_same_thread=False
        )
        self._database.execute(f"PRAGMA page_size = {BLOCK_BYTES}")
        self._database.execute("PRAGMA secure_delete = ON")
        self._database.execute("PRAGMA synchronous = FULL")  # what was stored survives a crash
        self._database.executescript(SCHEMA)
        self._database.execute(f"PRAGMA max_page_count = {max(8, self.capacity_bytes // BLOCK_BYTES)}")

    @property
    def used_bytes(self) -> int:
        """Blocks of the database that hold something."""
        with self._lock:
            [blocks] = self._database.execute("PRAGMA page_count").fetchone()
            [unused] = self._database.execute("PRAGMA freelist_count").fetchone()
        return int(blocks - unused) * BLOCK_BYTES

    def namespaces(self) -> str | None:
        """The text that `save_namespaces` kept."""
        with self._lock:
            found = self._database.execute("SELECT text FROM names").fetchone()
        return None if found is None or found[0] is None else str(found[0])

    def save_namespaces(self, text: str | None) -> str:
        """Keep the text, or none; the problem in words, or an empty string."""
        with self._writing:
            return self._change("INSERT OR REPLACE INTO names VALUES (1, ?)", (text,))

    def scan(self, known: Collection[int]) -> Iterator[list[TierPage]]:
        """Drop the pages of unknown spaces, and report the others in batches."""
        marks = ", ".join("?" for _ in known)
        self._change(f"DELETE FROM pages WHERE space NOT IN ({marks})", tuple(map(str, known)))
        last = 0
        while True:
            with self._lock:
                rows = self._database.execute(
                    "SELECT number, space, key, length, checksum, sequence FROM pages "
                    "WHERE number > ? ORDER BY number LIMIT 1000",
                    (last,),
                ).fetchall()
            if not rows:
                return
            last = rows[-1][0]
            yield [_page(*row[1:]) for row in rows]

    def put(self, pages: Sequence[TierPage], data: Sequence[PageMemory]) -> PutResult:
        """Store a batch in one transaction. A page that is too large spoils no other page."""
        with self._writing:
            return self._put(pages, data)

    def _put(self, pages: Sequence[TierPage], data: Sequence[PageMemory]) -> PutResult:
        if problem := self._change("BEGIN"):
            return PutResult([WRITE_FAILED] * len(pages), problem)
        statuses = []
        for page, memory in zip(pages, data, strict=True):
            if page.length_bytes > self.capacity_bytes // 4:
                statuses.append(REFUSED)
                continue
            self._make_room(page.length_bytes)
            failed = self._insert(page, memory[: page.length_bytes].tobytes())
            statuses.append(WRITE_FAILED if failed else STORED)
            problem = problem or failed
        if failed := self._change("COMMIT"):
            self._change("ROLLBACK")
            return PutResult([WRITE_FAILED] * len(pages), failed)
        return PutResult(statuses, problem)

    def read(self, names: Sequence[PageName], into: Sequence[PageMemory]) -> list[ReadResult]:
        """Read a batch. The bytes are checked before they count."""
        return [self._read(name, memory) for name, memory in zip(names, into, strict=True)]

    def forget(self, names: Sequence[PageName]) -> None:
        """Find these pages no more."""
        for name in names:
            self._change("DELETE FROM pages WHERE space = ? AND key = ?", (str(name.space), name.key))

    def forget_space(self, space: int) -> None:
        """Find no page of the space any more."""
        self._change("DELETE FROM pages WHERE space = ?", (str(space),))

    def erase(self, space: int, keys: Collection[bytes] | None = None) -> str:
        """Leave no byte of these pages: SQLite writes zeros over what is deleted."""
        if keys is None:
            return self._change("DELETE FROM pages WHERE space = ?", (str(space),))
        problems = [
            self._change("DELETE FROM pages WHERE space = ? AND key = ?", (str(space), key)) for key in keys
        ]
        return "; ".join(filter(None, problems))

    def maintain(self) -> bool:
        """There is no work in the background."""
        return False

    def close(self) -> None:
        """May be called twice."""
        if not self._closed:
            self._closed = True
            self._database.close()
            os.close(self._lock_fd)

    def _read(self, name: PageName, memory: PageMemory) -> ReadResult:
        try:
            with self._lock:
                row = self._database.execute(
                    "SELECT space, key, length, checksum, sequence, digest, data FROM pages "
                    "WHERE space = ? AND key = ? AND length = ?",
                    (str(name.space), name.key, name.length_bytes),
                ).fetchone()
        except sqlite3.Error:
            return ReadResult(READ_FAILED)
        if row is None:
            return ReadResult(GONE)
        *facts, digest, data = row
        if len(data) != name.length_bytes or checksum_bytes(data) != int(digest):
            return ReadResult(CORRUPT)
        memory[: len(data)] = np.frombuffer(data, np.uint8)
        return ReadResult(LOADED, _page(*facts))

    def _insert(self, page: TierPage, stored: bytes) -> str:
        digest = page.checksum or checksum_bytes(stored)
        return self._change(
            "INSERT OR REPLACE INTO pages (space, key, checksum, digest, sequence, length, data) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                *(str(page.space), page.key, str(page.checksum), str(digest)),
                *(page.sequence, page.length_bytes, stored),
            ),
        )

    def _make_room(self, length_bytes: int) -> None:
        """Let the oldest pages leave. `leaving` is told while they can still be read."""
        wanted = self.capacity_bytes - length_bytes - 4 * BLOCK_BYTES
        while self.used_bytes > wanted:
            with self._lock:
                rows = self._database.execute(
                    "SELECT space, key, length FROM pages ORDER BY number LIMIT 8"
                ).fetchall()
            if not rows:
                return
            leaving = [PageName(int(space), key, length) for space, key, length in rows]
            self._settings.leaving(leaving)
            self.forget(leaving)

    def _change(self, statement: str, values: tuple[object, ...] = ()) -> str:
        try:
            with self._lock:
                self._database.execute(statement, values)
        except sqlite3.Error as error:
            return f"{self._settings.path}: {error}"
        return ""


def _page(space: str, key: bytes, length: int, checksum: str, sequence: int) -> TierPage:
    """Spaces and checksums are text in the table: SQLite's integers have 63 bits and a sign."""
    return TierPage(int(space), key, length, int(checksum), sequence)
