"""Somebody on a host of the network: an honest client, or one that attacks whatever port it reaches.

Run as `python -m tests.support.netns.visitor HOST [UID]`; commands are the methods of `Visitor` (program.py).
`intruder.py` has the attacks that speak the protocols.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  looked up by name, later, as a user who cannot read it
import functools
import http.client
import json
import os
import random
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from pdserve.errors import PoolError
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.transports.control import ControlChannel, make_hello
from pdserve.security.tokens import Secret
from tests.support.kvpool.faulty import PAGE_BYTES, get, keys, put
from tests.support.netns.program import obey

TIMEOUT_S: Final = 20.0
HELD: Final = 40  # connections of one attack
UCX_MAGIC: Final = 0xCAFEBABE12345678
UCX_PUT_REQ: Final = struct.pack("<QBIQQI", UCX_MAGIC, 33, 20, 0x1000, 8, 0) + b"A" * 8
TLS_HELLO: Final = bytes.fromhex("160301020001000001fc0303") + bytes(500)
SMUGGLED: Final = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n"
    b"0\r\n\r\nGET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"
)
HUGE_BODY: Final = (
    b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n" + b"x" * 100_000
)


def silent(_: random.Random) -> bytes:
    return b""


def noise(dice: random.Random) -> bytes:
    return dice.randbytes(64 * 1024)


ATTACKS: Final[dict[str, Callable[[random.Random], bytes]]] = {
    "silence": silent,
    "noise": noise,
    "half a frame": lambda dice: struct.pack("<I", 4 * 1024 * 1024) + dice.randbytes(3000),
    "a frame of 4 GiB": lambda dice: b"\xff" * 16 + dice.randbytes(3000),
    "UCX's PUT_REQ": lambda _: UCX_PUT_REQ,
    "TLS": lambda _: TLS_HELLO,
    "two requests in one": lambda _: SMUGGLED,
    "a body of 100 GB": lambda _: HUGE_BODY,
    "endless headers": lambda _: b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 20_000,
    "thousands of requests at once": lambda _: b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 20_000,
    "websocket": lambda _: (
        b"GET /ws HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n"
    ),
}


_TLS = ssl.create_default_context()
_TLS.check_hostname, _TLS.verify_mode = False, ssl.CERT_NONE  # an attacker asks for no names


class Visitor:
    def __init__(self, host: str) -> None:
        self.host = host
        self.held: list[socket.socket] = []
        self.channels: list[ControlChannel] = []
        self._dice = random.Random(1)

    # --- attacks

    def reach(self, ports: list[int]) -> dict[str, Any]:
        """Which ports take a connection."""
        open_ports = []
        for port in ports:
            with contextlib.suppress(OSError), socket.create_connection((self.host, port), 2.0):
                open_ports.append(port)
        return {"open": open_ports}

    def attack(
        self, port: int, kind: str, connections: int = HELD, *, inside_tls: bool = False
    ) -> dict[str, Any]:
        """Send that over many connections, which stay open until `let_go`."""
        payloads = [ATTACKS[kind](self._dice) for _ in range(connections)]
        with ThreadPoolExecutor(HELD) as pool:  # a port may let strangers wait for a handshake
            list(pool.map(functools.partial(self._send, port, inside_tls), payloads))
        return {"held": len(self.held)}

    def _send(self, port: int, inside_tls: bool, payload: bytes) -> None:
        with contextlib.suppress(OSError):
            sock = socket.create_connection((self.host, port), 2.0)
            if inside_tls:
                sock = _TLS.wrap_socket(sock)
            self.held.append(sock)
            sock.settimeout(0.2)
            sock.sendall(payload)

    def let_go(self) -> dict[str, Any]:
        """Close what `attack` opened. Answers with how much was answered to it."""
        answered = 0
        for sock in self.held:
            with contextlib.suppress(OSError):
                sock.setblocking(False)
                answered += len(sock.recv(1 << 20))
            sock.close()
        self.held.clear()
        for channel in self.channels:
            channel.close()
        self.channels.clear()
        return {"answered": answered}

    def say(self, port: int, token: str) -> dict[str, Any]:
        """Greet a pool node with a token."""
        try:
            self._channel(port, token).close()
        except PoolError as error:
            return {"refused": str(error)}
        return {"refused": ""}

    def steal(self, port: int, token: str, victim: str, own: str) -> dict[str, Any]:
        """With the right to one namespace, reach for the pages of another: by its name, and by numbers."""
        said: list[str] = []
        mine = self._open(port, token, own)
        if mine is not None:
            said.append("opened its own")
        if self._open(port, token, victim) is not None:
            said.append("OPENED ANOTHER")
        for number in range(24):
            if number != mine:
                said += self._reach_for(port, token, number, keys(8))
        return {"said": sorted(set(said))}

    def _open(self, port: int, token: str, name: str) -> int | None:
        """The namespace's number. None: it is refused."""
        try:
            channel = self._channel(port, token)
        except PoolError:
            return None
        with contextlib.closing(channel):
            opened = self._ask(channel, m.OpenNamespace(1, name, {}))
        return opened.namespace if isinstance(opened, m.Opened) else None

    def _reach_for(self, port: int, token: str, number: int, wanted: list[bytes]) -> list[str]:
        said = []
        for request in (
            m.Exists(2, number, wanted),
            m.Get(3, number, wanted, [PAGE_BYTES]),
            m.Reserve(4, number, wanted, [PAGE_BYTES]),
            m.Discard(5, number, wanted, [1] * len(wanted)),
            m.Clear(6, number),
            m.Commit(7, list(range(8)), [1] * 8, [1] * 8),
        ):
            with contextlib.suppress(PoolError):
                channel = self._channel(port, token)
                answer = self._ask(channel, request)
                said.append(type(answer).__name__ if answer is not None else "closed")
                if isinstance(answer, m.Present) and any(answer.mask):
                    said.append("KNOWS OF PAGES")
                if isinstance(answer, m.Got) and any(pin.status == m.HIT for pin in answer.pins):
                    said.append("GOT A PAGE")
                if isinstance(answer, m.Committed) and any(answer.mask):
                    said.append("COMMITTED A PAGE")
                if isinstance(answer, m.Reserved) and any(one.status == m.GRANTED for one in answer.grants):
                    said.append("MAY WRITE")
                channel.close()
        return said

    def files(self, places: list[str]) -> dict[str, Any]:
        """Which files and sockets below these directories can be opened. Run it as another user."""
        found = [Path(at) / name for place in places for at, _, names in os.walk(place) for name in names]
        paths = [str(path) for path in found]
        return {**self.open_files(paths), "looked_at": paths}

    def open_files(self, paths: list[str]) -> dict[str, Any]:
        """Which of these can be opened, to read or to write."""
        opened = []
        for path in map(Path, paths):
            with contextlib.suppress(OSError):
                if path.is_socket():
                    with socket.socket(socket.AF_UNIX) as sock:
                        sock.connect(str(path))
                else:
                    for mode in ("rb", "r+b"):
                        with contextlib.suppress(PermissionError):
                            path.open(mode).close()
                            opened.append(str(path))
                    continue
                opened.append(str(path))
        return {"opened": opened}

    # --- honest work, and what strangers get of it

    def request(self, port: int, method: str, path: str, key: str = "", body: Any = None) -> dict[str, Any]:
        """One HTTP request's status and text."""
        connection = http.client.HTTPConnection(self.host, port, timeout=TIMEOUT_S)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {**headers, "content-type": "application/json"})
            answer = connection.getresponse()
            return {"status": answer.status, "text": answer.read(1 << 20).decode(errors="replace")}
        except (OSError, http.client.HTTPException) as error:
            return {"status": 0, "text": repr(error)}
        finally:
            connection.close()

    def keep(self, port: int, namespace: str, token: str, count: int) -> dict[str, Any]:
        """Store pages."""
        with contextlib.closing(self._pool(port, namespace, token)) as client:
            return {"stored": sum(put(client, keys(count)))}

    def check(self, port: int, namespace: str, token: str, count: int) -> dict[str, Any]:
        """How many of them come back; fails on a wrong byte."""
        with contextlib.closing(self._pool(port, namespace, token)) as client:
            began_s = time.monotonic()
            found = sum(get(client, keys(count)))
            return {"read": found, "took_s": time.monotonic() - began_s}

    def _pool(self, port: int, namespace: str, token: str) -> PoolClient:
        refs = [PoolNodeRef(node=f"pool{port % 10}", address=f"tcp:{self.host}:{port}")]
        config = PoolClientConfig(
            nodes=refs, token=Secret(token), connect_timeout_s=TIMEOUT_S, get_timeout_s=TIMEOUT_S
        )
        return PoolClient(config, namespace, {}, name="visitor")

    def _channel(self, port: int, token: str) -> ControlChannel:
        hello = make_hello("visitor", "", "none", token)
        return ControlChannel.connect(f"tcp:{self.host}:{port}", hello, time.monotonic() + TIMEOUT_S)

    def _ask(self, channel: ControlChannel, request: m.Request) -> m.Reply | None:
        try:
            return channel.call(request, time.monotonic() + TIMEOUT_S)
        except PoolError:
            return None


def main(kind: type[Visitor]) -> None:
    """Such a visitor, told what to do by standard input."""
    if len(sys.argv) > 2:
        os.setgroups([])
        os.setgid(int(sys.argv[2]))
        os.setuid(int(sys.argv[2]))
    obey(kind(sys.argv[1]))


if __name__ == "__main__":
    main(Visitor)
