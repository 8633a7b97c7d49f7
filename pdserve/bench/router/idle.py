"""The memory that a router takes for a client's connection that is kept open and idle."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from typing import Final

from pdserve.bench.router.contenders import Server

BATCH: Final = 100
ANSWER_S: Final = 10.0
LEFT_OVER_FILES: Final = 1000
"""Of those that a process may open: for workers and logs."""
_REQUEST: Final = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


def how_many(wanted: int, most_files: int | None) -> int:
    """Connections that can be had: a router may keep half of its files for workers."""
    return wanted if most_files is None else max(0, min(wanted, most_files // 2 - LEFT_OVER_FILES))


def idle_kb(one: Server, connections: int) -> float | None:
    """Memory in 10^3 bytes for each of so many connections, of which each has had one answer. None: there is
    no router, or it closes them.
    """
    before = one.rss_mb()
    if before is None or not connections:
        return None
    with ExitStack() as stack:
        for begin in range(0, connections, BATCH):
            opened = []
            try:
                for _ in range(min(BATCH, connections - begin)):
                    client = socket.create_connection(("127.0.0.1", one.port), ANSWER_S)
                    opened.append(stack.enter_context(client))
                    client.sendall(_REQUEST)
                if not all(client.recv(4096) for client in opened):
                    return None
            except OSError:
                return None
        after = one.rss_mb()
    return None if after is None else round((after - before) * 1e3 / connections, 1)
