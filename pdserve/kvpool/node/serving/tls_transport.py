"""The server's side of TLS over an accepted socket, by OpenSSL's memory buffers.

asyncio's own TLS tells a protocol of its connection only after the handshake. Then strangers in their
handshakes would be counted and bounded nowhere. `loop.start_tls` after `connection_made` would do, but on
uvloop bytes may arrive before it begins. So the connection passes what it reads through `receive` here.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Any, Final

READ_BYTES: Final = 256 * 1024


class TlsTransport(asyncio.Transport):
    """What is written is encrypted. `receive` decrypts what the transport below has read."""

    def __init__(self, below: asyncio.Transport, context: ssl.SSLContext) -> None:
        super().__init__()
        self._below = below
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._is_ready = False

    def receive(self, data: bytes) -> bytes:
        """The plain bytes that these complete; b"" before the end of the handshake. Raises ssl.SSLError: the
        connection is to be closed.
        """
        self._incoming.write(data)
        pieces = []
        try:
            if not self._is_ready:
                self._tls.do_handshake()
                self._is_ready = True
            while piece := self._tls.read(READ_BYTES):
                pieces.append(piece)
            self._below.close()  # the peer has said goodbye
        except ssl.SSLWantReadError:
            pass
        finally:
            self._flush()  # an alert too
        return b"".join(pieces)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Before the end of the handshake nothing can be said."""
        if not self._is_ready or self._below.is_closing():
            return
        rest = memoryview(data)
        while rest:
            rest = rest[self._tls.write(rest) :]
        self._flush()

    def close(self) -> None:
        if self._is_ready and not self._below.is_closing():
            with contextlib.suppress(ssl.SSLError):
                self._tls.unwrap()
            self._flush()
        self._below.close()

    def abort(self) -> None:
        self._below.abort()

    def is_closing(self) -> bool:
        return self._below.is_closing()

    def get_write_buffer_size(self) -> int:
        return self._below.get_write_buffer_size()

    def pause_reading(self) -> None:
        self._below.pause_reading()

    def resume_reading(self) -> None:
        self._below.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._below.get_extra_info(name, default)

    def _flush(self) -> None:
        if self._outgoing.pending and not self._below.is_closing():
            self._below.write(self._outgoing.read())
