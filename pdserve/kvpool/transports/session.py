"""The protocol of a client's control connection, without a socket: bytes in, typed events out (as in h11).

The client sends Hello, and the node answers it. Every later request has an id, and replies arrive in any
order. A Fault with id 0 is about the connection. A client with a token talks only to a node that has proved
to know the token, and proves the same in turn (handshake.py).

    state       message of the node               event                     next state
    GREETING    Challenge, with a right proof     Proving                   GREETING
                Challenge, with a wrong proof     Ended(PoolRefused)        ENDED
                Welcome, and nothing to prove     Greeted                   OPEN
                Welcome, and nothing proved       Ended(PoolRefused)        ENDED
                Fault "upgrading", "stopping"     Ended(PoolRestarting)     ENDED
                another Fault                     Ended(PoolRefused)        ENDED
                anything else                     Ended(FrameError)         ENDED
    OPEN        reply to a request that was sent  Answered                  OPEN
                Fault with id 0                   Ended(PoolRestarting, or PoolUnavailable)
                anything else                     Ended(FrameError)         ENDED
    any         the end of the stream             Ended(PoolUnavailable)    ENDED
                bytes that are no frames          Ended(FrameError)         ENDED
    ENDED       whatever comes                    no event                  ENDED

After the end every use raises, so a late reply or half a frame is never taken for the answer to another
request. A runner reports an error or time-out of its socket by `fail`.

Two runners drive a session: `ControlChannel` for a thread, `AsyncControl` for an event loop. They move bytes,
wait, and pass events on. Deadlines and the data path are outside this module.
"""

from __future__ import annotations

import os
import secrets
from typing import Final, TypeAlias

import msgspec

from pdserve.errors import FrameError, PoolError, PoolRefused, PoolRestarting, PoolUnavailable
from pdserve.kvpool.protocol.frames import FrameBuffer, decode_reply, encode_frame
from pdserve.kvpool.protocol.handshake import NONCE_BYTES, prove, without_token
from pdserve.kvpool.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    Challenge,
    DataPathChoice,
    Fault,
    Hello,
    Release,
    Reply,
    Request,
    Welcome,
)
from pdserve.security.log_text import printable
from pdserve.security.tokens import reveal

_UNPROVED: Final = (
    "pool node {address} does not prove that it knows our token: give the node the token, or leave "
    "it out here"
)
NO_REPLY: Final = (Abort, Release)
RESTARTING: Final = frozenset({"upgrading", "stopping"})  # Fault codes of a node that restarts soon


class Proving(msgspec.Struct, frozen=True):
    """The node has proved that it knows our token. These bytes, to be sent now, prove that we know it."""

    data: bytes


class Greeted(msgspec.Struct, frozen=True):
    """The node accepted us. This event comes once, before all others except Proving and Ended."""

    welcome: Welcome


class Answered(msgspec.Struct, frozen=True):
    """The reply to the request with this id, once for each sent request."""

    request_id: int
    reply: Reply


class Ended(msgspec.Struct, frozen=True):
    """The last event. `fault`: the node's last message, if it closed the connection with one."""

    error: PoolError
    fault: Fault | None = None


Event: TypeAlias = Proving | Greeted | Answered | Ended


class ControlSession:
    """The state of one control connection. Not thread-safe. `address` is used in error texts."""

    def __init__(self, address: str, hello: Hello) -> None:
        self.address = address
        self._token = hello.token
        self._hello = without_token(hello, secrets.token_bytes(NONCE_BYTES))
        self._proved = not hello.token  # or there is nothing to prove
        self.greeting = encode_frame(self._hello)  # the first bytes to send
        self.ended: PoolError | None = None
        self._welcome: Welcome | None = None
        self._frames = FrameBuffer()
        self._unanswered: set[int] = set()

    @property
    def welcome(self) -> Welcome:
        """The node's answer to our Hello. Available after Greeted."""
        assert self._welcome is not None
        return self._welcome

    @property
    def greeted(self) -> bool:
        return self._welcome is not None

    @property
    def is_between_frames(self) -> bool:
        """What comes next is the beginning of a frame."""
        return not self._frames.held_bytes

    def send(self, message: Request) -> bytes:
        """The bytes of a message. Its reply, if any, comes as an Answered event.

        Raises PoolUnavailable after the end, FrameError for a message that is too long.
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
        """The events that these bytes complete. b"" is the end of the stream. Never raises."""
        if self.ended is not None:
            return []
        if not data:
            early = "" if self.greeted else " before it answered: it may want TLS (tls.ca)"
            return [self._end(PoolUnavailable(f"pool node {self.address} closed the connection{early}"))]
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
        """End the session after an error of the runner's socket."""
        return [] if self.ended is not None else [self._end(error)]

    def _take(self, reply: Reply) -> Event:
        if self._welcome is None:
            return self._greet(reply)
        reply_id = _id(reply)
        if reply_id in self._unanswered:
            self._unanswered.discard(reply_id)
            return Answered(reply_id, reply)
        if reply_id == 0 and isinstance(reply, Fault):
            return self._end(hung_up(self.address, reply), reply)
        return self._end(FrameError(f"pool node {self.address} answered request {reply_id}, never sent"))

    def _greet(self, reply: Reply) -> Event:
        if isinstance(reply, Challenge) and not self._proved:
            return self._prove(reply)
        if isinstance(reply, Welcome):
            if not self._proved:
                return self._end(PoolRefused(_UNPROVED.format(address=self.address)))
            self._welcome = reply
            return Greeted(reply)
        if not isinstance(reply, Fault):
            name = type(reply).__name__
            return self._end(FrameError(f"pool node {self.address} answered Hello with {name}"))
        if reply.code in RESTARTING:
            return self._end(hung_up(self.address, reply), reply)
        text = f"pool node {self.address} refused the connection: {printable(reply.message)}"
        return self._end(PoolRefused(text), reply)

    def _prove(self, asked: Challenge) -> Event:
        try:
            proof = prove(self._hello, asked, self._token)
        except PoolRefused as error:
            return self._end(error)
        self._proved = True
        return Proving(encode_frame(proof))

    def _end(self, error: PoolError, fault: Fault | None = None) -> Ended:
        self.ended = error
        self._unanswered.clear()
        return Ended(error, fault)


def make_hello(client: str, host_id: str, data_path: DataPathChoice, token: str = "") -> Hello:
    """The Hello of this process."""
    return Hello(
        version=PROTOCOL_VERSION,
        client=client,
        pid=os.getpid(),
        host_id=host_id,
        data_path=data_path,
        token=reveal(token),
    )


def hung_up(address: str, fault: Fault) -> PoolUnavailable:
    """The error for a Fault that concerns the whole connection."""
    kind = PoolRestarting if fault.code in RESTARTING else PoolUnavailable
    return kind(f"pool node {address} hung up: {printable(fault.message)}")


def gone(error: PoolError, prefix: str = "") -> PoolUnavailable:
    """A new error for a request whose session ended by `error`: each error has its own traceback."""
    kind = type(error) if isinstance(error, PoolUnavailable) else PoolUnavailable
    return kind(f"{prefix}{error}")


def _id(message: Request | Reply) -> int:
    message_id: int = getattr(message, "id", 0)
    return message_id
