"""The same-host data path: the client maps the node's arena and slot table, and copies.

    write_pages   copy into the reserved slot; nobody else sees it before the commit
    read_pages    copy out of the pinned slot, then look at the slot's row in the table: if it does not hold
    the very filling
                  that was pinned, our lease had ended and the slot may have been refilled while we copied
                  (LOST)

The checksum is computed piece by piece between the copies, while a piece is in the CPU's cache: one pass over
memory instead of two. Copies and hashes of large pieces release the GIL.

A mapping is kept per arena file and shared by the connections of one process: the first touch of every page
of a fresh mapping is a fault, which costs more than copying the page. A background thread takes those faults
ahead of use.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from pdserve.errors import PoolTimeout, PoolUnavailable
from pdserve.kvpool import checksum as checksums
from pdserve.kvpool.messages import Abort, ArenaInfo, Grant, Pin, Release, Reply, Request
from pdserve.kvpool.table import RowReader, TableLayout
from pdserve.kvpool.transports.base import CORRUPT, LOST, OK, Bytes1D, PageBuffers, PageOutcome
from pdserve.kvpool.transports.control import ControlChannel, make_hello

logger = logging.getLogger(__name__)

PIECE_BYTES: Final = 256 * 1024  # copied, then hashed: fits the second-level cache of current CPUs
POPULATE_BYTES: Final = 64 * 1024 * 1024  # faulted in per call of madvise, so that an end is noticed soon
MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; older kernels answer EINVAL


class MappedArena:
    """A node's arena and slot table in this process. Unmapped when the last connection lets go."""

    def __init__(self, info: ArenaInfo) -> None:
        """Raises PoolUnavailable when the files are not there or not what the node said."""
        try:
            self._arena = _map(Path(info.arena_path), info.arena_bytes, writable=True)
            self._table = _map(Path(info.table_path), info.table_bytes, writable=False)
        except (OSError, ValueError) as error:
            raise PoolUnavailable(f"cannot map the pool's arena {info.arena_path}: {error}") from error
        table = memoryview(self._table)
        layout = TableLayout.from_header(table)
        if layout is None or layout.arena_bytes > info.arena_bytes:
            raise PoolUnavailable(f"{info.table_path} is no slot table of this version of pdserve")
        self.bytes = np.frombuffer(self._arena, dtype=np.uint8)
        self.rows = RowReader(table, layout)

    def populate(self) -> None:
        """Take the page faults of the whole arena now."""
        for start in range(0, len(self._arena), POPULATE_BYTES):
            try:
                self._arena.madvise(MADV_POPULATE_WRITE, start, min(POPULATE_BYTES, len(self._arena) - start))
            except (OSError, ValueError):
                return  # an old kernel: faults are taken at first touch instead


class ArenaMaps:
    """The mappings of this process, one per arena file while anybody uses it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._maps: weakref.WeakValueDictionary[tuple[str, int, int], MappedArena] = (
            weakref.WeakValueDictionary()
        )

    def get(self, info: ArenaInfo) -> MappedArena:
        """Raises PoolUnavailable."""
        try:
            stat = Path(info.arena_path).stat()
        except OSError as error:
            raise PoolUnavailable(f"cannot map the pool's arena {info.arena_path}: {error}") from error
        key = (info.arena_path, stat.st_dev, stat.st_ino)
        with self._lock:
            mapped = self._maps.get(key)
            if mapped is None:
                mapped = MappedArena(info)
                self._maps[key] = mapped
                threading.Thread(target=mapped.populate, name="pdserve-populate", daemon=True).start()
            return mapped


class ShmConnector:
    """Opens connections whose pages travel by mapped memory. Implements `base.Connector`."""

    def __init__(self, client: str, host_id: str, *, checksum: bool = True, token: str = "") -> None:
        self._client = client
        self._host_id = host_id
        self._checksum = checksum
        self._token = token
        self._maps = ArenaMaps()

    def connect(self, address: str, deadline: float) -> ShmConnection:
        """Raises PoolUnavailable, PoolTimeout or PoolRefused."""
        hello = make_hello(self._client, self._host_id, "shm", self._token)
        return ShmConnection.open(
            ControlChannel.connect(address, hello, deadline), self._maps, self._checksum
        )


class ShmConnection:
    """One client's connection to one node on this host. Implements `base.Connection`."""

    def __init__(self, channel: ControlChannel, arena: MappedArena, checksum: bool) -> None:
        self.welcome = channel.welcome
        self._channel = channel
        self._arena = arena
        self._checksum = checksum

    @classmethod
    def open(cls, channel: ControlChannel, maps: ArenaMaps, checksum: bool) -> ShmConnection:
        """Map the arena beside a greeted control channel, which this owns from now on (also when it raises).

        Raises PoolUnavailable.
        """
        try:
            if channel.welcome.arena is None:
                raise PoolUnavailable(
                    f"pool node {channel.welcome.node} offers no mapped memory to this client"
                )
            return cls(channel, maps.get(channel.welcome.arena), checksum)
        except BaseException:
            channel.close()
            raise

    def call(self, request: Request, deadline: float) -> Reply:
        """See `base.Connection.call`."""
        return self._channel.call(request, deadline)

    def post(self, message: Abort | Release) -> None:
        """See `base.Connection.post`."""
        self._channel.post(message)

    def write_pages(
        self, grants: Sequence[Grant], pages: Sequence[PageBuffers], deadline: float
    ) -> list[int]:
        """See `base.Connection.write_pages`."""
        written = []
        for grant, page in zip(grants, pages, strict=True):
            _check_time(deadline)
            slot = self._slot(grant.offset, page)
            written.append(_gather(page, slot, self._checksum))
        return written

    def read_pages(
        self, pins: Sequence[Pin], pages: Sequence[PageBuffers], deadline: float
    ) -> list[PageOutcome]:
        """See `base.Connection.read_pages`."""
        outcomes = []
        for pin, page in zip(pins, pages, strict=True):
            _check_time(deadline)
            check = self._checksum and pin.checksum != checksums.NO_CHECKSUM
            found = _scatter(self._slot(pin.offset, page), page, check)
            if not self._arena.rows.still_holds(pin.slot, pin.sequence):
                outcomes.append(LOST)
            else:
                outcomes.append(CORRUPT if check and found != pin.checksum else OK)
        return outcomes

    def close(self) -> None:
        """Close; idempotent; never raises."""
        self._channel.close()

    def _slot(self, offset: int, page: PageBuffers) -> Bytes1D:
        end = offset + sum(segment.nbytes for segment in page)
        if not 0 <= offset < end <= self._arena.bytes.nbytes:
            raise PoolUnavailable(f"pool node {self.welcome.node} named a slot outside its arena")
        return self._arena.bytes[offset:end]


def _gather(page: PageBuffers, slot: Bytes1D, checksum: bool) -> int:
    """Copy the page's segments into the slot; the checksum of its bytes, or 0 without."""
    digest = checksums.start() if checksum else None
    at = 0
    for segment in page:
        for start in range(0, segment.nbytes, PIECE_BYTES):
            piece = segment[start : start + PIECE_BYTES]
            np.copyto(slot[at : at + piece.nbytes], piece)
            if digest is not None:
                digest.update(piece.data)
            at += piece.nbytes
    return checksums.finish(digest) if digest is not None else checksums.NO_CHECKSUM


def _scatter(slot: Bytes1D, page: PageBuffers, checksum: bool) -> int:
    """Copy the slot's bytes out into the page's segments; the checksum of what was copied, or 0 without."""
    digest = checksums.start() if checksum else None
    at = 0
    for segment in page:
        for start in range(0, segment.nbytes, PIECE_BYTES):
            piece = segment[start : start + PIECE_BYTES]
            np.copyto(piece, slot[at : at + piece.nbytes])
            if digest is not None:
                digest.update(piece.data)
            at += piece.nbytes
    return checksums.finish(digest) if digest is not None else checksums.NO_CHECKSUM


def _check_time(deadline: float) -> None:
    if time.monotonic() >= deadline:
        raise PoolTimeout("the deadline passed while copying pages")


def _map(path: Path, size_bytes: int, *, writable: bool) -> mmap.mmap:
    with path.open("r+b" if writable else "rb") as file:
        return mmap.mmap(
            file.fileno(), size_bytes, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        )
