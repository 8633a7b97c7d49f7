"""Ranks of one host: one reads, the others copy what it has read. Groups of this process, real sockets."""

from __future__ import annotations

import itertools
import mmap
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from pdserve.kvpool.client.operations import Proof
from pdserve.kvpool.hicache.ranks import follower as follower_module
from pdserve.kvpool.hicache.ranks import group as group_module
from pdserve.kvpool.hicache.ranks.follower import State
from pdserve.kvpool.hicache.ranks.group import PartReads, RankGroup
from pdserve.kvpool.hicache.ranks.host_pages import HostPages, MappedHostPages, Segment
from pdserve.kvpool.protocol.page_bytes import NO_CHECKSUM, PageBuffers, checksum_page
from tests.support.kvpool.faulty import keys
from tests.support.up.cluster import wait_until

PAGES, SEGMENT = 20, 300_000
UNIX_SOCKETS = Path("/proc/net/unix")
_numbers = itertools.count()


class Rank:
    """A host pool of pages of two segments, and its group. `reads`: what the rank does."""

    def __init__(self, name: str) -> None:
        size = 2 * PAGES * SEGMENT
        self.fd = os.memfd_create("host-pool")
        os.ftruncate(self.fd, size)
        segments = [Segment(0, 0, SEGMENT, SEGMENT), Segment(0, PAGES * SEGMENT, SEGMENT, SEGMENT)]
        host = HostPages([(self.fd, size)], segments, PAGES)
        self.mapped = MappedHostPages(host, [np.frombuffer(mmap.mmap(self.fd, size), np.uint8)])
        self.group = RankGroup(name, {"kv": self.mapped})
        self.group.start()
        reads = self.group.part("kv")
        assert reads is not None
        self.reads: PartReads = reads

    def page(self, number: int, seed: int | None = None) -> PageBuffers:
        page = self.mapped.page(number)
        if seed is not None:
            rng = np.random.default_rng(seed)
            for segment in page:
                segment[:] = rng.integers(0, 256, SEGMENT, np.uint8)
        return page

    def knows(self, key: bytes) -> object:
        leader = self.group._follower._leader
        return leader.board.look(key, time.monotonic()) if leader is not None else None


@pytest.fixture
def name() -> str:
    return f"test-{os.getpid()}-{next(_numbers)}"


@pytest.fixture
def pair(name: str) -> Iterator[tuple[Rank, Rank]]:
    """A leader and its follower."""
    leader = Rank(name)
    wait_until(lambda: f"@pdserve-ranks-{name}" in UNIX_SOCKETS.read_text(), "it leads")
    follower = Rank(name)
    wait_until(lambda: bool(leader.group._followers), "it follows")
    wait_until(lambda: follower.group._follower._leader is not None, "it has the leader's memory")
    yield leader, follower
    for rank in (leader, follower):
        rank.group.close()
        os.close(rank.fd)


def proof_of(page: PageBuffers, trailer: bytes = b"") -> Proof:
    return Proof(checksum_page([*page, np.frombuffer(trailer + b"", np.uint8)] if trailer else page), trailer)


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


@pytest.mark.parametrize("trailer", [b"", b"sixteen bytes..."])
def test_a_page_that_the_leader_has_read_is_copied(pair: tuple[Rank, Rank], trailer: bytes) -> None:
    leader, follower = pair
    wanted, source = keys(2), leader.page(5, seed=1)
    leader.reads.begin(wanted)
    leader.reads.end(wanted, [source, leader.page(6)], [proof_of(source, trailer), None])
    wait_until(lambda: follower.knows(wanted[1]) is State.MISSED, "the follower heard it")
    targets = [follower.page(11), follower.page(12)]
    assert follower.reads.take(wanted, targets, soon()) == [proof_of(source, trailer), None]
    assert all(np.array_equal(a, b) for a, b in zip(source, targets[0], strict=True))
    assert not any(segment.any() for segment in targets[1])


def test_a_follower_waits_while_the_leader_reads(pair: tuple[Rank, Rank]) -> None:
    leader, follower = pair
    wanted, source = keys(3), leader.page(0, seed=2)
    leader.reads.begin(wanted)
    wait_until(lambda: follower.knows(wanted[2]) is State.READING, "the follower heard it")
    with ThreadPoolExecutor(1) as thread:
        targets = [follower.page(n) for n in range(3)]
        taken = thread.submit(follower.reads.take, wanted, targets, soon())
        for key in wanted:
            leader.reads.end([key], [source], [proof_of(source)])
        assert taken.result() == [proof_of(source)] * 3
    assert all(np.array_equal(source[0], target[0]) for target in targets)


def test_a_page_without_a_checksum_is_read_by_each_rank(pair: tuple[Rank, Rank]) -> None:
    leader, follower = pair
    wanted, source = keys(1), leader.page(0, seed=3)
    leader.reads.end(wanted, [source], [Proof(NO_CHECKSUM, b"")])
    wait_until(lambda: follower.knows(wanted[0]) is State.MISSED, "the follower heard it")
    assert follower.reads.take(wanted, [follower.page(0)], soon()) == [None]


def test_a_follower_does_not_wait_twice_in_a_row_for_a_leader_that_does_not_begin(
    pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_module, "PAUSE_S", 1000.0)
    leader, follower = pair
    wanted, source = keys(10), leader.page(0, seed=3)
    assert follower.reads.take(wanted[:1], [follower.page(0)], soon()) == [None]
    monkeypatch.setattr(follower_module, "PATIENCE_S", 1000.0)
    leader.reads.begin(wanted)
    wait_until(lambda: follower.knows(wanted[2]) is State.READING, "the follower heard it")
    pages = [follower.page(n) for n in range(10)]
    assert follower.reads.take(wanted, pages, soon(1000.0)) == [None] * 10
    leader.reads.end(wanted[:1], [source], [proof_of(source)])
    wait_until(lambda: follower.knows(wanted[0]) is not State.READING, "the follower heard it")
    assert follower.reads.take(wanted, pages, soon(1000.0)) == [proof_of(source), *[None] * 9]


def test_a_slow_leader_leaves_a_follower_half_of_its_time(pair: tuple[Rank, Rank]) -> None:
    leader, follower = pair
    leader.reads.begin(keys(1))
    wait_until(lambda: follower.knows(keys(1)[0]) is State.READING, "the follower heard it")
    deadline_s = soon(1.0)
    assert follower.reads.take(keys(1), [follower.page(0)], deadline_s) == [None]
    assert time.monotonic() < deadline_s


def test_the_end_of_the_leader_ends_a_wait_for_it(pair: tuple[Rank, Rank]) -> None:
    leader, follower = pair
    leader.reads.begin(keys(1))
    wait_until(lambda: follower.knows(keys(1)[0]) is State.READING, "the follower heard it")
    with ThreadPoolExecutor(1) as thread:
        taken = thread.submit(follower.reads.take, keys(1), [follower.page(0)], soon(1000.0))
        with leader.group._lock:
            [sock] = leader.group._followers
            sock.shutdown(socket.SHUT_RDWR)
        assert taken.result() == [None]
    wait_until(lambda: len(leader.group._followers) == 2, "it follows again")
    leader.reads.begin(keys(1))  # the end of the first socket is found
    assert len(leader.group._followers) == 1


def test_a_group_that_is_left_has_no_threads_and_another_rank_leads(
    pair: tuple[Rank, Rank], name: str
) -> None:
    leader, follower = pair
    third = Rank(name)
    wait_until(lambda: len(leader.group._followers) == 2, "it follows too")
    leader.group.close()
    wait_until(lambda: bool(follower.group._followers or third.group._followers), "one of the others leads")
    follower.group.close()
    third.group.close()
    wait_until(lambda: all(one.name != "pdserve-ranks" for one in threading.enumerate()), "all have left")
    assert f"@pdserve-ranks-{name}" not in UNIX_SOCKETS.read_text()
    os.close(third.fd)


def test_a_follower_that_takes_no_messages_is_dropped(pair: tuple[Rank, Rank], name: str) -> None:
    leader, follower = pair
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf:
        deaf.connect(f"\0pdserve-ranks-{name}")
        wait_until(lambda: len(leader.group._followers) == 2, "it is welcome")
        told = 0
        while len(leader.group._followers) == 2:
            key = keys(1)
            leader.reads.begin(key * 100)
            told += 1
            wait_until(lambda: follower.knows(keys(1)[0]) is State.READING, "the other one hears all")
            assert told < 100_000
    assert follower.group._follower._leader is not None


def test_another_user_neither_follows_nor_leads(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(group_module, "peer_uid", lambda sock: os.geteuid() + 1)
    leader = Rank(name)
    wait_until(lambda: f"@pdserve-ranks-{name}" in UNIX_SOCKETS.read_text(), "it leads")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(60.0)
        stranger.connect(f"\0pdserve-ranks-{name}")
        assert stranger.recv(1000) == b""
    assert leader.group._followers == []
    leader.group.close()
    os.close(leader.fd)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as squatter:
        squatter.bind(f"\0pdserve-ranks-{name}-2")
        squatter.listen()
        caplog.set_level("DEBUG")
        follower = Rank(f"{name}-2")
        wait_until(lambda: "another user has the socket" in caplog.text, "it refuses")
        assert follower.reads.take(keys(1), [follower.page(0)], soon()) == [None]
        follower.group.close()
        os.close(follower.fd)


def test_many_threads_take_while_the_leader_reads(pair: tuple[Rank, Rank]) -> None:
    """What is taken is right, though the leader changes its pages; once they rest, all are taken."""
    leader, follower = pair
    stop = threading.Event()
    pages = {key: leader.page(n, seed=n) for n, key in enumerate(keys(4))}
    proofs = {key: proof_of(page) for key, page in pages.items()}

    def change() -> None:
        while not stop.is_set():
            for key, page in pages.items():
                leader.reads.end([key], [page], [proofs[key]])
                page[0][7] ^= 1
                page[0][7] ^= 1

    def take(number: int) -> int:
        """How many pages were taken."""
        taken = 0
        for key in keys(4) * 20:
            target = follower.page(10 + number)
            [proof] = follower.reads.take([key], [target], soon())
            if proof is not None:
                taken += 1
                assert checksum_page(target) == proofs[key].checksum
        return taken

    changing = threading.Thread(target=change)
    changing.start()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(take, range(4)))  # how many are caught between two changes is chance
        stop.set()
        changing.join()

        def all_are_taken() -> bool:
            """One that heard too slowly was let go, and joins again: what was said meanwhile is lost."""
            leader.reads.end(keys(4), list(pages.values()), list(proofs.values()))
            return list(threads.map(take, range(4))) == [80, 80, 80, 80]

        wait_until(all_are_taken, "all of them are taken")
