"""A node of this process behind a real Unix socket whose manners can be spoiled. For tests of both clients.

The node is an `InprocNode`, so everything that it decides is real; so are the clients' sessions and sockets.
What can be wrong with the way to it is a switch of the door.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from pdserve.errors import PoolError
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.frames import FrameBuffer, decode_request, encode_frame
from pdserve.kvpool.protocol.page_bytes import PageBuffers
from pdserve.kvpool.transports.base import PageOutcome
from pdserve.kvpool.transports.control import ControlChannel
from pdserve.kvpool.transports.session import make_hello
from pdserve.kvpool.transports.shm import MappedPages
from tests.support.kvpool.inproc import InprocNode

FOREVER_S = 600.0
UPGRADING = m.Fault(0, "upgrading", "the node is being upgraded")


class Manner(enum.Enum):
    """What the door does with a new connection."""

    SERVES = "serves"
    UPGRADES = "upgrades"  # answers Hello with `UPGRADING`
    RESETS = "resets"  # hangs up before it reads Hello
    SILENT = "silent"  # reads, and answers nothing


class Door:
    """Serves a node at `address` until `close`."""

    def __init__(self, node: InprocNode, path: Path) -> None:
        self.node = node
        self.address = f"unix:{path}"
        self.manner = Manner.SERVES
        self.greeted = 0  # connections so far
        self.reset = 0  # connections that it reset so far
        self.swallows: Callable[[m.Request], bool] = lambda request: False  # these get no answer
        self._path = path
        self._lock = threading.Lock()
        self._open: dict[socket.socket, int] = {}  # the node's number of each connection
        self._listener: socket.socket | None = None
        self.open()

    def open(self) -> None:
        """Listen (again)."""
        self._path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen(64)
        self._start(self._accept, self._listener)

    def shut(self) -> None:
        """Nobody listens any more; open connections stay."""
        if self._listener is not None:
            self._path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None

    def hang_up(self, fault: m.Fault | None = None) -> None:
        """On all connections, with these last words."""
        with self._lock:
            sockets = list(self._open)
        for sock in sockets:
            with contextlib.suppress(OSError):
                if fault is not None:
                    sock.sendall(encode_frame(fault))
                sock.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """The node dies; its memory stays."""
        self.shut()
        self.node.stop()
        self.hang_up()

    def restart(self) -> None:
        """After `kill`: its next incarnation."""
        self.node.restart()
        self.open()

    def close(self) -> None:
        self.shut()
        self.hang_up()
        self.node.close()

    def _start(self, target: Callable[..., None], *given: object) -> None:
        threading.Thread(target=target, args=given, name="door", daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                if self.manner is Manner.RESETS:
                    sock.recv(1)  # with the rest of Hello unread, the client gets a reset
                    sock.close()
                    self.reset += 1
                else:
                    self._start(self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        connection = None
        with contextlib.suppress(OSError, PoolError), contextlib.closing(sock):
            try:
                frames = FrameBuffer()
                while data := sock.recv(65536):
                    for body in frames.feed(data):
                        request = decode_request(body)
                        if isinstance(request, m.Hello):
                            manner = self.manner  # a test changes it meanwhile
                            connection = self._greet(sock, request, manner)
                            if connection is None and manner is Manner.UPGRADES:
                                return
                        elif connection is not None:
                            self._answer(sock, connection, request)
            finally:
                with self._lock:
                    self._open.pop(sock, None)
                if connection is not None:
                    self.node.disconnect(connection)

    def _greet(self, sock: socket.socket, hello: m.Hello, manner: Manner) -> int | None:
        if manner is Manner.SILENT:
            return None
        if manner is Manner.UPGRADES:
            sock.sendall(encode_frame(UPGRADING))
            return None
        connection = self.node.connect(hello.client)
        node = self.node
        welcome = m.Welcome(m.PROTOCOL_VERSION, node.name, node.incarnation, "", "none", node.limits.lease_s)
        with self._lock:
            self.greeted += 1
            self._open[sock] = connection
            sock.sendall(encode_frame(welcome))
        return connection

    def _answer(self, sock: socket.socket, connection: int, request: m.Request) -> None:
        if self.swallows(request) or self.manner is Manner.SILENT:
            return
        if isinstance(request, m.Abort | m.Release):
            self.node.post(connection, request)
        elif isinstance(request, m.Wait):
            self._start(self._call, sock, connection, request)
        else:
            self._call(sock, connection, request)

    def _call(self, sock: socket.socket, connection: int, request: m.Request) -> None:
        try:
            reply = self.node.call(connection, request, time.monotonic() + FOREVER_S)
            with self._lock:
                sock.sendall(encode_frame(reply))
        except (OSError, PoolError):  # the node is gone: so is the connection
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class DoorConnector:
    """For the threads' client: control by socket through doors, pages in the nodes' memory.

    `before(node, step)` is called before every step: connect, call, post, read_pages, write_pages. What it
    raises, the step raises. `answer(node, request)` may answer in the node's place.
    """

    def __init__(self, doors: Sequence[Door]) -> None:
        self._nodes: Mapping[str, InprocNode] = {door.address: door.node for door in doors}
        self.before: Callable[[str, str], None] = lambda node, step: None
        self.answer: Callable[[str, m.Request], m.Reply | None] = lambda node, request: None

    def connect(self, address: str, deadline_s: float) -> DoorConnection:
        """Raises PoolUnavailable, PoolTimeout, PoolRestarting."""
        node = self._nodes[address]
        self.before(node.name, "connect")
        channel = ControlChannel.connect(address, make_hello("door", "", "none"), deadline_s)
        return DoorConnection(channel, node, self)


class DoorConnection:
    """A `Connection`."""

    def __init__(self, channel: ControlChannel, node: InprocNode, owner: DoorConnector) -> None:
        self.welcome = replace(channel.welcome, data_path="shm")
        self.is_mapped = True
        self.close = channel.close
        self._channel = channel
        self._owner = owner
        self._pages = MappedPages(node.memory, node.table, node.layout, True)

    def _before(self, step: str) -> None:
        self._owner.before(self.welcome.node, step)

    def call(self, request: m.Request, deadline_s: float) -> m.Reply:
        return self.call_all([request], deadline_s)[0]

    def call_all(self, requests: Sequence[m.Request], deadline_s: float) -> list[m.Reply]:
        said: list[m.Reply | None] = []
        for request in requests:
            self._before("call")
            said.append(self._owner.answer(self.welcome.node, request))
        if not any(said):
            return self._channel.call_all(requests, deadline_s)
        both = zip(said, requests, strict=True)
        return [reply or self._channel.call(request, deadline_s) for reply, request in both]

    def post(self, message: m.Abort | m.Release) -> None:
        self._before("post")
        self._channel.post(message)

    def write_pages(
        self, grants: Sequence[m.Grant], pages: Sequence[PageBuffers], deadline_s: float
    ) -> list[int]:
        self._before("write_pages")
        return self._pages.write(grants, pages, deadline_s)

    def read_pages(
        self, pins: Sequence[m.Pin], pages: Sequence[PageBuffers], deadline_s: float
    ) -> list[PageOutcome]:
        self._before("read_pages")
        return self._pages.read(pins, pages, deadline_s)
