"""Three clients and two tiers, random, against what a node must answer: see tier_rig."""

from __future__ import annotations

import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdserve.kvpool.core import events as ev
from pdserve.kvpool.core.tiering.tier_index import TierSpec
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.tiers.base import (
    CORRUPT,
    GONE,
    READ_FAILED,
    REFUSED,
    STORED,
    WRITE_FAILED,
    PageName,
)
from tests.support.kvpool.node_model import KIB, key
from tests.support.kvpool.tier_rig import FAR, Rig
from tests.support.suite.extended import examples

TIMEOUT_S = 1.0
KEYS = st.lists(st.integers(0, 30), min_size=1, max_size=6)


class Clients(RuleBasedStateMachine):
    """Three clients (one over UCX) and two tiers that answer late, in any order, and badly."""

    @initialize(
        write=st.sampled_from(["cold", "all"]),
        store_pages=st.sampled_from([1, 3, 64]),
        sunk=st.sampled_from([True, True, True, False]),
    )
    def start(self, write: str, store_pages: int, sunk: bool) -> None:
        self.write_policy = write
        self.excused: set[bytes] = set()  # may be in memory only, whatever the policy
        first = TierSpec("ssd:/a", "ssd", 1 << 30, write)  # type: ignore[arg-type]
        bounds = {"load_bytes": 24 * KIB, "promotion_timeout_s": TIMEOUT_S}
        self.rig = Rig(first, FAR, store_pages=store_pages, **bounds)
        self.node = self.rig.node
        self.connections = [self.rig.c, self.node.connect("ucx"), self.node.connect()]
        self.pins: list[tuple[int, m.Pin, tuple[int, bytes]]] = []
        self.gets: dict[tuple[int, int], tuple[list[bytes], float]] = {}  # keys, and when it was asked
        self.sends: list[tuple[int, int]] = []  # over UCX: connection and tag
        self.node.followers.append(self.follow)
        if sunk:  # half of the pages are in a tier only
            self.put_many(0)
            self.write_all(0)
            self.put_many(15)

    def follow(self, actions: list[ev.Action]) -> None:
        for action in actions:
            if isinstance(action, ev.Answer) and isinstance(action.message, m.Got):
                self.got(action.connection, action.message)
            elif isinstance(action, ev.StartSend):
                self.sends.append((action.connection, action.tag))

    def got(self, connection: int, reply: m.Got) -> None:
        keys, _ = self.gets.pop((connection, reply.id))
        for k, pin in zip(keys, reply.pins, strict=True):
            if pin.status == m.HIT and self.node.state.store.facts.sequence[pin.slot] == pin.sequence:
                assert self.rig.contents[pin.slot][1] == k, "another page's bytes"
                self.pins.append((connection, pin, (0, k)))

    @rule(first=st.integers(0, 15))
    def put_many(self, first: int) -> None:
        """Enough to push others out of memory."""
        self.rig.put(*range(first, first + 16))
        self.rig.commits()

    @rule(tier=st.integers(0, 1))
    def write_all(self, tier: int) -> None:
        while self.rig.writes[tier]:
            self.rig.write(tier)

    @rule(keys=KEYS)
    def put(self, keys: list[int]) -> None:
        self.rig.put(*dict.fromkeys(keys))

    @rule(client=st.integers(0, 2), keys=KEYS)
    def get(self, client: int, keys: list[int]) -> None:
        connection = self.connections[client]
        request = m.Get(self.node.next_id(), self.rig.ns, [key(k) for k in keys], [4 * KIB])
        self.gets[connection, request.id] = request.keys, self.node.now_s
        self.node.send(connection, request)

    @rule(client=st.integers(0, 2), keys=KEYS, status=st.sampled_from([None, CORRUPT, READ_FAILED, GONE]))
    def get_and_load(self, client: int, keys: list[int], status: int | None) -> None:
        self.get(client, keys)
        if self.rig.loads:
            self.rig.load(-1, status)

    @rule(client=st.integers(0, 2), keys=KEYS, what=st.integers(0, 7))
    def get_and_something_else(self, client: int, keys: list[int], what: int) -> None:
        self.get(client, keys)
        if what < 3:
            self.clear(what)
        elif what < 5 and client:
            self.reconnect(client)
        elif what < 7:
            self.time(1.5)

    @rule(client=st.integers(0, 2))
    def release(self, client: int) -> None:
        mine = [entry for entry in self.pins if entry[0] == self.connections[client]]
        for entry in mine:
            self.pins.remove(entry)
            self.node.release(entry[0], entry[1])

    @rule()
    def sent(self) -> None:
        if self.sends:
            self.node.done(*self.sends.pop(0), True)

    @rule(tier=st.integers(0, 1), status=st.sampled_from([STORED] * 6 + [WRITE_FAILED, REFUSED]))
    def write(self, tier: int, status: int) -> None:
        if self.rig.writes[tier]:
            if status == REFUSED:  # pages of this size are not offered again
                self.excused |= {key(k) for k in range(31)}
            self.rig.write(tier, status)

    @rule(at=st.integers(0, 5), status=st.sampled_from([None] * 4 + [CORRUPT, READ_FAILED, GONE]))
    def load(self, at: int, status: int | None) -> None:
        if self.rig.loads:
            self.rig.load(at % len(self.rig.loads), status)

    @rule(at=st.integers(0, 40), on=st.booleans())
    def leave_the_first_tier(self, at: int, on: bool) -> None:
        disk = self.rig.disks[0]
        if not disk:
            return
        where = sorted(disk)[at % len(disk)]
        page = disk.pop(where)
        self.excused.add(page.key)
        self.node.do(ev.PagesGone(0, (PageName(*where, page.length_bytes),), 0))
        if on:  # by way of the next tier's writer
            self.rig.writes[1].append(page)

    @rule()
    def scan(self) -> None:
        self.rig.commits()

    @rule(seconds=st.floats(0.1, 3))
    def time(self, seconds: float) -> None:
        self.node.pass_time(seconds)
        assert self.node.state.next_deadline_s > self.node.now_s
        since_s = self.node.now_s - TIMEOUT_S
        assert all(asked_s > since_s for _, asked_s in self.gets.values()), "a Get waits for too long"

    @rule(k=st.integers(0, 30))
    def discard(self, k: int) -> None:
        slot = self.node.state.store.find(self.rig.ns, key(k))
        if slot >= 0:
            sequence = self.node.state.store.facts.sequence[slot]
            self.node.send(self.rig.c, m.Discard(self.node.next_id(), self.rig.ns, [key(k)], [sequence]))
            assert self.node.exists(self.rig.c, self.rig.ns, k) == [0]

    @rule(what=st.integers(0, 7))
    def clear(self, what: int) -> None:
        if what == 0:
            self.node.send(self.rig.c, m.Clear(self.node.next_id(), self.rig.ns))
        elif what == 1:
            self.node.send(self.rig.c, m.DropNamespace(self.node.next_id(), "ns"))
            self.rig.ns = self.node.open(self.rig.c)
        else:
            return
        assert self.node.exists(self.rig.c, self.rig.ns, *range(31)) == [0] * 31
        assert self.gets == {}, "a Get waits for pages that are gone"

    @rule(client=st.integers(1, 2))
    def reconnect(self, client: int) -> None:
        gone = self.connections[client]
        self.node.disconnect(gone)
        self.gets = {name: keys for name, keys in self.gets.items() if name[0] != gone}
        self.pins = [entry for entry in self.pins if entry[0] != gone]
        self.connections[client] = self.node.connect("ucx" if client == 1 else "shm")

    @invariant()
    def pinned_bytes_stay(self) -> None:
        for _, pin, (_, k) in getattr(self, "pins", ()):
            if self.node.state.store.facts.sequence[pin.slot] == pin.sequence:
                assert self.rig.contents[pin.slot][1] == k

    def teardown(self) -> None:
        # A rule that failed half-way leaves `contents` behind what the node did: what would be found here
        # then ("the slot was changed") is not the failure, and would hide it
        if not hasattr(self, "rig") or sys.exc_info()[0] is not None:
            return
        self.let_all_come()
        while self.sends:
            self.sent()
        assert self.gets == {} or self.node.pass_time(2.0)
        assert self.gets == {}, "a Get was not answered"
        for client in range(3):
            self.release(client)
        self.node.pass_time(70.0)  # longer than a tier that failed is left alone
        self.let_all_come()
        self.tiers_hold_what_the_node_says()
        self.what_there_is_can_be_read()
        for connection in self.connections:
            self.node.disconnect(connection)
        self.node.pass_time(100)
        status = self.node.status()
        assert (status.reserved_bytes, status.quarantined_bytes, status.pins) == (0, 0, 0)

    def let_all_come(self) -> None:
        while self.rig.loads or any(self.rig.writes):
            while self.rig.loads:
                self.rig.load()
            self.rig.drain()

    def tiers_hold_what_the_node_says(self) -> None:
        state = self.node.state
        for tier, disk in zip(state.tiers._index.tiers, self.rig.disks, strict=True):
            assert {(space, k) for space, pages in tier.pages.items() for k in pages} == disk.keys()
        below = {k for disk in self.rig.disks for _, k in disk}
        in_memory = {key(k) for k in range(31) if state.store.find(self.rig.ns, key(k)) >= 0}
        if self.write_policy == "all":
            assert in_memory <= below | self.excused, "a page was not stored"

    def what_there_is_can_be_read(self) -> None:
        """Whatever happened before: a page in memory, or in any tier, comes when it is asked for."""
        state, ns = self.node.state, self.rig.ns
        space = state.namespaces[ns].space
        for k in range(31):
            first, second = [(space, key(k)) in disk for disk in self.rig.disks]
            if first and second:  # it has left the first, and the node will hear of it later
                del self.rig.disks[0][space, key(k)]
            below = first or second
            there = below or state.store.find(ns, key(k)) >= 0
            assert self.node.exists(self.rig.c, ns, k) == [there]
            self.get(0, [k])
            while self.rig.loads:
                self.rig.load()
            assert self.gets == {}
            held = [pin for connection, pin, _ in self.pins if connection == self.rig.c]
            assert bool(held) == there
            self.release(0)


@pytest.mark.parametrize("status", [CORRUPT, READ_FAILED, GONE])
def test_a_page_that_is_written_while_its_damaged_copy_is_read_is_stored_again(status: int) -> None:
    clients = Clients()
    clients.start(write="all", store_pages=1, sunk=True)
    clients.write_all(tier=0)
    clients.get(client=0, keys=[0])
    clients.time(1.5)  # the read is late
    clients.put_many(first=0)
    clients.get_and_load(client=0, keys=[0], status=status)
    clients.teardown()  # every page in memory is below, too


TestClients = Clients.TestCase
TestClients.settings = settings(max_examples=examples(120), stateful_step_count=60, deadline=None)
