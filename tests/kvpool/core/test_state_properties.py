"""A node against a simple model, driven by random clients. Every step checks conservation: see node_model."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdserve.kvpool.core.events import CancelTransfers, StartReceive, StartSend, TransferDone
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.slot_table import TableLayout
from tests.support.kvpool.node_model import KIB, Node, answers, commit, key

KEYS = st.lists(st.integers(0, 11), min_size=1, max_size=5)
LENGTHS = st.sampled_from([1, 4 * KIB, 4 * KIB, 4 * KIB, 8 * KIB, 16 * KIB])
CLIENT = st.integers(0, 3)
CHECKSUM_OF_WRITE = st.integers(1, (1 << 64) - 1)


class Clients(RuleBasedStateMachine):
    """Four clients, two over UCX. The model: which filling (sequence) of a key was committed last, by whom it
    was reserved, which slots are held. It knows nothing of eviction: a page may be gone, but never wrong.
    """

    @initialize()
    def start(self) -> None:
        self.node = Node(
            slabs=4, slab_bytes=16 * KIB, lease_s=10, reservation_lease_s=8, quarantine_s=5, max_waiters=3
        )
        self.paths: list[m.DataPathName] = ["shm", "inproc", "ucx", "ucx"]
        self.connections = [self.node.connect(path) for path in self.paths]
        self.namespaces = [self.node.open(self.connections[0], name) for name in ("a", "b")]
        self.granted: dict[tuple[int, int], tuple[int, int, int]] = {}  # (slot, sequence): client, ns, key
        self.committed: dict[tuple[int, int], tuple[int, int, int]] = {}  # of (ns, key)
        self.pins: list[tuple[int, m.Pin, float]] = []  # client, pin, until
        self.transfers: dict[int, tuple[int, int]] = {}  # tag: connection, slot
        self.cancelled: set[int] = set()
        self.commits: dict[tuple[int, int], tuple[list[m.Grant], int]] = {}

    def act(self, actions: list[object]) -> None:
        for action in actions:
            if isinstance(action, StartSend | StartReceive):
                assert action.tag not in self.transfers
                self.transfers[action.tag] = (action.connection, action.offset)
            elif isinstance(action, CancelTransfers):
                self.cancelled.update(action.tags)
                assert self.cancelled <= self.transfers.keys()

    def send(self, client: int, message: m.Request) -> list[m.Reply]:
        actions = self.node.send(self.connections[client], message)
        self.act(actions)  # type: ignore[arg-type]
        self.settle(actions)
        return answers(actions, self.connections[client])

    def settle(self, actions: list[object]) -> None:
        """Deferred commits of other requests."""
        for client, connection in enumerate(self.connections):
            for reply in answers(actions, connection):  # type: ignore[arg-type]
                if isinstance(reply, m.Committed):
                    self.note_commit(client, reply)

    def note_commit(self, client: int, reply: m.Committed) -> None:
        grants, checksum = self.commits.pop((client, reply.id))
        for grant, ok in zip(grants, reply.mask, strict=True):
            name = (grant.slot, grant.sequence)
            if ok:
                owner, ns, k = self.granted.pop(name)
                assert owner == client
                self.committed[ns, k] = (*name, checksum)

    @rule(client=CLIENT, ns=st.integers(0, 1), keys=KEYS, length=LENGTHS)
    def reserve(self, client: int, ns: int, keys: list[int], length: int) -> None:
        namespace = self.namespaces[ns]
        present = self.node.exists(self.connections[client], namespace, *keys)
        [reply] = self.send(client, m.Reserve(1, namespace, [key(k) for k in keys], [length]))
        assert isinstance(reply, m.Reserved)
        seen = set()
        for k, was, grant in zip(keys, present, reply.grants, strict=True):
            assert (grant.status == m.PRESENT) <= bool(was)
            if grant.status == m.GRANTED:
                assert k not in seen, "one key was granted twice"
                seen.add(k)
                assert (grant.slot, grant.sequence) not in self.granted
                self.granted[grant.slot, grant.sequence] = (client, namespace, k)

    @rule(client=CLIENT, ns=st.integers(0, 1), keys=KEYS, length=LENGTHS, checksum=CHECKSUM_OF_WRITE)
    def put(self, client: int, ns: int, keys: list[int], length: int, checksum: int) -> None:
        before = set(self.granted)
        self.reserve(client, ns, keys, length)
        names = [name for name in self.granted if name not in before]
        for tag, (connection, _) in list(self.transfers.items()):
            if connection == self.connections[client] and tag not in self.cancelled:
                self.finish(tag, True)
        self.send_commit(client, names, checksum)

    @rule(client=CLIENT, ns=st.integers(0, 1), keys=KEYS, length=LENGTHS, checksum=CHECKSUM_OF_WRITE)
    def put_too(self, client: int, ns: int, keys: list[int], length: int, checksum: int) -> None:
        self.put(client, ns, keys, length, checksum)

    @rule(client=CLIENT, checksum=CHECKSUM_OF_WRITE, data=st.data(), foreign=st.booleans())
    def commit(self, client: int, checksum: int, data: st.DataObject, foreign: bool) -> None:
        names = [n for n, (owner, _, _) in self.granted.items() if foreign or owner == client]
        if not names:
            return
        self.send_commit(
            client, data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=4)), checksum
        )

    def send_commit(self, client: int, names: list[tuple[int, int]], checksum: int) -> None:
        grants = [m.Grant(m.GRANTED, slot, 0, sequence) for slot, sequence in names]
        request_id = self.node.next_id()
        self.commits[client, request_id] = (grants, checksum)
        self.send(client, commit(request_id, *grants, checksum=checksum))

    @rule(client=CLIENT, data=st.data())
    def abort(self, client: int, data: st.DataObject) -> None:
        names = [n for n, (owner, _, _) in self.granted.items() if owner == client]
        if names:
            slot, sequence = data.draw(st.sampled_from(names))
            self.send(client, m.Abort([slot], [sequence]))

    @rule(client=CLIENT, ns=st.integers(0, 1), keys=KEYS, data=st.data())
    def get(self, client: int, ns: int, keys: list[int], data: st.DataObject) -> None:
        namespace = self.namespaces[ns]
        store = self.node.state.store
        known = [slot for slot in (store.find(namespace, key(k)) for k in keys) if slot >= 0]
        length = store.facts.length_bytes[known[0]] if known else data.draw(LENGTHS)
        [reply] = self.send(client, m.Get(2, namespace, [key(k) for k in keys], [length]))
        assert isinstance(reply, m.Got)
        for k, pin in zip(keys, reply.pins, strict=True):
            if pin.status == m.HIT:
                assert (pin.slot, pin.sequence, pin.checksum) == self.committed[namespace, k]
                self.pins.append((client, pin, self.node.now_s + 10))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.pins:
            client, pin, until = data.draw(st.sampled_from(self.pins))
            self.pins.remove((client, pin, until))
            self.send(client, m.Release([pin.slot], [pin.sequence]))

    @rule(data=st.data(), ok=st.booleans())
    def transfer_done(self, data: st.DataObject, ok: bool) -> None:
        if self.transfers:
            tag = data.draw(st.sampled_from(sorted(self.transfers)))
            self.finish(tag, ok)

    def finish(self, tag: int, ok: bool) -> None:
        connection, _ = self.transfers.pop(tag)
        self.cancelled.discard(tag)
        actions = self.node.do(TransferDone(connection, tag, ok))
        self.act(actions)  # type: ignore[arg-type]
        self.settle(actions)  # type: ignore[arg-type]

    @rule(client=CLIENT, ns=st.integers(0, 1), keys=KEYS, timeout_s=st.floats(0, 20))
    def wait(self, client: int, ns: int, keys: list[int], timeout_s: float) -> None:
        request = m.Wait(self.node.next_id(), self.namespaces[ns], [key(k) for k in keys], timeout_s)
        self.send(client, request)

    @rule(seconds=st.floats(0.1, 6))
    def time(self, seconds: float) -> None:
        actions = self.node.pass_time(seconds)
        self.act(actions)  # type: ignore[arg-type]
        self.settle(actions)  # type: ignore[arg-type]
        assert self.node.state.next_deadline_s > self.node.now_s

    @rule(client=CLIENT, by_peer=st.booleans(), rarely=st.integers(0, 4))
    def reconnect(self, client: int, by_peer: bool, rarely: int) -> None:
        if rarely:
            return
        self.act(self.node.disconnect(self.connections[client], by_peer))  # type: ignore[arg-type]
        mine = {tag for tag, (c, _) in self.transfers.items() if c == self.connections[client]}
        assert mine <= self.cancelled, "transfers of a lost client are cancelled"
        self.connections[client] = self.node.connect(self.paths[client])
        self.granted = {n: g for n, g in self.granted.items() if g[0] != client}
        self.pins = [entry for entry in self.pins if entry[0] != client]

    @rule(client=CLIENT, ns=st.integers(0, 1), keys=KEYS)
    def discard(self, client: int, ns: int, keys: list[int]) -> None:
        namespace = self.namespaces[ns]
        if len(keys) > 1:
            return  # rarely
        sequences = [self.committed.get((namespace, k), (0, 0, 0))[1] for k in keys]
        self.send(client, m.Discard(3, namespace, [key(k) for k in keys], sequences))

    @rule(client=CLIENT, ns=st.integers(0, 1), drop=st.integers(0, 9))
    def clear(self, client: int, ns: int, drop: int) -> None:
        if drop > 1:
            return  # most of the time, so that there is something to drop
        number = self.namespaces[ns]
        if drop:
            self.send(client, m.DropNamespace(4, "ab"[ns]))
            self.namespaces[ns] = self.node.open(self.connections[client], "ab"[ns])
            assert self.namespaces[ns] != number
        else:
            self.send(client, m.Clear(4, number))
            assert self.node.exists(self.connections[client], number, *range(12)) == [0] * 12

    @invariant()
    def slots_in_use_do_not_overlap(self) -> None:
        if not hasattr(self, "node"):
            return
        store = self.node.state.store
        spans = sorted(
            (store.slots.offset(slot), store.slots.offset(slot) + store.slots.slot_bytes(slot))
            for state in (1, 2, 3, 4)
            for slot in store.slots_in_state(state)
        )
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert all(end <= store.slots.capacity_bytes for _, end in spans)

    @invariant()
    def a_leased_page_keeps_its_filling(self) -> None:
        if not hasattr(self, "node"):
            return
        store = self.node.state.store
        for _, pin, until in self.pins:
            if until > self.node.now_s:
                assert store.facts.sequence[pin.slot] == pin.sequence
                assert store.state(pin.slot) in (2, 3)

    @invariant()
    def a_slot_under_transfer_is_not_free(self) -> None:
        if not hasattr(self, "node"):
            return
        store = self.node.state.store
        used = {store.slots.offset(slot) for state in (1, 2, 3, 4) for slot in store.slots_in_state(state)}
        assert {offset for _, offset in self.transfers.values()} <= used

    def teardown(self) -> None:
        if not hasattr(self, "node"):
            return
        for connection in self.connections:
            self.act(self.node.disconnect(connection))  # type: ignore[arg-type]
        for tag, (connection, _) in list(self.transfers.items()):
            self.node.do(TransferDone(connection, tag, False))
        self.node.pass_time(100)
        status = self.node.status()
        assert (status.reserved_bytes, status.quarantined_bytes, status.pins, status.waiters) == (0, 0, 0, 0)
        assert status.used_bytes + status.free_bytes == status.capacity_bytes


TestClients = Clients.TestCase
TestClients.settings = settings(max_examples=80, stateful_step_count=80, deadline=None)


def test_memory_per_page_is_bounded() -> None:
    pages = 100_000
    tracemalloc.start()
    try:
        node = Node(slabs=pages // 1024 + 1, slab_bytes=4 << 20)
        c = node.connect()
        ns = node.open(c)
        store, out = node.state.store, []  # type: ignore[var-annotated]
        for first in range(0, pages, 100):
            keys = [key(n) for n in range(first, first + 100)]
            slots = store.take(store.index.namespace(ns), keys, 4 * KIB, 4 * KIB, out)
            store.commit(slots, [1] * 100, 0.0, out)
            out.clear()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after / pages <= 250, f"{after / pages:.0f} bytes per page"
    assert TableLayout(4 << 30, 32 << 20, 16 << 10).table_bytes < 0.01 * (4 << 30)
