"""One call at a time between two processes, over a socket pair.

A thread that gives up the interpreter lock gets it back after up to 5 ms. So a call in the scheduler gives it
up once, while it waits for the answer: the request is sent without giving it up, and the time-out is the
kernel's (SO_RCVTIMEO), because Python's own would poll first.
"""

from __future__ import annotations

import ctypes
import math
import socket
import struct
import time
from typing import Final

from pdserve.kvpool.mover.messages import HEADER, MAX_FRAME_BYTES

RECEIVE_BYTES: Final = 64 * 1024  # an answer of a batch is smaller
BUFFER_BYTES: Final = 1024 * 1024  # asked for; the kernel may give less
STEPS_A_SECOND: Final = 8  # time-outs are rounded up to these, so that most calls find theirs set already
_send = ctypes.PyDLL(None).send  # PyDLL keeps the interpreter lock: 10 µs for a frame, without waiting
_send.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int]
_send.restype = ctypes.c_ssize_t


class Lane:
    """One end. Not thread-safe. Every error means that the lane is broken."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.number = 0  # of the call whose frame was received last
        self._limits: dict[int, float] = {}  # by option: the time-out that is set
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)

    @classmethod
    def pair(cls) -> tuple[Lane, socket.socket]:
        """Our end, and the other process's."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(ours), theirs

    def call(self, frame: bytes, timeout_s: float) -> memoryview:
        """Send a frame and wait for the answer's body.

        Raises TimeoutError at the deadline, ConnectionError when the other end is closed, ValueError for what
        is no answer to this call.
        """
        _, number = HEADER.unpack_from(frame)
        deadline_s = time.monotonic() + timeout_s
        sent = _send(self.socket.fileno(), frame, len(frame), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        if sent < len(frame):  # a long frame, or an error, which this names
            self._limit(socket.SO_SNDTIMEO, deadline_s)
            try:
                self.socket.sendall(memoryview(frame)[max(0, sent) :])
            except BlockingIOError as error:
                raise TimeoutError("it takes no requests") from error
        answer = self.receive(deadline_s)
        if self.number != number:
            raise ValueError(f"the answer to call {self.number} where that to call {number} was expected")
        return answer

    def send(self, frame: bytes) -> None:
        """Send a frame, however long that takes. Raises OSError."""
        self.socket.sendall(frame)

    def receive(self, deadline_s: float | None = None) -> memoryview:
        """The body of the next frame. Raises as `call`; ValueError for what is no frame."""
        received = b""
        wanted = HEADER.size
        while len(received) < wanted:
            if deadline_s is not None:
                self._limit(socket.SO_RCVTIMEO, deadline_s)
            try:
                data = self.socket.recv(max(RECEIVE_BYTES, wanted - len(received)))
            except BlockingIOError as error:
                raise TimeoutError("it did not answer in time") from error
            if not data:
                raise ConnectionError("it has ended")
            received += data
            if wanted == HEADER.size and len(received) >= wanted:
                length, self.number = HEADER.unpack_from(received)
                if length > MAX_FRAME_BYTES:
                    raise ValueError(f"a frame of {length} bytes")
                wanted += length
        if len(received) > wanted:
            raise ValueError("two frames where one was expected")
        return memoryview(received)[HEADER.size :]

    def close(self) -> None:
        """Close this end. Idempotent."""
        self.socket.close()

    def _limit(self, option: int, deadline_s: float) -> None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("it did not answer in time")
        left_s = math.ceil(left_s * STEPS_A_SECOND) / STEPS_A_SECOND
        if self._limits.get(option) == left_s:
            return
        self._limits[option] = left_s
        seconds, micros = divmod(int(left_s * 1e6), 1_000_000)
        self.socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, micros))
