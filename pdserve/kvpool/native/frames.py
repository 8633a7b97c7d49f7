"""Requests and their answers over a socket, and the interpreter lock is let go once where the C module is."""

from __future__ import annotations

import socket
import ssl
import time

from pdserve.kvpool.native.build import compiled


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
