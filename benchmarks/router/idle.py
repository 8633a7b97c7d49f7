"""The memory that a router takes for a client's connection that is kept open and idle."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from benchmarks.router.contenders import Server

BATCH: Final = 100
ANSWER_S: Final = 10.0
LEFT_OVER_FILES: Final = 1000
"""Of those that a process may open: for workers and logs."""
_REQUEST: Final = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


def how_many(wanted: int, most_files: int | None) -> int:
    """Connections that can be had: a router may keep half of its files for workers."""
    return wanted if most_files is None else max(0, min(wanted, most_files // 2 - LEFT_OVER_FILES))


@contextmanager
def idle_connections(one: Server, connections: int) -> Iterator[bool]:
    """While the block runs, so many connections are open, of which each has had one answer. False: whoever
    listens there closes them.
    """
    with ExitStack() as stack:
        yield all(
            _answered(stack, one.port, min(BATCH, connections - begin))
            for begin in range(0, connections, BATCH)
        )


def idle_kb(one: Server, connections: int) -> float | None:
    """Memory in 10^3 bytes of each of so many idle connections. None: nothing runs there, or closes them."""
    before = one.rss_mb()
    if before is None or not connections:
        return None
    with idle_connections(one, connections) as are_open:
        after = one.rss_mb()
    return round((after - before) * 1e3 / connections, 1) if are_open and after is not None else None


def _answered(stack: ExitStack, port: int, connections: int) -> bool:
    opened = []
    try:
        for _ in range(connections):
            client = socket.create_connection(("127.0.0.1", port), ANSWER_S)
            opened.append(stack.enter_context(client))
            client.sendall(_REQUEST)
        return all(client.recv(4096) for client in opened)
    except OSError:
        return False
