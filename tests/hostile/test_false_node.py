"""A listener at a pool node's address that is no node: it gets no token, and no client believes it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from pdserve.errors import PoolRefused
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.frames import FrameBuffer, decode_request, encode_frame
from pdserve.kvpool.protocol.handshake import NONCE_BYTES, Challenged
from pdserve.security.tokens import digest
from tests.support.kvpool.connectors import connect
from tests.support.kvpool.nodes import soon

TOKEN = "a-token-that-the-listener-does-not-know"
WELCOME = m.Welcome(m.PROTOCOL_VERSION, "node", 1, "host", "none", 30.0)


class Listener:
    """Records all that one client says, and answers its Hello as told."""

    def __init__(self, answer: Callable[[m.Hello], list[m.Reply]]) -> None:
        self.heard = b""
        self._answer = answer
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp:127.0.0.1:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError), self._server.accept()[0] as client:
            frames = FrameBuffer()
            while data := client.recv(65536):
                self.heard += data
                for body in frames.feed(data):
                    message = decode_request(body)
                    if isinstance(message, m.Hello):
                        client.sendall(b"".join(encode_frame(reply) for reply in self._answer(message)))

    def close(self) -> None:
        self._server.close()
        self._thread.join(10)


ANSWERS: dict[str, Callable[[m.Hello], list[m.Reply]]] = {
    "a welcome at once": lambda hello: [WELCOME],
    "a challenge by a guess": lambda hello: [
        Challenged(hello, digest("a guess"), "node", bytes(NONCE_BYTES)).challenge,
        WELCOME,
    ],
    "a challenge without a proof": lambda hello: [m.Challenge("node", hello.nonce, b""), WELCOME],
    "its own nonce sent back": lambda hello: [m.Challenge("node", hello.nonce, hello.nonce), WELCOME],
}


@pytest.fixture(params=ANSWERS)
def listener(request: pytest.FixtureRequest) -> Iterator[Listener]:
    listener = Listener(ANSWERS[request.param])
    try:
        yield listener
    finally:
        listener.close()


def test_a_false_node_is_refused_and_hears_neither_the_token_nor_a_proof_of_it(listener: Listener) -> None:
    with pytest.raises(PoolRefused):
        connect(listener.address, soon(), "none", token=TOKEN)
    listener.close()
    assert TOKEN.encode() not in listener.heard
    assert digest(TOKEN).encode() not in listener.heard
    assert bytes.fromhex(digest(TOKEN)) not in listener.heard
    [hello] = [decode_request(body) for body in FrameBuffer().feed(listener.heard)]
    assert isinstance(hello, m.Hello), "and nothing after it"
