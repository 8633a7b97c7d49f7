"""A process that keeps many hostile connections to a pool node's control port, of one kind at a time.

Run as `python -m pdserve.bench.pool.hostile_process HOST PORT CONNECTIONS`. A line on its standard input
names the kind, or is `rest`. A line answers when all connections were tried once: the kind, and how many were
taken. Connections that the node closes are opened again. It runs only where nobody else wants to, as if it
ran elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import struct
import sys
from collections.abc import Callable
from typing import Final

from pdserve.bench.pool.load_process import run_when_idle
from pdserve.kvpool.protocol.frames import encode_frame
from pdserve.kvpool.transports.control import make_hello

KINDS: Final[dict[str, Callable[[], bytes]]] = {
    "silent": lambda: b"",
    "half a frame": lambda: struct.pack("<I", 4000) + b"x" * 3000,
    "noise": lambda: os.urandom(4096),
    "greeted": lambda: encode_frame(make_hello("stranger", "", "none")),
}
ROUND_S: Final = 0.2  # between looks for connections that were closed
CONNECT_TIMEOUT_S: Final = 1.0


class Attacker:
    """The connections."""

    def __init__(self, address: tuple[str, int], connections: int) -> None:
        self._address = address
        self._connections = connections
        self._sockets: list[socket.socket] = []

    def hold(self, kind: str) -> int:
        """Have all connections open, each with what its kind sends. Returns how many were opened now."""
        opened = 0
        self._sockets = [sock for sock in self._sockets if _is_open(sock)]
        for _ in range(self._connections - len(self._sockets)):
            with contextlib.suppress(OSError):
                sock = socket.create_connection(self._address, CONNECT_TIMEOUT_S)
                self._sockets.append(sock)
                opened += 1
                sock.setblocking(False)
                sock.send(KINDS[kind]())
        return opened

    def rest(self) -> None:
        """Close all."""
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()


def _is_open(sock: socket.socket) -> bool:
    try:
        if sock.recv(1 << 16):
            return True
    except BlockingIOError:
        return True
    except OSError:
        sock.close()
        return False
    sock.close()
    return False


def main(host: str, port: int, connections: int) -> None:
    """See above."""
    run_when_idle()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    attacker = Attacker((host, port), connections)
    kind = "rest"
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], ROUND_S)
        if ready:
            kind = sys.stdin.readline().strip()
            if not kind:
                return
        opened = 0
        if ready:  # the connections of another kind would go on
            attacker.rest()
        if kind != "rest":
            opened = attacker.hold(kind)
        if ready:
            print(kind, opened, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
