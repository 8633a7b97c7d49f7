"""A request and its answer over a socket, by the C module and by Python's own sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from pdserve.kvpool.native import build, sockets
from pdserve.kvpool.native.sockets import exchange
from tests.support.waiting import soon

compiled = build.compiled()
BUILT = pytest.mark.skipif(compiled is None, reason="not built")


@pytest.fixture(params=[pytest.param(True, id="compiled", marks=BUILT), pytest.param(False, id="plain")])
def pair(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Our end, and the other one."""
    monkeypatch.setattr(sockets, "compiled", lambda: compiled if request.param else None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_a_frame_goes_out_and_what_is_there_comes_back(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.sendall(b"answer")
    assert exchange(ours, b"request", 4, soon()) == b"answ"
    assert exchange(ours, b"", 99, soon()) == b"er"
    assert exchange(ours, b" and more", 0, soon()) == b""
    assert theirs.recv(99) == b"request and more"
    theirs.shutdown(socket.SHUT_WR)
    assert exchange(ours, b"", 99, soon()) == b""


def test_a_frame_longer_than_the_sockets_buffers_is_sent_whole(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    frame, received = bytes(range(256)) * 16_384, bytearray()

    def answer() -> None:
        while len(received) < len(frame):
            received.extend(theirs.recv(65_536))
        theirs.sendall(b"whole")

    thread = threading.Thread(target=answer)
    thread.start()
    assert exchange(ours, frame, 99, soon(30.0)) == b"whole"
    thread.join()
    assert received == frame


def test_several_answers_are_awaited_together_but_none_is_lost_where_they_end() -> None:
    ours, theirs = socket.socketpair()
    first, second = b"\x05\0\0\0first", b"\x06\0\0\0second"
    with ours, theirs:
        theirs.sendall(first + second[:7])
        rest = threading.Timer(0.05, lambda: theirs.sendall(second[7:] + first[:2]))
        rest.start()
        got = b""
        while len(got) < len(first + second):
            got += exchange(ours, b"", 99, soon(), answers=2)
        assert got.startswith(first + second)
        rest.join()
        theirs.sendall(first[2:])
        theirs.close()
        left = got[len(first + second) :] + exchange(ours, b"", 99, soon(), answers=2)
        assert left == first or left + exchange(ours, b"", 99, soon(), answers=1) == first
        assert exchange(ours, b"", 99, soon(), answers=1) == b""


@pytest.mark.parametrize(("frame", "room"), [(b"x" * 10_000_000, 0), (b"x", 9), (b"", 9)])
def test_an_end_that_does_nothing_costs_the_deadline(
    pair: tuple[socket.socket, socket.socket], frame: bytes, room: int
) -> None:
    began_s = time.monotonic()
    with pytest.raises(TimeoutError):
        exchange(pair[0], frame, room, soon(0.05))
    assert 0.05 <= time.monotonic() - began_s < 5.0


def test_nothing_is_sent_after_the_deadline(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    for room in (0, 9):
        with pytest.raises(TimeoutError):
            exchange(ours, b"late", room, soon(-1.0))
    ours.close()
    assert theirs.recv(9) == b""


def test_an_end_that_is_gone_is_an_error(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.close()
    with pytest.raises(ConnectionError):
        exchange(ours, b"request", 9, soon())
    ours.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        exchange(ours, b"request", 9, soon())
