"""A node gives its memory to the clients of its host: descriptors, at two Unix sockets in its directory.

    <arena_dir>/<node name>/readers    the arena, opened for reading, and the slot table
                            writers    the arena, opened for reading and writing, and the slot table

Welcome names one of the two to a client, by the client's rights. Who connects says nothing, gets two
descriptors if he is of this node's user, and is disconnected at once (transports/shm.py). So no
connection stays open, and nothing waits: the descriptors are the first bytes on a fresh socket.

The sockets keep a reader's faults from the pages of others. They are no bar to a hostile process of the same
user. It can connect to `writers`, open the files by their paths, or attach to this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pdserve.errors import StartupError
from pdserve.kvpool.transports.dial import peer_uid
from pdserve.kvpool.transports.shm import GREETING

READERS: Final = "readers"
WRITERS: Final = "writers"
BACKLOG: Final = 4096  # as at the node's other sockets
ACCEPTS_A_TURN: Final = 64  # of one socket; clients with a connection are served before the next
RETRY_ACCEPT_S: Final = 1.0  # when this process has no descriptor left
_NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class DescriptorSockets:
    """The two sockets of one node, in its loop."""

    def __init__(self, node: str, directory: Path, loop: asyncio.AbstractEventLoop) -> None:
        """`directory`: of the node's memory, locked by it. Sockets that are left there are replaced.

        Raises StartupError.
        """
        self._directory = directory
        self._loop = loop
        self._files: list[int] = []
        self._listening: dict[str, socket.socket] = {}
        try:
            table = self._file("table", os.O_RDONLY)
            self._listen(READERS, [self._file("arena", os.O_RDONLY), table])
            self._listen(WRITERS, [self._file("arena", os.O_RDWR), table])
        except OSError as error:
            self.close()
            reason = error.strerror or error
            raise StartupError(
                f"node {node}: cannot listen in {directory} for clients of this host: {reason}: choose "
                "another arena_dir"
            ) from error

    def close(self) -> None:
        """Give out nothing more. Idempotent."""
        while self._listening:
            name, listener = self._listening.popitem()
            self._loop.remove_reader(listener.fileno())
            listener.close()
            (self._directory / name).unlink(missing_ok=True)
        while self._files:
            os.close(self._files.pop())

    def _file(self, name: str, flags: int) -> int:
        self._files.append(os.open(self._directory / name, flags))
        return self._files[-1]

    def _listen(self, name: str, files: Sequence[int]) -> None:
        listener = self._listening[name] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.setblocking(False)
        (self._directory / name).unlink(missing_ok=True)
        at = os.open(self._directory, os.O_PATH | os.O_DIRECTORY)
        try:
            listener.bind(f"/proc/self/fd/{at}/{name}")  # a socket's path must be short
        finally:
            os.close(at)
        listener.listen(BACKLOG)
        self._watch(listener, files)

    def _watch(self, listener: socket.socket, files: Sequence[int]) -> None:
        if listener.fileno() >= 0:
            self._loop.add_reader(listener.fileno(), self._serve, listener, files)

    def _serve(self, listener: socket.socket, files: Sequence[int]) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                client, _ = listener.accept()
            except ConnectionAbortedError:
                continue
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_ROOM:
                    self._loop.remove_reader(listener.fileno())
                    self._loop.call_later(RETRY_ACCEPT_S, self._watch, listener, files)
                return
            with client, contextlib.suppress(OSError):  # it is gone already
                client.setblocking(False)
                if peer_uid(client) == os.geteuid():
                    socket.send_fds(client, [GREETING], files)
