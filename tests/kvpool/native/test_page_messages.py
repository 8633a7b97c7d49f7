"""Batches of pages over a socket by the C module."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kvpool.native import build, sockets
from pdserve.kvpool.protocol.page_bytes import PageBuffers, checksum_page
from pdserve.kvpool.transports.tcp.stream import HEADER, WITHDRAWN
from tests.support.waiting import soon

pytestmark = pytest.mark.skipif(build.compiled() is None, reason="not built")

CUTS = st.lists(st.sampled_from([1, 3, 64, 100, 4096, 70_000]), min_size=1, max_size=300)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Sockets that do not wait, as those of pages are."""
    with ends() as both:
        yield both


class ends:  # noqa: N801
    def __enter__(self) -> tuple[socket.socket, socket.socket]:
        self.both = socket.socketpair()
        for one in self.both:
            one.setblocking(False)
        return self.both

    def __exit__(self, *_: object) -> None:
        for one in self.both:
            one.close()


def pages_of(count: int, cuts: list[int], seed: int = 0) -> list[PageBuffers]:
    """That nobody may write."""
    rng = np.random.default_rng(seed)
    pages = [[rng.integers(0, 256, size, np.uint8) for size in cuts] for _ in range(count)]
    for page in pages:
        for segment in page:
            segment.flags.writeable = False
    return pages


def room_for(count: int, cuts: list[int]) -> list[PageBuffers]:
    return [[np.zeros(size, np.uint8) for size in cuts] for _ in range(count)]


def joined(page: PageBuffers) -> bytes:
    return b"".join(segment.tobytes() for segment in page)


@settings(deadline=None, max_examples=60)
@given(CUTS, st.integers(1, 6), st.booleans(), st.booleans(), st.integers(0, 16))
def test_pages_arrive_as_they_were_sent_however_they_are_cut(
    cuts: list[int], count: int, is_whole: bool, checksum: bool, early_bytes: int
) -> None:
    sent, into = pages_of(count, cuts), room_for(count, [sum(cuts)] if is_whole else cuts)
    tags = [7 + 3 * i for i in range(count)]
    sums: list[list[int]] = []
    with ends() as (ours, theirs):
        thread = threading.Thread(
            target=lambda: sums.append(sockets.send(ours, tags, sent, checksum=checksum, deadline_s=soon()))
        )
        thread.start()
        theirs.setblocking(True)
        head = bytearray(theirs.recv(early_bytes, socket.MSG_WAITALL)) if early_bytes else bytearray()
        theirs.setblocking(False)
        early, head = len(head), head.ljust(HEADER.size, b"\0")
        got = sockets.receive(
            theirs, memoryview(head), early, tags, into, checksum=checksum, deadline_s=soon()
        )
        thread.join()
    expected = [checksum_page(page) if checksum else 0 for page in sent]
    assert sums == [expected]
    assert got == (expected, 0)
    assert [joined(page) for page in into] == [joined(page) for page in sent]


@pytest.mark.parametrize("other", [(5, 300), (9, 300), (7, WITHDRAWN), (7, 299)])
def test_another_message_is_left_to_who_understands_it(
    pair: tuple[socket.socket, socket.socket], other: tuple[int, int]
) -> None:
    ours, theirs = pair
    sent, into = pages_of(1, [300]), room_for(2, [300])
    sockets.send(ours, [4], sent, checksum=True, deadline_s=soon())
    ours.send(HEADER.pack(*other) + b"rest")
    head = memoryview(bytearray(HEADER.size))
    got = sockets.receive(theirs, head, 0, [4, 7], into, checksum=True, deadline_s=soon())
    assert got == ([checksum_page(sent[0])], HEADER.size)
    assert HEADER.unpack(head) == other
    assert theirs.recv(99) == b"rest"
    assert joined(into[1]) == bytes(300)


def test_a_silent_end_costs_the_deadline_and_an_end_that_is_gone_an_error(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    large = pages_of(8, [1 << 20])
    with pytest.raises(TimeoutError):
        sockets.send(pair[0], list(range(8)), large, checksum=False, deadline_s=soon(0.05))
    for half in (b"", HEADER.pack(4, 300), HEADER.pack(4, 300) + b"half a page"):
        with ends() as (ours, theirs):
            ours.send(half)
            arguments = (theirs, memoryview(bytearray(HEADER.size)), 0, [4], room_for(1, [300]))
            with pytest.raises(TimeoutError):
                sockets.receive(*arguments, checksum=True, deadline_s=soon(0.02))
            least_bytes = theirs.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)
            assert least_bytes == 1, "whoever reads on is woken by any byte"
            ours.close()
            with pytest.raises(ConnectionError):
                sockets.receive(*arguments, checksum=True, deadline_s=soon())
    with ends() as (ours, theirs):
        theirs.close()
        with pytest.raises(ConnectionError):
            sockets.send(ours, list(range(8)), large, checksum=True, deadline_s=soon())


def test_numbers_that_are_none_are_refused_before_anything_is_sent(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    pages = pages_of(2, [300])
    for tags in ([1], [1, -1], [1, 1 << 64]):
        with pytest.raises((ValueError, OverflowError)):
            sockets.send(ours, tags, pages, checksum=True, deadline_s=soon())
    with pytest.raises(ValueError, match="too short"):
        sockets.send(ours, [1], [[np.zeros(0, np.uint8)]], checksum=False, deadline_s=soon())
    with pytest.raises((BufferError, ValueError)):
        sockets.receive(
            theirs, memoryview(bytearray(HEADER.size)), 0, [1, 2], pages, checksum=True, deadline_s=soon()
        )
    ours.close()
    assert theirs.recv(9) == b""
