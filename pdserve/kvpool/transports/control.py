"""The blocking control channel of a pool client: one socket, frames of messages.py, errors translated.

Used by one thread at a time. After PoolTimeout, PoolUnavailable or FrameError the channel is broken: every
later use raises PoolUnavailable at once, because a reply that comes late, or half a frame, must never be
taken for the answer to the next request.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import Final

from pdserve.errors import (
    FrameError,
    PoolError,
    PoolRefused,
    PoolRestarting,
    PoolTimeout,
    PoolUnavailable,
)
from pdserve.kvpool.protocol.cluster_messages import View
from pdserve.kvpool.protocol.frames import FrameBuffer, decode_reply, encode_frame
from pdserve.kvpool.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    DataPathChoice,
    Fault,
    Hello,
    Release,
    Reply,
    Request,
    Welcome,
)
from pdserve.kvpool.transports.base import OnView
from pdserve.kvpool.transports.dial import open_socket

RESTARTING: Final = frozenset({"upgrading", "stopping"})  # codes of a hang-up that is soon over
RECEIVE_BYTES: Final = 256 * 1024  # one call takes the answer to a batch of 4,096 keys
POST_TIMEOUT_S: Final = (
    1.0  # a post has no deadline of its own: a node that drains nothing for this long is stuck
)


def make_hello(
    client: str, host_id: str, data_path: DataPathChoice, token: str = "", *, views: bool = False
) -> Hello:
    """The Hello of this process. `views`: whether the node shall push its view when it changes."""
    return Hello(
        version=PROTOCOL_VERSION,
        client=client,
        pid=os.getpid(),
        host_id=host_id,
        data_path=data_path,
        token=token,
        views=views,
    )


def hung_up(address: str, fault: Fault) -> PoolUnavailable:
    """The error for a Fault that concerns the whole connection."""
    kind = PoolRestarting if fault.code in RESTARTING else PoolUnavailable
    return kind(f"pool node {address} hung up: {fault.message}")


class ControlChannel:
    """An open, greeted control connection. `welcome` is the node's answer to our Hello."""

    def __init__(self, sock: socket.socket, address: str, on_view: OnView | None = None) -> None:
        self._socket = sock
        self._address = address
        self._on_view = on_view
        self._frames = FrameBuffer()
        self._replies: dict[int, Reply] = {}  # arrived before they were asked for
        self._awaited: set[int] = set()  # ids sent, not yet collected: bounds _replies
        self._broken: str | None = None
        self.welcome: Welcome

    @classmethod
    def connect(
        cls, address: str, hello: Hello, deadline_s: float, on_view: OnView | None = None
    ) -> ControlChannel:
        """Connect and shake hands. `on_view` is told the views that the node pushes, whenever we read.

        Raises PoolUnavailable (nobody there), PoolRestarting, PoolTimeout, PoolRefused (the node said no),
        FrameError (it is no pool node), ConfigError (malformed address).
        """
        channel = cls(open_socket(address, deadline_s), address, on_view)
        try:
            channel._send(encode_frame(hello), deadline_s)
            answer = channel._next_reply(deadline_s)
            if isinstance(answer, Fault) and answer.code in RESTARTING:
                raise hung_up(address, answer)
            if isinstance(answer, Fault):
                raise PoolRefused(f"pool node {address} refused the connection: {answer.message}")
            if not isinstance(answer, Welcome):
                raise FrameError(f"pool node {address} answered Hello with {type(answer).__name__}")
        except PoolError:
            channel.close()
            raise
        channel.welcome = answer
        return channel

    def call(self, request: Request, deadline_s: float) -> Reply:
        """Send the request, return its reply (a Fault is returned). Raises PoolTimeout, PoolUnavailable,
        FrameError; then the channel is broken.
        """
        self.send(request, deadline_s)
        return self.receive(_request_id(request), deadline_s)

    def send(self, request: Request, deadline_s: float) -> None:
        """Send without waiting: collect the reply with `receive`. Errors as `call`."""
        self._awaited.add(_request_id(request))
        self._send(encode_frame(request), deadline_s)

    def receive(self, request_id: int, deadline_s: float) -> Reply:
        """Wait for the reply to a request that was sent. Errors as `call`."""
        while request_id not in self._replies:
            self._file(self._next_reply(deadline_s))
        self._awaited.discard(request_id)
        return self._replies.pop(request_id)

    def take_pushed(self) -> None:
        """Read what has come unasked, without waiting: for who polls `fileno`. Raises PoolUnavailable when
        the node hung up, FrameError.
        """
        self._check_usable()
        try:
            for body in self._frames.feed(b""):  # came with what was read before
                self._file(decode_reply(body))
            self._socket.setblocking(False)
            data = self._socket.recv(RECEIVE_BYTES)
            if not data:
                raise PoolUnavailable(f"pool node {self._address} closed the connection")
            for body in self._frames.feed(data):
                self._file(decode_reply(body))
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise self._break(PoolUnavailable(f"pool node {self._address} went away: {error}")) from error
        except PoolError as error:
            raise self._break(error) from None

    def post(self, message: Abort | Release) -> None:
        """Send a message that has no reply. Raises PoolUnavailable."""
        try:
            self._send(encode_frame(message), time.monotonic() + POST_TIMEOUT_S)
        except PoolTimeout as error:
            raise PoolUnavailable(str(error)) from error

    @property
    def peer_host(self) -> str:
        """The numeric address of the host that we are connected to. Raises PoolUnavailable."""
        try:
            peer = self._socket.getpeername()
        except OSError as error:
            raise self._break(PoolUnavailable(f"pool node {self._address} went away: {error}")) from error
        return str(peer[0]) if self._socket.family != socket.AF_UNIX else "127.0.0.1"

    def fileno(self) -> int:
        """The socket, to be polled beside other descriptors; `take_pushed` when it is readable."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close; idempotent; never raises."""
        self._broken = self._broken or "it was closed"
        self._socket.close()

    def _send(self, frame: bytes, deadline_s: float) -> None:
        self._check_usable()
        try:
            self._socket.settimeout(self._remaining_s(deadline_s))
            self._socket.sendall(frame)
        except TimeoutError as error:
            raise self._break(PoolTimeout(f"pool node {self._address} takes no requests")) from error
        except OSError as error:
            self._last_words()
            raise self._break(PoolUnavailable(f"pool node {self._address} went away: {error}")) from error

    def _last_words(self) -> None:
        """Nothing can be sent any more; what the node said before it hung up may still be there. Raises the
        error that it named.
        """
        data = b""
        with contextlib.suppress(OSError):
            self._socket.setblocking(False)
            while True:
                for body in self._frames.feed(data):
                    reply = decode_reply(body)
                    if isinstance(reply, Fault) and reply.id == 0:
                        raise self._break(hung_up(self._address, reply))
                data = self._socket.recv(RECEIVE_BYTES)
                if not data:
                    return

    def _file(self, reply: Reply) -> None:
        """Keep a reply for who asked. Raises PoolUnavailable, PoolRestarting, FrameError."""
        reply_id: int = getattr(reply, "id", 0)
        if reply_id == 0 and isinstance(reply, View):
            if self._on_view is not None:
                self._on_view(self.welcome, reply)
        elif reply_id == 0 and isinstance(reply, Fault):
            raise self._break(hung_up(self._address, reply))
        elif reply_id not in self._awaited:
            raise self._break(
                FrameError(f"pool node {self._address} answered request {reply_id}, never sent")
            )
        else:
            self._replies[reply_id] = reply

    def _next_reply(self, deadline_s: float) -> Reply:
        self._check_usable()
        try:
            for body in self._frames.feed(b""):
                return decode_reply(body)
            while True:
                self._socket.settimeout(self._remaining_s(deadline_s))
                data = self._socket.recv(RECEIVE_BYTES)
                if not data:
                    raise PoolUnavailable(f"pool node {self._address} closed the connection")
                for body in self._frames.feed(data):
                    return decode_reply(body)
        except TimeoutError as error:
            message = f"pool node {self._address} did not answer in time"
            raise self._break(PoolTimeout(message)) from error
        except OSError as error:
            raise self._break(PoolUnavailable(f"pool node {self._address} went away: {error}")) from error
        except PoolError as error:
            raise self._break(error) from None

    def _remaining_s(self, deadline_s: float) -> float:
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        return remaining_s

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise PoolUnavailable(f"the connection to pool node {self._address} is broken: {self._broken}")

    def _break(self, error: PoolError) -> PoolError:
        self._broken = self._broken or str(error)
        return error


def _request_id(request: Request) -> int:
    request_id: int = getattr(request, "id", 0)
    return request_id
