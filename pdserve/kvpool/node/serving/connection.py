"""One client's control connection on a node: bytes to frames to requests, replies to bytes. asyncio.

The node behind it is anything with the methods of `Host`: it decides how the client will move pages, is told
when clients connect and disconnect, and gets every request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import ssl
from typing import Final, Protocol, cast

from pdserve.errors import FrameError
from pdserve.kvpool.node.admission import Admission
from pdserve.kvpool.node.data_paths import DataPathInfo, DataPaths
from pdserve.kvpool.node.metrics.meter import Meter, Open
from pdserve.kvpool.node.serving.tls_transport import TlsTransport
from pdserve.kvpool.protocol.frames import FrameBuffer, decode_request, encode_frame
from pdserve.kvpool.protocol.handshake import Challenged
from pdserve.kvpool.protocol.messages import (
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    DataPathName,
    Fault,
    Hello,
    Proof,
    Reply,
    Request,
    Welcome,
)
from pdserve.kvpool.transports.dial import peer_uid
from pdserve.logs import ThrottledLog

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 5.0  # for a client to read the last replies; afterwards its connection goes without
FRAMES_A_TURN = 64  # of one connection; others are read before its next
HALF_FRAME_TIMEOUT_S = 10.0  # for the rest of a frame to come: a client may hold 4 MiB of ours by it
MAX_CLIENT_CHARS = 64  # of a client's name, in our log
MAX_UNREAD_BYTES = 16 * 1024 * 1024  # replies a client has not read: four of the largest frames
READS_ON_BELOW_BYTES = 256 * 1024  # of such replies: with more, none of its requests are read
UNREAD_TIMEOUT_S = 30.0  # for such a client to read anything
KEEPALIVE_IDLE_S = 6
KEEPALIVE_INTERVAL_S = 3
KEEPALIVE_PROBES = 3


class Host(Protocol):
    """What a connection asks of its node."""

    name: str
    meter: Meter
    strangers: ThrottledLog  # lines about clients that have not shaken hands

    @property
    def tls(self) -> ssl.SSLContext | None:
        """For clients that come by TCP; None: without TLS."""
        ...

    def opened(self, connection: ClientConnection) -> None:
        """A socket was accepted."""
        ...

    def holds(self, connection: ClientConnection, half_frame_bytes: int) -> None:
        """The client has sent so many bytes of a frame that is not whole."""
        ...

    def closed(self) -> None:
        """A socket was closed."""
        ...

    @property
    def admission(self) -> Admission: ...

    def choose_path(self, address: str, hello: Hello) -> DataPathName | Fault:
        """How this client will move pages, or why it cannot be served."""
        ...

    @property
    def data_paths(self) -> DataPaths: ...

    def connected(self, connection: ClientConnection, hello: Hello, path: DataPathName) -> None: ...

    def disconnected(self, number: int, *, by_peer: bool) -> None: ...

    def welcome(self, connection: int, path: DataPathName, info: DataPathInfo | None) -> Welcome: ...

    def received(self, connection: ClientConnection, message: Request) -> None:
        """A request of a client that shook hands."""
        ...


class ClientConnection(asyncio.Protocol):
    """One control connection: frames to events, answers to frames."""

    _transport: asyncio.Transport

    def __init__(self, node: Host, number: int) -> None:
        self.number = number
        self.requests = 0  # of the client, since it shook hands
        self._node = node
        self.address = ""
        """The client's IP address, or its user on this host."""
        self._frames = FrameBuffer(MAX_HELLO_BYTES)
        self._client = "a client that has not said hello"
        self._greeted = False
        self.hello: Hello | None = None  # of a client that shook hands
        self._challenged: Challenged | None = None  # until the client has proved its token
        self._tls: TlsTransport | None = None
        self._greeting: asyncio.Task[None] | None = None  # while the data path is made ready for the client
        self._closed_by_us = False
        self._turned_away = False
        self._paused = False
        self._paused_since_s = 0.0
        self._unread_timer: asyncio.TimerHandle | None = None  # while the client reads too few replies
        self._gone = False
        self._open: dict[int, Open] = {}  # requests not answered yet, by id
        self._half_timer: asyncio.TimerHandle | None = None  # while a frame is not whole

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._transport.set_write_buffer_limits(READS_ON_BELOW_BYTES)
        loop = asyncio.get_running_loop()
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _end_when_silent(sock)
            if (context := self._node.tls) is not None:
                self._transport = self._tls = TlsTransport(self._transport, context)
        # a connection that is not in use has a time to end by: before its Hello, and after we closed it
        self._end_timer = loop.call_later(HANDSHAKE_TIMEOUT_S, self._no_handshake)
        self.address = _address_of(transport)
        self._node.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._turned_away:
            self._transport.pause_reading()  # only its end was awaited
        if self._closed_by_us or self._turned_away:
            return
        if self._tls is not None:
            try:
                data = self._tls.receive(data)
            except ssl.SSLError as error:
                self._turn_away(f"no TLS: {error.reason}", level=logging.DEBUG)
                return
            if not data:
                return
        self._take(data)

    def _take(self, data: bytes) -> None:
        if self._closed_by_us or self._turned_away:
            return
        # frames that waited while we paused were read then
        since_s = self._paused_since_s or self._node.meter.clock()
        self._paused_since_s = 0.0
        whole = False
        try:
            for count, body in enumerate(self._frames.feed(data), 1):
                whole = True
                self._received(decode_request(body), since_s)
                if self._closed_by_us or self._turned_away:
                    return
                if count == FRAMES_A_TURN and not self._paused:
                    self.pause()
                    self.resume()
                if self._waits:
                    self._paused_since_s = since_s
                    break  # the rest stays in `_frames`
        except FrameError as error:
            self._refuse_greeting(Fault(0, "bad_frame", str(error)))
            return
        self._watch_half_frame(whole)

    def pause(self) -> None:
        """Read nothing more from the client until `resume`."""
        if not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Go on in the next round of the loop, with what was read before first."""
        asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._paused = False
        self._read_on()

    @property
    def _waits(self) -> bool:
        """Whether nothing is read of the client now."""
        return self._paused or self._unread_timer is not None

    def _read_on(self) -> None:
        if not self._waits and not self._gone and not self._transport.is_closing():
            self._transport.resume_reading()
            self._take(b"")

    def pause_writing(self) -> None:
        """Of asyncio: the client does not read its replies. It gets no more of them before it has, or it
        would fill our memory with them.
        """
        if self._unread_timer is None and not self._transport.is_closing():
            self._transport.pause_reading()
            self._await_reading()

    def resume_writing(self) -> None:
        """Of asyncio: it has read most of them."""
        self._end_unread_timer()
        asyncio.get_running_loop().call_soon(self._read_on)

    def _await_reading(self) -> None:
        loop = asyncio.get_running_loop()
        self._unread_timer = loop.call_later(UNREAD_TIMEOUT_S, self._reads_nothing, self.unread_bytes)

    def _reads_nothing(self, unread_bytes: int) -> None:
        if self.unread_bytes < unread_bytes:
            self._await_reading()  # it does, slowly
        else:
            self.close(f"it has read no reply for {UNREAD_TIMEOUT_S:.0f} s", at_once=True)

    def _end_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def connection_lost(self, error: Exception | None) -> None:
        self._gone = True
        self._end_timer.cancel()
        self._end_unread_timer()
        if self._half_timer is not None:
            self._half_timer.cancel()
        self._node.closed()
        self._node.disconnected(self.number, by_peer=not self._closed_by_us)

    def send(self, message: Reply) -> None:
        """Send, or close a client that does not read. Nothing is sent to one that is gone."""
        if self._closed_by_us or self._transport.is_closing():
            return
        request_id: int = getattr(message, "id", 0)
        self._transport.write(_encoded(message, request_id))
        request = self._open.pop(request_id, None)
        if request is not None:
            self._node.meter.end(request, message)
        if self._transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.close(f"it has not read {MAX_UNREAD_BYTES >> 20} MiB of replies", at_once=True)

    @property
    def unread_bytes(self) -> int:
        """Of replies that the client has not taken yet."""
        return self._transport.get_write_buffer_size()

    def close(self, reason: str, *, at_once: bool = False, level: int = logging.INFO) -> None:
        """Close, after what was sent is out unless `at_once`. Idempotent. `level`: of the log line."""
        if self._closed_by_us:
            return
        self._closed_by_us = True
        if not self._turned_away:
            self._log("closing", reason, level)
        if at_once:
            self._transport.abort()
        else:
            self._transport.close()
            self._end_timer.cancel()
            self._end_timer = asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, self._transport.abort)

    def _log(self, doing: str, reason: str, level: int) -> None:
        text, words = f"node %s: {doing} the connection of %s: %s", (self._node.name, self._client, reason)
        if self._greeted:
            logger.log(level, text, *words)
        else:  # else a stranger could fill the disk of logs
            self._node.strangers.log(level, doing, text, *words)

    def _received(self, message: Request, since_s: float) -> None:
        if self._greeted:
            self.requests += 1
            request_id = getattr(message, "id", None)
            if request_id is not None:
                self._open[request_id] = self._node.meter.begin(message, since_s)
            self._node.received(self, message)
            return
        if self._challenged is not None and isinstance(message, Proof):
            proved = self._challenged.accept(message)
            self._challenged = None
            if proved is None:
                self._refuse_greeting(Fault(0, "bad_token", "the proof of the token is wrong"))
            else:
                self._admit(proved)
            return
        if not isinstance(message, Hello) or self._greeting is not None or self._challenged is not None:
            self._refuse_greeting(Fault(0, "no_hello", "the first message of a connection must be Hello"))
            return
        name = "".join(c if c.isprintable() else "?" for c in message.client[:MAX_CLIENT_CHARS])
        self._client = f"{name} (pid {message.pid})"
        if not message.key_id:
            self._admit(message)
            return
        asked = self._node.admission.challenge(message)
        if isinstance(asked, Fault):
            self._refuse_greeting(asked)
            return
        self._challenged = asked
        self.send(asked.challenge)

    def _admit(self, hello: Hello) -> None:
        path = self._node.choose_path(self.address, hello)
        if path in ("ucx", "tcp"):
            greet = self._open_data_path(hello, path)
            self._greeting = asyncio.get_running_loop().create_task(greet)
        else:
            self._greet(hello, path, None)

    def _greet(self, hello: Hello, path: DataPathName | Fault, info: DataPathInfo | None) -> None:
        if isinstance(path, Fault):
            self._refuse_greeting(path)
            return
        self._end_timer.cancel()
        self._greeted = True
        self._frames.max_frame_bytes = MAX_FRAME_BYTES
        self.hello = hello
        self._node.connected(self, hello, path)
        self.send(self._node.welcome(self.number, path, info))

    async def _open_data_path(self, hello: Hello, path: DataPathName) -> None:
        info = await self._node.data_paths.open(self.number, hello, path)
        if self._gone or self._closed_by_us:
            self._node.data_paths.close(self.number)
        elif isinstance(info, Fault):
            self.refuse(info)
        else:
            # others may have connected meanwhile
            self._greet(hello, self._node.choose_path(self.address, hello), info)

    def refuse(self, fault: Fault) -> None:
        """Say why, and close. Idempotent."""
        self.send(fault)
        self.close(fault.message)

    def _refuse_greeting(self, fault: Fault) -> None:
        """Say why a client is not let in. One that was let in, or has a data path, is closed too."""
        if self._greeted or self._greeting is not None:
            self.refuse(fault)
        else:
            self._turn_away(fault.message)
            self.send(fault)

    def _turn_away(self, reason: str, level: int = logging.INFO) -> None:
        """Serve a stranger no more. It keeps its place until it leaves, or its time to shake hands ends.

        A stranger that is closed comes back at once. A thousand of them would come some thousand times a
        second, and clients would wait for the loop. The bounds on sockets that shake hands hold for it.
        """
        if self._closed_by_us or self._turned_away:
            return
        self._turned_away = True
        self._log("turning away", reason, level)
        self._frames = FrameBuffer(MAX_HELLO_BYTES)
        if self._half_timer is not None:
            self._half_timer.cancel()
            self._half_timer = None
            self._node.holds(self, 0)

    def _watch_half_frame(self, whole: bool) -> None:
        """A frame that began must end in time, however slowly its bytes come. `whole`: one just did."""
        half = 0 if self._waits else self._frames.held_bytes
        if half or self._half_timer is not None:
            self._node.holds(self, half)
        if self._half_timer is not None and (whole or not half):
            self._half_timer.cancel()
            self._half_timer = None
        if half and self._half_timer is None:
            loop = asyncio.get_running_loop()
            self._half_timer = loop.call_later(HALF_FRAME_TIMEOUT_S, self._half_frame)

    def _half_frame(self) -> None:
        self.close(f"the rest of a frame did not come within {HALF_FRAME_TIMEOUT_S:.0f} s", at_once=True)

    def _no_handshake(self) -> None:
        what = "no Hello" if self._greeting is None else "the data path was not ready"
        self.close(f"{what} within {HANDSHAKE_TIMEOUT_S:.0f} s", at_once=True)


def _encoded(message: Reply, request_id: int) -> bytes:
    try:
        return encode_frame(message)
    except FrameError as error:
        return encode_frame(Fault(request_id, "too_large", f"the answer is too large: {error}"))


def _address_of(transport: asyncio.BaseTransport) -> str:
    """The IP address of the client, or "uid N" for a Unix socket."""
    sock = transport.get_extra_info("socket")
    if sock is None:
        return "unknown"
    if sock.family == socket.AF_UNIX:
        return f"uid {peer_uid(sock)}"
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if peer else "unknown"


def _end_when_silent(sock: socket.socket) -> None:
    """A host that vanished, or its network, sends no end of its connections: without this they would stay for
    hours. A connection ends after about 15 s in which the peer's kernel acknowledged nothing, asked or not.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    silent_s = KEEPALIVE_IDLE_S + KEEPALIVE_INTERVAL_S * KEEPALIVE_PROBES
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silent_s * 1000)


DROPS_LOG_S: Final = 10.0  # between two lines about sockets that were dropped
GOODBYE_S: Final = 0.5  # for the last replies to leave


class Connections:
    """All open connections of a node, also those that have not shaken hands."""

    def __init__(self, node: str) -> None:
        self.by_number: dict[int, ClientConnection] = {}
        self._node = node
        self._changed = asyncio.Event()
        self._dropped = 0
        self._logged_s = -math.inf

    def add(self, connection: ClientConnection) -> None:
        """It was accepted."""
        self.by_number[connection.number] = connection

    def remove(self, number: int) -> None:
        """It is closed."""
        self.by_number.pop(number, None)
        self._changed.set()

    def drop(self, number: int | None, reason: str) -> None:
        """Close a socket that has no place. One line for many: a stranger may not fill the log."""
        connection = None if number is None else self.by_number.get(number)
        if connection is None:
            return
        connection.close(reason, at_once=True, level=logging.DEBUG)
        self._dropped += 1
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._logged_s + DROPS_LOG_S:
            self._logged_s = now_s
            logger.warning(
                "node %s: %s: closed %d sockets until now, the last one of %s",
                self._node,
                reason,
                self._dropped,
                connection.address,
            )

    async def dismiss(self, fault: Fault) -> None:
        """Tell all clients why, and close their connections; returns when they are closed, or soon after."""
        await asyncio.sleep(0)  # accepted sockets become connections
        present = dict(self.by_number)
        for connection in present.values():
            connection.refuse(fault)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                while present.keys() & self.by_number.keys():
                    self._changed.clear()
                    await self._changed.wait()
