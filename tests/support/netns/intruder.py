"""Somebody who knows the protocols of a cluster, and uses them against it.

Run as `python -m tests.support.netns.intruder HOST [UID]`; commands are the methods of `Intruder`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import (
    NamespaceSettings,
    ProbePeer,
    PutNamespace,
    ReplaceNamespace,
)
from pdserve.kvpool.protocol.frames import FrameBuffer, decode_reply, encode_frame
from pdserve.kvpool.protocol.handshake import NONCE_BYTES, prove, without_token
from pdserve.kvpool.transports.control import ControlChannel, make_hello
from pdserve.kvpool.transports.tcp.stream import HEADER
from tests.support.kvpool.faulty import PAGE_BYTES, SEGMENTS, get, keys, put
from tests.support.netns.visitor import HELD, TIMEOUT_S, Visitor, main

STREAM: Final = json.dumps(
    {"model": "demo-tiny", "prompt": "on and on", "max_tokens": 200, "stream": True, "ignore_eos": True}
).encode()
DEAF: Final = {
    "router": b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n",
    "worker": b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n",
    "pool": encode_frame(m.Status(2)),
    "stream": (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer KEY\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(STREAM), STREAM)
    ),
}
"""What is asked for over and over by who reads no answer."""
MOST_ASKED: Final = 4000  # requests of one connection


class Intruder(Visitor):
    # --- with a token that gives other rights, or with none

    def overstep(self, port: int, namespace: str, token: str) -> dict[str, Any]:
        """With a token that may only read: write, drop, administer. What was not refused; what was read."""
        number = self._open(port, token, namespace)
        assert number is not None
        some = keys(8)
        requests: list[m.Request] = [
            m.Reserve(4, number, keys(80)[76:], list(SEGMENTS)),
            m.Discard(5, number, some, [1] * len(some)),
            m.Clear(6, number),
            m.DropNamespace(8, namespace),
            PutNamespace(9, namespace, NamespaceSettings()),
            ReplaceNamespace(10, namespace, "of-mine"),
            m.OpenNamespace(11, "of-mine", {}),
        ]
        done = []
        with contextlib.closing(self._channel(port, token)) as channel:
            for request in requests:
                answer = self._ask(channel, request)
                if not isinstance(answer, m.Fault) or answer.code != "access_denied":
                    done.append(f"{request}: {answer}")
            taken = self._ask(channel, m.Commit(7, list(range(64)), [1] * 64, [1] * 64))
            if isinstance(taken, m.Committed) and any(taken.mask):
                done.append(f"Commit: {taken}")
        with contextlib.closing(self._pool(port, namespace, token)) as client:
            return {"done": done, "stored": sum(put(client, keys(80)[76:])), "read": sum(get(client, some))}

    def pass_for_a_node(self, port: int, token: str) -> dict[str, Any]:
        """Say that one is a node of the pool, without its token. What was answered."""
        hello = msgspec.structs.replace(make_hello("visitor", "", "none", token), node="pool9")
        said = []
        for shown in (hello, without_token(hello, os.urandom(NONCE_BYTES))):
            with self._socket(port) as sock:
                sock.sendall(encode_frame(shown) + encode_frame(ProbePeer(2, "pool9")))
                said += [type(reply).__name__ for reply in _replies(sock)]
        return {"said": said}

    def replay(self, port: int, token: str) -> dict[str, Any]:
        """Shake hands, and send the same bytes again on a new connection; then the ticket of the first. What
        each was answered.
        """
        hello = without_token(make_hello("visitor", "", "tcp", token), os.urandom(NONCE_BYTES))
        with self._socket(port) as first:
            first.sendall(encode_frame(hello))
            challenge = next(_replies(first))
            assert isinstance(challenge, m.Challenge)
            proof = prove(hello, challenge, token)
            first.sendall(encode_frame(proof))
            welcome = next(_replies(first))
            assert isinstance(welcome, m.Welcome)
            assert welcome.tcp is not None
            with self._socket(port) as second:
                second.sendall(encode_frame(hello) + encode_frame(proof))
                said = [type(reply).__name__ for reply in _replies(second)]
            with (
                self._pages(welcome.tcp),
                self._socket(welcome.tcp.port) as thief,
                contextlib.suppress(ConnectionError),
            ):
                thief.sendall(welcome.tcp.ticket)
                said.append(f"{len(thief.recv(1))} bytes")
        return {"said": said}

    def send_unasked(self, port: int, token: str) -> dict[str, Any]:
        """Over a data connection of one's own: pages that the node did not ask for. What was answered."""
        said = []
        for tag in (3, 1000, 1 << 47, (1 << 64) - 1):
            channel, data = self._open_for_pages(port, token)
            with contextlib.closing(channel), data, contextlib.suppress(ConnectionError):
                data.sendall(HEADER.pack(tag, PAGE_BYTES) + b"x" * PAGE_BYTES)
                said.append(f"{len(data.recv(1))} bytes")
        return {"said": said}

    def guess(self, port: int, count: int) -> dict[str, Any]:
        """Try so many tokens. What was answered last."""
        said: list[Any] = []
        for number in range(count):
            named = make_hello("visitor", "", "none", f"guess-number-{number}-of-many")
            with self._socket(port) as sock:
                sock.sendall(encode_frame(without_token(named, os.urandom(NONCE_BYTES))))
                said.append(next(_replies(sock)))
        return {"said": [one.code if isinstance(one, m.Fault) else type(one).__name__ for one in said]}

    # --- whoever does not read

    def be_deaf(
        self, port: int, kind: str, at_once: int, key: str = "", connections: int = HELD
    ) -> dict[str, Any]:
        """Ask for much, so many requests at once, over connections of which nothing is read."""
        asked = DEAF[kind].replace(b"KEY", key.encode()) * at_once
        for _ in range(connections):
            with contextlib.suppress(OSError):
                sock = self._deaf_socket(port)
                self.held.append(sock)
                if kind == "pool":
                    sock.sendall(encode_frame(make_hello("deaf", "", "none")))
                for _ in range(1 if kind == "stream" else MOST_ASKED // at_once):
                    sock.sendall(asked)
        return {"held": len(self.held)}

    def be_deaf_to_pages(self, port: int, namespace: str, token: str, connections: int) -> dict[str, Any]:
        """Ask for pages over connections of which no page is read, until `let_go`."""
        asked = 0
        for _ in range(connections):
            channel, data = self._open_for_pages(port, token)
            self.held.append(data)
            self.channels.append(channel)
            opened = self._ask(channel, m.OpenNamespace(1, namespace, {}))
            assert isinstance(opened, m.Opened)
            for number in range(2, 66):
                got = self._ask(channel, m.Get(number, opened.namespace, keys(24), list(SEGMENTS)))
                asked += sum(pin.status == m.HIT for pin in got.pins) if isinstance(got, m.Got) else 0
        return {"asked": asked}

    def _deaf_socket(self, port: int) -> socket.socket:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(2.0)
        sock.connect((self.host, port))
        sock.settimeout(0.2)
        return sock

    def _open_for_pages(self, port: int, token: str) -> tuple[ControlChannel, socket.socket]:
        hello = make_hello("visitor", "", "tcp", token)
        channel = ControlChannel.connect(f"tcp:{self.host}:{port}", hello, time.monotonic() + TIMEOUT_S)
        assert channel.welcome.tcp is not None
        return channel, self._pages(channel.welcome.tcp)

    def _pages(self, info: m.TcpInfo) -> socket.socket:
        """A data connection that the node has greeted; it reads little at a time."""
        sock = self._deaf_socket(info.port)
        sock.settimeout(TIMEOUT_S)
        sock.sendall(info.ticket)
        greeting = sock.recv(HEADER.size, socket.MSG_WAITALL)
        assert len(greeting) == HEADER.size
        return sock

    def _socket(self, port: int) -> socket.socket:
        return socket.create_connection((self.host, port), TIMEOUT_S)

    # --- as another user of the host

    def processes(self, pids: list[int], words: list[str]) -> dict[str, Any]:
        """Which of these words can be read in /proc of these processes. Run it as another user."""
        found, read, refused = set(), [], []
        for pid in pids:
            for path in _proc_files(Path(f"/proc/{pid}")):
                try:
                    with path.open("rb") as file:
                        text = file.read(1 << 20)
                except OSError:
                    refused.append(path.name)
                    continue
                read.append(path.name)
                found |= {(path.name, word) for word in words if word.encode() in text}
        return {"found": sorted(found), "read": sorted(set(read)), "refused": sorted(set(refused))}

    def unix_sockets(self) -> dict[str, Any]:
        """Which Unix sockets of this host's network take a connection, those without a file too."""
        opened = []
        names = {line.split(maxsplit=7)[7].strip() for line in _unix_table() if len(line.split()) > 7}
        for name in sorted(names):
            address = f"\0{name[1:]}" if name.startswith("@") else name
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
                with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as sock:
                    sock.connect(address)
                    opened.append(name)
        return {"opened": opened, "looked_at": sorted(names)}


def _replies(sock: socket.socket) -> Iterator[m.Reply]:
    """What a node says, up to a Fault or the end."""
    frames = FrameBuffer()
    with contextlib.suppress(ConnectionError):
        while piece := sock.recv(65536):
            for body in frames.feed(piece):
                reply = decode_reply(body)
                yield reply
                if isinstance(reply, m.Fault):
                    return


def _unix_table() -> list[str]:
    return Path("/proc/net/unix").read_text().splitlines()[1:]


def _proc_files(process: Path) -> Iterator[Path]:
    """Those that tell of a process, of its threads, and what it has open."""
    for place in (process, *_entries(process / "task")):
        for name in ("cmdline", "environ", "comm", "status", "maps", "smaps", "mem", "auxv", "stack", "io"):
            yield place / name
        yield from _entries(place / "fd")
        yield from _entries(place / "map_files")
    yield from (process / "cwd", process / "root")


def _entries(place: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(place.iterdir())
    return [place]


if __name__ == "__main__":
    main(Intruder)
