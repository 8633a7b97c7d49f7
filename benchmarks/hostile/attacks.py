"""Who attacks which port, and what his connections send. They take turns with the ways of an attack.

A connection that asks `again` does so in every round, whether or not it was answered; answers are never read.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import ssl
import struct
from collections.abc import Callable
from typing import Final, Literal, TypeAlias

import msgspec

from benchmarks.router.mock import MODEL
from benchmarks.stores import BenchError
from pdserve.errors import PoolError
from pdserve.kvpool.protocol.base import KEY_BYTES
from pdserve.kvpool.protocol.frames import encode_frame, refused
from pdserve.kvpool.protocol.messages import Exists, Opened, OpenNamespace, Request, Reserve
from pdserve.kvpool.transports.control import make_hello
from pdserve.kvpool.transports.session import Answered, ControlSession, Ended, Greeted, Proving

HOST: Final = "127.0.0.1"
TIMEOUT_S: Final = 1.0
NAMESPACE: Final = "hostile"
GEOMETRY: Final = {"hostile": "1"}
PAGE_BYTES: Final = 64 * 1024
KEYS: Final = 64
PACE_US: Final = 20_000  # between two chunks of a stream, as a fast model gives them
CHAT: Final = "/v1/chat/completions"

Port: TypeAlias = Literal["pool: control", "pool: pages", "pool: control, TLS", "pool: pages, TLS", "router"]


class Secrets(msgspec.Struct, frozen=True, kw_only=True):
    """What a hostile client has by right."""

    read_token: str
    write_token: str
    api_key: str


class Held:
    """One hostile connection."""

    def __init__(self, sock: socket.socket, again: bytes = b"") -> None:
        self._socket = sock
        self._again = again
        self._left = b""
        sock.setblocking(False)

    @property
    def is_open(self) -> bool:
        """Whether the other end has not closed it. What it sent stays unread."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return not poll.poll(0)

    def ask_again(self) -> None:
        """As far as the other end takes it."""
        try:
            self._left = self._left or self._again
            self._left = self._left[self._socket.send(self._left) :] if self._left else b""
        except OSError:  # it takes no more, or is closed
            return

    def close(self) -> None:
        """At once."""
        self._socket.close()


class _HeldInTls(Held):
    """A connection whose handshake goes on in later rounds: the other end may never answer it."""

    def __init__(self, sock: ssl.SSLSocket, data: bytes) -> None:
        """`data`: sent once, inside TLS."""
        super().__init__(sock)
        self._tls = sock
        self._left = data

    def ask_again(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # not yet; ValueError: the other end has closed it
            self._tls.do_handshake()
            super().ask_again()


Way: TypeAlias = Callable[[int, Secrets], Held]
"""(port, secrets) → an open connection. Raises OSError where it was not let in."""


class Attack(msgspec.Struct, frozen=True):
    """One who, at one port."""

    who: str
    port: Port
    ways: tuple[Way, ...]

    @property
    def name(self) -> str:
        return f"{self.who} at {self.port}"


def _says(make: Callable[[], bytes], again: bytes = b"") -> Way:
    """Sends these bytes."""

    def opened(port: int, secrets: Secrets) -> Held:
        sock = socket.create_connection((HOST, port), TIMEOUT_S)
        sock.sendall(make())
        return Held(sock, again)

    return opened


def _says_inside_tls(make: Callable[[], bytes]) -> Way:
    """The same after a handshake; it takes any certificate."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE

    def opened(port: int, secrets: Secrets) -> Held:
        sock = socket.create_connection((HOST, port), TIMEOUT_S)
        held = _HeldInTls(trusting.wrap_socket(sock, do_handshake_on_connect=False), make())
        held.ask_again()
        return held

    return opened


def _asks_as(token: Literal["read_token", "write_token"], make: Callable[[int], Request]) -> Way:
    """Shows a token that is right, opens its namespace, and asks `make(its number)` again and again."""

    def opened(port: int, secrets: Secrets) -> Held:
        sock = socket.create_connection((HOST, port), TIMEOUT_S)
        try:
            number = _enter(sock, getattr(secrets, token))
        except (OSError, PoolError) as error:
            sock.close()
            raise ConnectionError(str(error)) from error
        return Held(sock, encode_frame(make(number)))

    return opened


def _enter(sock: socket.socket, token: str) -> int:
    """Shake hands and open the namespace. Raises OSError, PoolError."""
    session = ControlSession("the node", make_hello("hostile", "", "none", token))
    sock.sendall(session.greeting)
    while True:
        for event in session.receive(sock.recv(1 << 16)):
            match event:
                case Proving():
                    sock.sendall(event.data)
                case Greeted():
                    sock.sendall(session.send(OpenNamespace(1, NAMESPACE, GEOMETRY)))
                case Answered(reply=Opened() as reply):
                    return reply.namespace
                case Answered():
                    raise refused(event.reply, "the node")
                case Ended():
                    raise event.error


def _streams(port: int, secrets: Secrets) -> Held:
    """Asks for a stream that has no end in this time, and reads none of it."""
    sock = socket.create_connection((HOST, port), TIMEOUT_S)
    sock.sendall(chat(secrets.api_key, {"stream": True, "max_tokens": 100_000_000, "seed": PACE_US}))
    return Held(sock)


def chat(key: str, more: dict[str, object]) -> bytes:
    """A request to the router, whole."""
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "on"}], **more}).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n"
    )
    return f"{head}content-type: application/json\r\n\r\n".encode() + body


def _keys() -> list[bytes]:
    return [os.urandom(KEY_BYTES) for _ in range(KEYS)]


def _noise() -> bytes:
    return os.urandom(4096)


def _nothing() -> bytes:
    return b""


_HALF_A_FRAME: Final = struct.pack("<I", 4000) + b"x" * 3000
_GREETED: Final = encode_frame(make_hello("stranger", "", "none"))
_HALF_A_HANDSHAKE: Final = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 100
_HALF_A_HEAD: Final = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-long: " + b"y" * 3000
_NO_KEY: Final = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"

ATTACKS: Final = (
    Attack(
        "a stranger",
        "pool: control",
        (_says(_nothing), _says(lambda: _HALF_A_FRAME), _says(_noise), _says(lambda: _GREETED)),
    ),
    Attack(
        "a read token",
        "pool: control",
        (_asks_as("read_token", lambda number: Exists(2, number, _keys())),),
    ),
    Attack(
        "a write token",
        "pool: control",
        (_asks_as("write_token", lambda number: Reserve(2, number, _keys()[:1], [PAGE_BYTES])),),
    ),
    Attack("a stranger", "pool: pages", (_says(_nothing), _says(lambda: b"ticket"), _says(_noise))),
    *(
        Attack(
            "a stranger",
            port,
            (
                *(_says(_nothing), _says(lambda: _HALF_A_HANDSHAKE), _says(_noise)),
                _says_inside_tls(lambda: _HALF_A_FRAME),
            ),
        )
        for port in ("pool: control, TLS", "pool: pages, TLS")
    ),
    Attack(
        "a stranger",
        "router",
        (
            *(_says(_nothing), _says(lambda: _HALF_A_HEAD), _says(_noise), _says(lambda: _NO_KEY, _NO_KEY)),
            _says(lambda: chat("a key that nobody has", {})),
        ),
    ),
    Attack("a tenant", "router", (_streams,)),
)


def attack_named(name: str) -> Attack:
    """Raises BenchError."""
    found = next((attack for attack in ATTACKS if attack.name == name), None)
    if found is None:
        raise BenchError(f"there is no attack {name!r}")
    return found
