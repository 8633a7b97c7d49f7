"""One control connection of a client to a node, without its socket: bytes in, typed events out (h11's way).

The client says Hello, and the node's first message answers it. From then on every request carries an id, and
replies come in any order. A message without an id comes unasked.

    state       message of the node               event                     next state
    GREETING    Welcome                           Greeted                   OPEN
                Fault "upgrading", "stopping"     Ended(PoolRestarting)     ENDED
                another Fault                     Ended(PoolRefused)        ENDED
                anything else                     Ended(FrameError)         ENDED
    OPEN        reply to a request that was sent  Answered                  OPEN
                View with id 0                    ViewPushed                OPEN
                Fault with id 0                   Ended(PoolRestarting, or PoolUnavailable)
                anything else                     Ended(FrameError)         ENDED
    any         the end of the stream             Ended(PoolUnavailable)    ENDED
                bytes that are no frames          Ended(FrameError)         ENDED
    ENDED       whatever comes                    no event                  ENDED

After its end every use raises, so a reply that comes late, or half a frame, is never taken for the answer to
the next request. What a runner learns from its socket (a time-out, an error) it tells by `fail`.

Two runners drive a session: `ControlChannel` for a thread, `AsyncControl` for an event loop. They move bytes,
wait, and hand events on; everything above is decided here. Not covered: time, and the data path.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec

from pdserve.errors import FrameError, PoolError, PoolRefused, PoolRestarting, PoolUnavailable
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

NO_REPLY: Final = (Abort, Release)
RESTARTING: Final = frozenset({"upgrading", "stopping"})  # codes of a hang-up that is soon over


class Greeted(msgspec.Struct, frozen=True):
    """The node takes us. Once, and before every other event but Ended."""

    welcome: Welcome


class Answered(msgspec.Struct, frozen=True):
    """The reply to the request with this id; once for each that was sent."""

    request_id: int
    reply: Reply


class ViewPushed(msgspec.Struct, frozen=True):
    """The node has a new view of the ring."""

    view: View


class Ended(msgspec.Struct, frozen=True):
    """The last event. `fault`: what the node said as it hung up."""

    error: PoolError
    fault: Fault | None = None


Event: TypeAlias = Greeted | Answered | ViewPushed | Ended


class ControlSession:
    """Not thread-safe. `address` is for messages to people."""

    def __init__(self, address: str, hello: Hello) -> None:
        self.address = address
        self.greeting = encode_frame(hello)  # the first bytes to send
        self.ended: PoolError | None = None
        self._welcome: Welcome | None = None
        self._frames = FrameBuffer()
        self._unanswered: set[int] = set()

    @property
    def welcome(self) -> Welcome:
        """The node's answer to our Hello; only after Greeted."""
        assert self._welcome is not None
        return self._welcome

    @property
    def greeted(self) -> bool:
        return self._welcome is not None

    def send(self, message: Request) -> bytes:
        """The bytes of a message, whose reply, where it has one, will be an event. Raises PoolUnavailable
        after the end, FrameError for a message that is too long.
        """
        self.check()
        frame = encode_frame(message)
        if not isinstance(message, NO_REPLY):
            self._unanswered.add(_id(message))
        return frame

    def check(self) -> None:
        """Raises PoolUnavailable, or its subclass, after the end."""
        if self.ended is not None:
            raise gone(self.ended, "the connection is broken: ") from self.ended

    def receive(self, data: bytes) -> list[Event]:
        """What these bytes complete; b"" is the end of the stream. Never raises."""
        if self.ended is not None:
            return []
        if not data:
            return [self._end(PoolUnavailable(f"pool node {self.address} closed the connection"))]
        events: list[Event] = []
        try:
            for body in self._frames.feed(data):
                event = self._take(decode_reply(body))
                events.append(event)
                if isinstance(event, Ended):
                    break
        except FrameError as error:
            events.append(self._end(error))
        return events

    def fail(self, error: PoolError) -> list[Event]:
        """The runner cannot go on."""
        return [] if self.ended is not None else [self._end(error)]

    def _take(self, reply: Reply) -> Event:
        if self._welcome is None:
            return self._greet(reply)
        reply_id = _id(reply)
        if reply_id in self._unanswered:
            self._unanswered.discard(reply_id)
            return Answered(reply_id, reply)
        if reply_id == 0 and isinstance(reply, View):
            return ViewPushed(reply)
        if reply_id == 0 and isinstance(reply, Fault):
            return self._end(hung_up(self.address, reply), reply)
        return self._end(FrameError(f"pool node {self.address} answered request {reply_id}, never sent"))

    def _greet(self, reply: Reply) -> Event:
        if isinstance(reply, Welcome):
            self._welcome = reply
            return Greeted(reply)
        if not isinstance(reply, Fault):
            name = type(reply).__name__
            return self._end(FrameError(f"pool node {self.address} answered Hello with {name}"))
        if reply.code in RESTARTING:
            return self._end(hung_up(self.address, reply), reply)
        text = f"pool node {self.address} refused the connection: {reply.message}"
        return self._end(PoolRefused(text), reply)

    def _end(self, error: PoolError, fault: Fault | None = None) -> Ended:
        self.ended = error
        self._unanswered.clear()
        return Ended(error, fault)


def make_hello(
    client: str, host_id: str, data_path: DataPathChoice, token: str = "", *, views: bool = False
) -> Hello:
    """The Hello of this process. `views`: whether the node pushes its view when that changes."""
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


def gone(error: PoolError, prefix: str = "") -> PoolUnavailable:
    """A new error for a request whose session ended by `error`: each error has its own traceback."""
    kind = type(error) if isinstance(error, PoolUnavailable) else PoolUnavailable
    return kind(f"{prefix}{error}")


def _id(message: Request | Reply) -> int:
    message_id: int = getattr(message, "id", 0)
    return message_id


OnView: TypeAlias = Callable[[Welcome, View], None]  # which node and incarnation, and its new view
