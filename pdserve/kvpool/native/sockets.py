"""Over a socket: requests with their answers, and pages as messages. Where the C module is, a batch of either
lets the interpreter lock go once; pages need it, and a socket without TLS.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Sequence

from pdserve.kvpool.native.build import compiled
from pdserve.kvpool.native.copying import LEAST_HASHED_BYTES
from pdserve.kvpool.protocol.page_bytes import PageBuffers, checksum_page


def exchange(
    sock: socket.socket, frame: bytes, most_bytes: int, deadline_s: float, *, answers: int = 0
) -> bytes:
    """Send all of `frame`, then wait for bytes and return those that are there, `most_bytes` at most. None of
    them: the other end has closed. `most_bytes` 0: send only, and keep the lock if the socket takes all at
    once. `answers`: where what comes begins with a frame, wait for so many of them, for fewer turns; fewer or
    a part of one may be returned all the same.

    Raises TimeoutError at the deadline, a time of time.monotonic(), and OSError. How much was sent then is
    unknown.
    """
    native = None if isinstance(sock, ssl.SSLSocket) else compiled()
    if native is not None:
        answer: bytes = native.exchange(sock.fileno(), frame, most_bytes, answers, deadline_s)
        return answer
    if frame:
        sock.settimeout(_left_s(deadline_s))
        sock.sendall(frame)
    if not most_bytes:
        return b""
    sock.settimeout(_left_s(deadline_s))
    return sock.recv(most_bytes)


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def moves(sock: socket.socket) -> bool:
    """Whether `send` and `receive` are for this socket."""
    return compiled() is not None and not isinstance(sock, ssl.SSLSocket)


def send(
    sock: socket.socket,
    tags: list[int],
    pages: Sequence[PageBuffers],
    *,
    checksum: bool,
    deadline_s: float,
) -> list[int]:
    """Send each page behind its header. Returns their checksums, zeros without `checksum`.

    `pages`: alike in length, not empty. `deadline_s`: a time of time.monotonic(). Raises TimeoutError and
    OSError; then how much was sent is unknown. Nothing reads from the buffers after the return or an error.
    """
    native = compiled()
    assert native is not None
    hashes = checksum and _is_long(pages)
    checksums: list[int] = native.send_pages(sock.fileno(), tags, pages, hashes, deadline_s)
    return _checksums(pages) if checksum and not hashes else checksums


def receive(
    sock: socket.socket,
    head: memoryview,
    head_bytes: int,
    tags: list[int],
    pages: Sequence[PageBuffers],
    *,
    checksum: bool,
    deadline_s: float,
) -> tuple[list[int], int]:
    """Receive messages with these tags, which are the next to come, into the pages, until the last, or a
    header that is another one. Returns (the checksums of the pages that came, zeros without `checksum`; how
    many bytes of the next header are in `head`).

    `head`: the next header, of which `head_bytes` are there. Others as of `send`. Raises TimeoutError, and
    OSError, also at the connection's end. Nothing writes into the buffers after the return or an error.
    """
    native = compiled()
    assert native is not None
    hashes = checksum and _is_long(pages)
    checksums, head_bytes = native.receive_pages(
        sock.fileno(), head, head_bytes, tags, pages, hashes, deadline_s
    )
    if checksum and not hashes:
        checksums = _checksums(pages[: len(checksums)])
    return checksums, head_bytes


def _is_long(pages: Sequence[PageBuffers]) -> bool:
    return bool(pages) and sum(map(len, pages[0])) >= LEAST_HASHED_BYTES


def _checksums(pages: Sequence[PageBuffers]) -> list[int]:
    return [checksum_page(page) for page in pages]
