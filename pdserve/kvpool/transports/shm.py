"""The transport to a node on the same host: control over a socket, pages by copying from and to its mapped
memory.

The arena and the slot table are mapped whole, once per process and incarnation of a node, however many
connections there are: see `Mapping`.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, TypeAlias

import numpy as np

from pdserve.errors import PoolRefused
from pdserve.kvpool.protocol.messages import Abort, ArenaInfo, Grant, Pin, Release, Reply, Request, Welcome
from pdserve.kvpool.protocol.page_bytes import Bytes1D, PageBuffers
from pdserve.kvpool.protocol.slot_table import RowReader, TableLayout
from pdserve.kvpool.transports.base import PageOutcome
from pdserve.kvpool.transports.control import ControlChannel
from pdserve.kvpool.transports.mapped import MappedPages
from pdserve.kvpool.transports.page_residency import populate_in_background, unmap_in_background

_Mappings: TypeAlias = "weakref.WeakValueDictionary[tuple[int, int, int], Mapping]"


class ShmConnection:
    """A `Connection` whose pages are copied from and to mapped memory."""

    def __init__(self, channel: ControlChannel, mapping: Mapping, checksum: bool) -> None:
        self.welcome: Welcome = channel.welcome
        self._channel = channel
        self._mapping = mapping  # shared with later connections while one of them refers to it
        self._pages = MappedPages(mapping.memory, mapping.rows, checksum)

    @classmethod
    def open(cls, channel: ControlChannel, checksum: bool, deadline_s: float) -> ShmConnection:
        """Take over a greeted channel. Raises PoolRefused when the node's memory cannot be mapped here, or
        PoolUnavailable when the node has let it go since; then the channel is closed.
        """
        try:
            return cls(channel, Mapping.of(channel.welcome), checksum)
        except PoolRefused:
            try:
                channel.take_pushed()  # raises if the node closed the connection before
            finally:
                channel.close()
            raise

    def call(self, request: Request, deadline_s: float) -> Reply:
        """See `Connection`."""
        return self._channel.call(request, deadline_s)

    def post(self, message: Abort | Release) -> None:
        """See `Connection`."""
        self._channel.post(message)

    def write_pages(
        self, grants: Sequence[Grant], pages: Sequence[PageBuffers], deadline_s: float
    ) -> list[int]:
        """See `Connection`."""
        return self._pages.write(grants, pages, deadline_s)

    def read_pages(
        self, pins: Sequence[Pin], pages: Sequence[PageBuffers], deadline_s: float
    ) -> list[PageOutcome]:
        """See `Connection`."""
        return self._pages.read(pins, pages, deadline_s)

    def close(self) -> None:
        """See `Connection`."""
        self._channel.close()


class Mapping:
    """One incarnation's arena and table in this process's memory; unmapped with its last connection.

    `memory` is the arena, shape [arena_bytes], `rows` reads the slot table.
    """

    # weak references: an entry ends with the last connection that uses the mapping
    _shared: ClassVar[_Mappings] = weakref.WeakValueDictionary()
    _shared_lock: ClassVar = threading.Lock()

    def __init__(self, arena: mmap.mmap, table: mmap.mmap, layout: TableLayout) -> None:
        self.memory: Bytes1D = np.frombuffer(arena, dtype=np.uint8)
        self.rows = RowReader(memoryview(table), layout)
        weakref.finalize(self, unmap_in_background, self.memory).atexit = False

    @classmethod
    def of(cls, welcome: Welcome) -> Mapping:
        """The mapping that all connections to this incarnation share. Raises PoolRefused."""
        if welcome.arena is None:
            raise PoolRefused(f"pool node {welcome.node} offers no memory to map")
        info = welcome.arena
        try:
            stat = Path(info.arena_path).stat()
            name = (stat.st_dev, stat.st_ino, welcome.incarnation)
            with cls._shared_lock:
                found = cls._shared.get(name)
                if found is None:
                    found = cls._shared[name] = cls._open(info, welcome)
                    populate_in_background(found.memory)
            return found
        except OSError as error:
            raise PoolRefused(
                f"pool node {welcome.node}: cannot map {error.filename or info.arena_path} "
                f"({error.strerror}): the node is on another host, in another container or of another user; "
                "use data_path = 'ucx'"
            ) from error

    @classmethod
    def _open(cls, info: ArenaInfo, welcome: Welcome) -> Mapping:
        table = _map(info.table_path, info.table_bytes, mmap.PROT_READ)
        view = memoryview(table)
        layout = TableLayout.from_header(bytes(view[:64]), info.table_bytes)
        if layout is None or int(layout.header(view)["incarnation"][0]) != welcome.incarnation:
            raise PoolRefused(
                f"pool node {welcome.node}: {info.table_path} here is another node's memory: the node "
                "is on another host; use data_path = 'ucx'"
            )
        arena = _map(info.arena_path, info.arena_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
        return cls(arena, table, layout)


def _map(path: str, size: int, protection: int) -> mmap.mmap:
    fd = os.open(path, (os.O_RDWR if protection & mmap.PROT_WRITE else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size != size:
            raise OSError(0, "it has another size than the node says", path)
        return mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=protection)
    finally:
        os.close(fd)


def host_id() -> str:
    """An id of this host: the kernel's boot id, and the mount and IPC namespaces.

    Two containers on one machine are two hosts, since neither sees the other's /dev/shm.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [Path(f"/proc/self/ns/{name}").readlink().name for name in ("mnt", "ipc")]
    return ":".join([boot, *spaces])
