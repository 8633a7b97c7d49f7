"""The transport to a node on the same host: control over a socket, pages by copying from and to its mapped
memory.

The arena and the slot table are mapped whole, once per process and incarnation of a node, however many
connections there are: see `Mapping`. The node gives them as descriptors. A client without
the right to write gets the arena opened for reading.

A client opens no file that a node names: whoever listens at a node's address could name any file of the
client's user, and a put would overwrite it. It connects to a Unix socket, says nothing, and takes what
comes:

    node      accepts, asks the kernel who connected, sends two descriptors (SCM_RIGHTS), closes
    client    asks the kernel who listens, takes the descriptors: the arena, and its slot table

Both go on only if the other is of their own user. A false node on another host has no descriptors to send,
and the only sockets that it could name are those of this user's real nodes.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import socket
import stat
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final, TypeAlias

import numpy as np

from pdserve.errors import PoolError, PoolRefused, PoolTimeout, PoolUnavailable
from pdserve.kvpool.native import copying
from pdserve.kvpool.native.build import compiled
from pdserve.kvpool.protocol.messages import Abort, ArenaInfo, Grant, Pin, Release, Reply, Request, Welcome
from pdserve.kvpool.protocol.page_bytes import Bytes1D, PageBuffers
from pdserve.kvpool.protocol.slot_table import Buffer, TableLayout
from pdserve.kvpool.transports.base import PageOutcome
from pdserve.kvpool.transports.control import ControlChannel
from pdserve.kvpool.transports.dial import connect_unix, peer_uid
from pdserve.kvpool.transports.page_residency import populate_in_background, unmap_in_background


class MappedPages:
    """Copies pages to and from `memory`, the arena, shape [arena_bytes]. Thread-safe."""

    def __init__(self, memory: Bytes1D, table: Buffer, layout: TableLayout, checksum: bool) -> None:
        """`table`: the slot table, which is of this layout."""
        self._memory = memory
        self._table = table
        self._rows_at = layout.rows_at
        self._checksum = checksum
        compiled()  # says now if pages will be slow

    def write(self, grants: Sequence[Grant], pages: Sequence[PageBuffers], deadline_s: float) -> list[int]:
        """`Connection.write_pages`. Raises PoolTimeout; PoolUnavailable if a slot is outside the arena."""
        offsets = [grant.offset for grant in grants]
        try:
            return copying.write(self._memory, offsets, pages, checksum=self._checksum, deadline_s=deadline_s)
        except TimeoutError as error:
            raise PoolTimeout(str(error)) from error
        except (IndexError, OverflowError) as error:
            raise _outside(error) from error

    def read(self, pins: Sequence[Pin], pages: Sequence[PageBuffers], deadline_s: float) -> list[PageOutcome]:
        """`Connection.read_pages`. Raises PoolTimeout; PoolUnavailable if a slot is outside the arena."""
        try:
            return copying.read(
                self._memory,
                self._table,
                self._rows_at,
                [pin.offset for pin in pins],
                [pin.checksum for pin in pins],
                [pin.slot for pin in pins],
                [pin.sequence for pin in pins],
                pages,
                checksum=self._checksum,
                deadline_s=deadline_s,
            )
        except TimeoutError as error:
            raise PoolTimeout(str(error)) from error
        except (IndexError, OverflowError) as error:
            raise _outside(error) from error


def _outside(error: Exception) -> PoolUnavailable:
    return PoolUnavailable(f"the pool node named a slot that is outside its memory: {error}")


logger = logging.getLogger(__name__)
_Mappings: TypeAlias = "weakref.WeakValueDictionary[tuple[int, ArenaInfo], Mapping]"


class ShmConnection:
    """A `Connection` whose pages are copied from and to mapped memory."""

    def __init__(self, channel: ControlChannel, mapping: Mapping, checksum: bool) -> None:
        self.welcome: Welcome = channel.welcome
        self.is_mapped = True
        self._channel = channel
        self._mapping = mapping  # shared with later connections while one of them refers to it
        self._pages = MappedPages(mapping.memory, mapping.table, mapping.layout, checksum)

    @classmethod
    def open(
        cls, channel: ControlChannel, checksum: bool, deadline_s: float, populate: bool = True
    ) -> ShmConnection:
        """Take over a greeted channel. Raises PoolRefused when the node's memory cannot be mapped here,
        PoolUnavailable when the node has let it go since, or PoolTimeout; then the channel is closed.
        """
        try:
            return cls(channel, Mapping.of(channel.welcome, deadline_s, populate), checksum)
        except PoolError:
            try:
                channel.take_pushed()  # raises if the node closed the connection before
            finally:
                channel.close()
            raise

    def call(self, request: Request, deadline_s: float) -> Reply:
        """See `Connection`."""
        return self._channel.call(request, deadline_s)

    def call_all(self, requests: Sequence[Request], deadline_s: float) -> list[Reply]:
        """See `Connection`."""
        return self._channel.call_all(requests, deadline_s)

    def post(self, message: Abort | Release) -> None:
        """See `Connection`."""
        self._channel.post(message)

    def write_pages(
        self, grants: Sequence[Grant], pages: Sequence[PageBuffers], deadline_s: float
    ) -> list[int]:
        """See `Connection`."""
        if not self._mapping.memory.flags.writeable:
            raise PoolUnavailable(
                f"pool node {self.welcome.node} gave its memory for reading, before we had a right to write: "
                "connect again"
            )
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

    `memory` is the arena, shape [arena_bytes], read-only as the node gave it; `table` is the slot table.
    """

    # weak references: an entry ends with the last connection that uses the mapping
    _shared: ClassVar[_Mappings] = weakref.WeakValueDictionary()
    _shared_lock: ClassVar = threading.Lock()

    def __init__(self, arena: mmap.mmap, table: mmap.mmap, layout: TableLayout) -> None:
        self.memory: Bytes1D = np.frombuffer(arena, dtype=np.uint8)
        self.table: Buffer = memoryview(table)
        self.layout = layout
        self._is_populated = False
        weakref.finalize(self, unmap_in_background, self.memory).atexit = False

    @classmethod
    def of(cls, welcome: Welcome, deadline_s: float, populate: bool) -> Mapping:
        """The mapping that all connections to this incarnation with the same right to write share.

        `populate`: its pages are made present now, where no earlier connection wanted it.
        Raises PoolRefused, PoolUnavailable, PoolTimeout.
        """
        info = welcome.arena
        if info is None:
            raise PoolRefused(f"pool node {welcome.node} offers no memory to map")
        name = (welcome.incarnation, info)
        with cls._shared_lock:
            found = cls._shared.get(name)
        if found is None:
            made = cls._open(info, welcome, deadline_s)
            with cls._shared_lock:
                found = cls._shared.setdefault(name, made)
        if populate:
            found._populate()
        return found

    def _populate(self) -> None:
        with self._shared_lock:
            is_populated, self._is_populated = self._is_populated, True
        if not is_populated:
            populate_in_background(self.memory)

    @classmethod
    def _open(cls, info: ArenaInfo, welcome: Welcome, deadline_s: float) -> Mapping:
        where = f"pool node {welcome.node}: cannot map its memory: {info.socket_path}"
        try:
            arena_fd, table_fd = receive_descriptors(info.socket_path, deadline_s)
        except TimeoutError as error:
            raise PoolTimeout(f"{where} does not answer") from error
        except ConnectionError as error:
            raise PoolUnavailable(f"{where} is not served any more: the node has ended") from error
        except (OSError, Foreign) as error:
            reason = getattr(error, "strerror", None) or error
            raise PoolRefused(
                f"{where}: {reason}: the node is on another host, in another container or of another user; "
                "use data_path = 'ucx'"
            ) from error
        try:
            return cls._map(info, welcome, arena_fd, table_fd)
        except OSError as error:
            raise PoolRefused(f"{where}: {error.strerror or error}") from error
        finally:
            os.close(arena_fd)
            os.close(table_fd)

    @classmethod
    def _map(cls, info: ArenaInfo, welcome: Welcome, arena_fd: int, table_fd: int) -> Mapping:
        """Raises OSError, PoolRefused."""
        for fd, size in ((arena_fd, info.arena_bytes), (table_fd, info.table_bytes)):
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or not 0 < size == found.st_size:
                raise OSError(0, "it gives out a file of another kind or size than the node says")
        table = mmap.mmap(table_fd, info.table_bytes, prot=mmap.PROT_READ)
        view = memoryview(table)
        layout = TableLayout.from_header(bytes(view[:64]), info.table_bytes)
        if (
            layout is None
            or layout.arena_bytes != info.arena_bytes
            or int(layout.header(view)["incarnation"][0]) != welcome.incarnation
        ):
            raise PoolRefused(
                f"pool node {welcome.node}: {info.socket_path} here gives out another node's memory: the "
                "node is on another host; use data_path = 'ucx'"
            )
        mode = fcntl.fcntl(arena_fd, fcntl.F_GETFL) & os.O_ACCMODE
        may_write = mmap.PROT_WRITE if mode == os.O_RDWR else 0
        arena = mmap.mmap(arena_fd, info.arena_bytes, prot=mmap.PROT_READ | may_write)
        return cls(arena, table, layout)


def host_id() -> str:
    """An id of this host: the kernel's boot id, and the mount and IPC namespaces.

    Two containers on one machine are two hosts, since neither sees the other's /dev/shm.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    spaces = [Path(f"/proc/self/ns/{name}").readlink().name for name in ("mnt", "ipc")]
    return ":".join([boot, *spaces])


GREETING: Final = b"m"  # descriptors travel with at least one byte
FILES: Final = 2


class Foreign(Exception):
    """The socket does not give out a node's memory, or not to us. Its text says why."""


def receive_descriptors(socket_path: str, deadline_s: float) -> tuple[int, int]:
    """Descriptors of the arena and of its table; the caller closes them.

    Raises Foreign, ConnectionError when nobody serves the socket any more, TimeoutError, or OSError.
    """
    if not socket_path.startswith("/") or "\0" in socket_path:
        raise Foreign(f"{socket_path!r} is no path of a socket")
    directory, _, name = socket_path.rpartition("/")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_left_s(deadline_s))
        at = os.open(directory or "/", os.O_PATH | os.O_DIRECTORY)
        try:
            connect_unix(sock, f"/proc/self/fd/{at}/{name}", deadline_s)  # a socket's path must be short
        finally:
            os.close(at)
        if peer_uid(sock) != os.geteuid():
            raise Foreign("it belongs to another user")
        sock.settimeout(_left_s(deadline_s))
        data, fds, _, _ = socket.recv_fds(sock, len(GREETING), FILES, socket.MSG_CMSG_CLOEXEC)
    if data and len(fds) == FILES:
        return fds[0], fds[1]
    for fd in fds:
        os.close(fd)
    if data:
        raise Foreign("it gives out something else")
    raise ConnectionResetError("it was closed")


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
