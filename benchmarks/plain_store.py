"""The least store of pages that there can be: what `benchmarks.pool` has beside the pool as a reference.

A child process holds pages by key in one piece of memory, and moves them over a plain TCP socket of loopback
or over raw UCX tags. There are no grants, leases, checksums or evictions, and one client. At both ends a page
lies in memory that was not touched lately, as the pool's pages do: a test that sends one hot buffer again and
again measures the processor's cache.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, Literal, Protocol, TypeAlias

import numpy as np

from pdserve.kvpool.protocol.base import KEY_BYTES
from pdserve.kvpool.protocol.page_bytes import Bytes1D, PageBuffers, aligned
from pdserve.kvpool.transports.ucx import UcxLibrary, UcxLink
from tests.support.processes import HarnessError

Way: TypeAlias = Literal["sockets", "ucx"]
WAYS: Final[tuple[Way, ...]] = ("sockets", "ucx")
TIMEOUT_S: Final = 60
COUNT_BYTES: Final = 4
FIRST_TAG: Final = 16
DONE: Final = b"."


class Pages(Protocol):
    """Moves pages, each uint8 in one piece, to and from the other end."""

    def send(self, pages: Sequence[Bytes1D]) -> None: ...
    def receive(self, pages: Sequence[Bytes1D]) -> None: ...


class SocketPages:
    """By the calls that the kernel has for it."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, pages: Sequence[Bytes1D]) -> None:
        for page in pages:
            self._socket.sendall(page.data)

    def receive(self, pages: Sequence[Bytes1D]) -> None:
        for page in pages:
            if self._socket.recv_into(page.data, 0, socket.MSG_WAITALL) != page.nbytes:
                raise HarnessError("the other end of the plain store is gone")


class UcxPages:
    """By tagged messages, without sleeping. Each receive is posted before its message is sent."""

    def __init__(self, sock: socket.socket, link: UcxLink) -> None:
        self._socket = sock
        self._link = link

    def send(self, pages: Sequence[Bytes1D]) -> None:
        exactly(self._socket, len(DONE))  # they are posted
        self._finish([self._link.send(page, FIRST_TAG + i) for i, page in enumerate(pages)])

    def receive(self, pages: Sequence[Bytes1D]) -> None:
        operations = [self._link.receive(page, FIRST_TAG + i) for i, page in enumerate(pages)]
        self._socket.sendall(DONE)
        self._finish(operations)

    def _finish(self, operations: list) -> None:  # type: ignore[type-arg]
        while operations:
            while not operations[-1].completed:
                self._link.progress()
            if not operations.pop().ok:
                raise HarnessError("UCX did not move a page")


class PlainStore:
    """Implements `peers.PageStore`."""

    def __init__(self, sock: socket.socket, pages: Pages) -> None:
        self._socket = sock
        self._pages = pages

    def lend(self, blocks: Sequence[Bytes1D]) -> AbstractContextManager[None]:
        return nullcontext()

    def put(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> None:
        self._ask(b"p", keys)
        self._pages.send([page for (page,) in pages])
        exactly(self._socket, len(DONE))

    def get(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> None:
        self._ask(b"g", keys)
        self._pages.receive([page for (page,) in pages])

    def forget(self, keys: Sequence[bytes]) -> None:
        pass

    def _ask(self, what: bytes, keys: Sequence[bytes]) -> None:
        self._socket.sendall(what + len(keys).to_bytes(COUNT_BYTES, "little") + b"".join(keys))


@contextmanager
def plain_store(way: Way, page_bytes: int, capacity_bytes: int) -> Iterator[PlainStore]:
    """The child, and this process's end of it. Raises HarnessError."""
    command = [sys.executable, "-m", __name__ if __name__ != "__main__" else "benchmarks.plain_store"]
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        child = subprocess.Popen([*command, way, str(port), str(page_bytes), str(capacity_bytes)])
        try:
            door.settimeout(TIMEOUT_S)
            sock, _ = door.accept()
            with sock:
                yield PlainStore(sock, connected(way, sock))
        finally:
            child.kill()
            child.wait()


def connected(way: Way, sock: socket.socket, *, listens: bool = False) -> Pages:
    """One end. `listens`: it is the child's."""
    sock.setblocking(True)  # Python's own time-outs would end MSG_WAITALL early
    for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", TIMEOUT_S, 0))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if way == "sockets":
        return SocketPages(sock)
    library = UcxLibrary()
    link = UcxLink(library, library.context({}))
    greeting = np.zeros(8, np.uint8)
    if listens:
        sock.sendall(link.listen(0).to_bytes(COUNT_BYTES, "little"))
        greeted = link.receive_greeting(greeting)
        while not (link.accept() and greeted.completed):
            link.progress()
    else:
        link.connect("127.0.0.1", int.from_bytes(exactly(sock, COUNT_BYTES), "little"))
        sent = link.send(greeting, 1)
        while not sent.completed:
            link.progress()
    return UcxPages(sock, link)


def exactly(sock: socket.socket, count: int) -> bytes:
    """So many bytes. Raises HarnessError at the end of the stream."""
    data = sock.recv(count, socket.MSG_WAITALL)
    if len(data) != count:
        raise HarnessError("the other end of the plain store is gone")
    return data


def serve(way: Way, sock: socket.socket, page_bytes: int, capacity_bytes: int) -> None:
    """Until the client leaves. The oldest pages give way."""
    memory = aligned(capacity_bytes // page_bytes * page_bytes).reshape(-1, page_bytes)
    memory[:] = 0  # its pages are there
    pages, slots, number = connected(way, sock, listens=True), dict[bytes, int](), 0
    while what := sock.recv(1):
        count = int.from_bytes(exactly(sock, COUNT_BYTES), "little")
        joined = exactly(sock, count * KEY_BYTES)
        keys = [joined[start : start + KEY_BYTES] for start in range(0, len(joined), KEY_BYTES)]
        if what == b"g":
            pages.send([memory[slots[key]] for key in keys])
            continue
        for key in keys:
            slots[key] = number % len(memory)
            number += 1
        pages.receive([memory[slots[key]] for key in keys])
        sock.sendall(DONE)


if __name__ == "__main__":
    with socket.create_connection(("127.0.0.1", int(sys.argv[2]))) as ours:
        serve(sys.argv[1], ours, int(sys.argv[3]), int(sys.argv[4]))  # type: ignore[arg-type]
