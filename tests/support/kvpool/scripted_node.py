"""A pool node that says what a test lets it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.frames import FrameBuffer, decode_request, encode_frame
from pdserve.kvpool.protocol.handshake import NONCE_BYTES, Challenged
from pdserve.security.tokens import digest

TOKEN = "the operator's token"


class ScriptedNode:
    """Greets who has TOKEN, and answers each request by `answer(request)`; a None hangs up."""

    def __init__(self, path: Path, answer: Callable[[m.Request], m.Reply | None]) -> None:
        self.address = f"unix:{path}"
        self.proofs = 0  # of TOKEN
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        frames = FrameBuffer()
        with sock:
            while data := sock.recv(65536):
                for body in frames.feed(data):
                    request = decode_request(body)
                    reply: m.Reply | None
                    if isinstance(request, m.Hello) and request.key_id:
                        challenged = Challenged(request, digest(TOKEN), "n", bytes(NONCE_BYTES))
                        reply = challenged.challenge
                    elif isinstance(request, m.Hello | m.Proof):
                        if isinstance(request, m.Proof):
                            self.proofs += challenged.accept(request) is not None
                        reply = m.Welcome(m.PROTOCOL_VERSION, "n", 1, "h", "none", 1.0)
                    else:
                        reply = self._answer(request)
                    if reply is None:
                        return
                    sock.sendall(encode_frame(reply))

    def close(self) -> None:
        self._listener.close()
