"""Pages as messages over a socket without TLS, by the C module: a batch lets the interpreter lock go once."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence

from pdserve.kvpool.native.build import compiled
from pdserve.kvpool.native.copying import LEAST_HASHED_BYTES
from pdserve.kvpool.protocol.page_bytes import PageBuffers, checksum_page


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
