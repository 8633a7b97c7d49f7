"""Pages come, stop half-way, are cancelled and come late, at random: each slot holds what it should.

A slot whose receive failed is filled with another byte at the very moment when the node reports it. So a byte
that is written later shows.
"""

from __future__ import annotations

import random
import ssl
from pathlib import Path

import pytest

from pdserve.security.tls import Certificates, TlsConfig
from tests.support.certificates import Authority
from tests.support.kvpool.tcp_server import REUSED, Peer, RunningServer, running

SLOT_BYTES = 300_000
SLOTS = 8
STEPS = 150


class Walk:
    """One client's random life."""

    def __init__(self, node: RunningServer, tls: ssl.SSLContext | None, seed: int) -> None:
        self.node = node
        node.reuses_slots = True
        self.peer = Peer(node, tls)
        self.dice = random.Random(seed)
        self.holds = [REUSED] * SLOTS  # the byte that fills each slot
        node.arena[: SLOTS * SLOT_BYTES] = REUSED
        self.granted: dict[int, int] = {}  # tag -> slot; not cancelled, not written
        self.late: list[int] = []  # tags cancelled, whose pages have not begun
        self.half: tuple[int, int] | None = None  # tag whose page has begun, and its bytes that are left

    def grant(self) -> None:
        free = set(range(SLOTS)) - set(self.granted.values())
        if free:
            slot = self.dice.choice(sorted(free))
            tag = self.node.receive(self.peer.connection, slot * SLOT_BYTES, SLOT_BYTES)
            self.granted[tag] = slot

    def begin(self) -> None:
        unwritten = [*self.granted, *self.late]
        if self.half is None and unwritten:
            tag = self.dice.choice(unwritten)
            count = self.dice.choice([0, 1, SLOT_BYTES // 2, SLOT_BYTES])
            self.peer.write(tag, bytes([tag % 200]) * count, SLOT_BYTES)
            self.half = (tag, SLOT_BYTES - count)
            self._finish_if_whole()

    def go_on(self) -> None:
        if self.half is not None:
            tag, left = self.half
            count = self.dice.choice([left, left // 2])
            self.peer.sock.sendall(bytes([tag % 200]) * count)
            self.half = (tag, left - count)
            self._finish_if_whole()

    def _finish_if_whole(self) -> None:
        assert self.half is not None
        tag, left = self.half
        if left:
            return
        self.half = None
        if tag in self.late:
            self.late.remove(tag)
        else:
            slot = self.granted.pop(tag)
            assert self.node.outcome(tag)
            self.holds[slot] = tag % 200

    def cancel(self) -> None:
        if self.granted:
            tag = self.dice.choice(sorted(self.granted))
            slot = self.granted.pop(tag)
            self.node.cancel(self.peer.connection, tag)
            assert not self.node.outcome(tag)
            self.holds[slot] = REUSED
            self.late.append(tag)

    def read(self) -> None:
        settled = sorted(set(range(SLOTS)) - set(self.granted.values()))
        if settled:
            slot = self.dice.choice(settled)
            tag = self.node.send(self.peer.connection, slot * SLOT_BYTES, SLOT_BYTES)
            assert self.peer.header() == (tag, SLOT_BYTES)
            assert self.peer.read(SLOT_BYTES) == bytes([self.holds[slot]]) * SLOT_BYTES

    def check(self) -> None:
        for slot in set(range(SLOTS)) - set(self.granted.values()):
            start = slot * SLOT_BYTES
            assert (self.node.arena[start : start + SLOT_BYTES] == self.holds[slot]).all(), slot


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
def test_a_slot_holds_its_page_and_nothing_of_a_cancelled_one(
    tmp_path: Path, encrypted: bool, seed: int
) -> None:
    files = Certificates(Authority(tmp_path).host() if encrypted else TlsConfig())
    server, client = files.server_context, files.client_context
    with running(tls=server) as node:
        walk = Walk(node, client, seed)
        steps = [walk.grant, walk.grant, walk.begin, walk.begin, walk.go_on, walk.cancel, walk.read]
        for _ in range(STEPS):
            walk.dice.choice(steps)()
            walk.check()
        while walk.half is not None:
            walk.go_on()
        walk.read()  # all before it was read by the node
        walk.check()
        assert walk.peer.connection not in node.lost
        walk.peer.close()
