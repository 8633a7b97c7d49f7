"""Random clients of one node against a model, with quotas, expiry, tokens, UCX and lost connections.

Every step checks conservation (node_model.py). The model knows every reservation, lease and wait exactly. Of
eviction it knows nothing: a page may be gone at any time, but is never wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdserve.kvpool.core.events import Action, CancelTransfers, StartReceive, StartSend
from pdserve.kvpool.core.namespace_admin import Rules
from pdserve.kvpool.core.store import lazy_free, page_store, room
from pdserve.kvpool.policies import POLICIES
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import NamespaceSettings, PutNamespace
from pdserve.kvpool.protocol.slot_table import COMMITTED, DOOMED, FREE, SWEEPING
from pdserve.security.tokens import digest
from tests.support.kvpool.node_model import KIB, Node, answers, commit, key

NUMBERS = range(12)
KEYS = st.lists(st.integers(0, 11), min_size=1, max_size=5)
SLAB_BYTES = 16 * KIB
LENGTHS = st.sampled_from([1, 4 * KIB, 4 * KIB, 4 * KIB, 8 * KIB, 16 * KIB, 20 * KIB])
CLIENT = st.integers(0, 3)
SPACE = st.integers(0, 1)
CHECKSUM = st.integers(1, (1 << 64) - 1)
TIMES = st.sampled_from([0.5, 2.5, 3.0, 6.0])  # exact in binary: deadlines are hit exactly
TIMEOUTS = st.sampled_from([-1.0, 0.0, float("nan"), 0.5, 3.0, 8.0, 20.0])
LEASE_S, RESERVATION_S, MAX_WAITS = 10.0, 8.0, 3
SECRET = NamespaceSettings(read_token=digest("s"))


class Page(NamedTuple):
    """A committed filling."""

    slot: int
    sequence: int
    checksum: int
    at_s: float


@dataclass
class Held:
    """A reservation that may still be committed."""

    client: int
    namespace: int
    k: int
    until_s: float
    tag: int
    commit: tuple[list[int], int, int] | None = None  # waits for the transfer: mask, place, checksum


@dataclass
class Lease:
    sequence: int
    count: int
    until_s: float
    tags: set[int] = field(default_factory=set)  # of its sends


@dataclass
class OpenWait:
    namespace: int
    keys: list[int]
    missing: set[int]  # not committed since
    until_s: float


class Clients(RuleBasedStateMachine):
    """Four clients, two over UCX, and an administrator."""

    @initialize()
    def start(self) -> None:
        self.patched = pytest.MonkeyPatch()
        for module in (lazy_free, room, page_store):
            self.patched.setattr(module, "CHUNK_SLOTS", 2)  # so that sweeping takes several steps
        rules = Rules(admin_token=digest("root"), named={"secret": SECRET})
        self.node = Node(
            slabs=4,
            slab_bytes=SLAB_BYTES,
            rules=rules,
            lease_s=LEASE_S,
            reservation_lease_s=RESERVATION_S,
            quarantine_s=5,
            max_waiters=MAX_WAITS,
        )
        self.root = self.node.connect("none", token="root")
        self.secret = self.node.open(self.root, "secret")
        self.paths: list[m.DataPathName] = ["shm", "shm", "ucx", "ucx"]
        self.connections = [self.node.connect(path) for path in self.paths]
        self.namespaces = [self.node.open(self.root, name) for name in "ab"]
        self.settings = [NamespaceSettings(), NamespaceSettings()]
        self.held: dict[tuple[int, int], Held] = {}  # by slot and sequence
        self.granted: list[tuple[int, int]] = []  # ever
        self.pages: dict[tuple[int, int], Page] = {}  # by namespace and key
        self.leases: dict[tuple[int, int], Lease] = {}  # by client and slot
        self.ending: dict[int, tuple[int, int]] = {}  # tag of a send: the lease whose pin ends with it
        self.waits: dict[tuple[int, int], OpenWait] = {}  # by connection and request
        self.transfers: dict[int, tuple[int, int]] = {}  # tag: connection, offset
        self.cancelled: set[int] = set()
        self.commits: dict[tuple[int, int], list[int]] = {}  # by client and request: the mask to come

    # --- carrying out actions

    def act(self, actions: list[Action]) -> list[Action]:
        """Every step of the node comes through here."""
        for action in actions:
            if isinstance(action, StartSend | StartReceive):
                assert action.tag not in self.transfers
                self.transfers[action.tag] = (action.connection, action.offset)
            elif isinstance(action, CancelTransfers):
                self.cancelled.update(action.tags)
                assert self.cancelled <= self.transfers.keys()
        replies = [(c, reply) for c in range(4) for reply in answers(actions, self.connections[c])]
        for client, reply in replies:
            if isinstance(reply, m.Committed):
                assert list(reply.mask) == self.commits.pop((client, reply.id))
        for client, reply in replies:
            name = self.connections[client], getattr(reply, "id", 0)
            if isinstance(reply, m.Present) and name in self.waits:
                self.waited(self.waits.pop(name), reply)
        return actions

    def send(self, client: int, message: m.Request) -> list[m.Reply]:
        connection = self.connections[client]
        return answers(self.act(self.node.send(connection, message)), connection)

    def committed(self, name: tuple[int, int], mask: list[int], place: int, checksum: int) -> None:
        held, mask[place] = self.held.pop(name), 1
        self.pages[held.namespace, held.k] = Page(*name, checksum, self.node.now_s)
        self.waits_for(held.namespace, held.k)

    def waits_for(self, namespace: int, k: int) -> None:
        """The page can be read: no wait misses it any more."""
        for wait in self.waits.values():
            if wait.namespace == namespace:
                wait.missing.discard(k)

    def waited(self, wait: OpenWait, reply: m.Present) -> None:
        if wait.namespace not in self.namespaces:
            assert not any(reply.mask), "of a dropped namespace"
            return
        for k, found, now in zip(wait.keys, reply.mask, self.exist(wait.namespace, wait.keys), strict=True):
            assert now <= found <= ((wait.namespace, k) in self.pages)  # a tick also evicts
        assert not wait.missing or wait.until_s <= self.node.now_s

    def exist(self, namespace: int, keys: list[int]) -> list[int]:
        return self.node.exists(self.root, namespace, *keys)

    def ttl_s(self, namespace: int) -> float:
        return self.settings[self.namespaces.index(namespace)].ttl_s or float("inf")

    def waits_to_read(self, namespace: int, k: int) -> bool:
        """Whether a Get of the page would not be answered at once."""
        return False

    # --- writing

    @rule(client=CLIENT, ns=SPACE, keys=KEYS, length=LENGTHS)
    def reserve(self, client: int, ns: int, keys: list[int], length: int) -> None:
        self.reserve_pages(client, ns, keys, length)

    def reserve_pages(self, client: int, ns: int, keys: list[int], length: int) -> list[tuple[int, int]]:
        """The reservations made."""
        namespace, quota = self.namespaces[ns], self.settings[ns].quota_bytes
        present, pages = self.exist(namespace, keys), self.node.state.store.index.namespace(namespace)
        writing = {held.k for held in self.held.values() if held.namespace == namespace}
        before = pages.slot_bytes
        [reply] = self.send(client, m.Reserve(1, namespace, [key(k) for k in keys], [length]))
        assert isinstance(reply, m.Reserved)
        assert not quota or pages.slot_bytes <= max(quota, before), "beyond the quota"
        names: list[tuple[int, int]] = []
        asked: dict[int, int] = {}
        for k, was, grant in zip(keys, present, reply.grants, strict=True):
            if was:
                assert grant.status == m.PRESENT
            elif k in writing:
                assert grant.status == m.BUSY
            elif k in asked:
                assert grant.status == (m.BUSY if asked[k] == m.GRANTED else asked[k])
            elif length > SLAB_BYTES:
                assert grant.status == m.TOO_LARGE
            else:
                assert grant.status in (m.GRANTED, m.FULL)
            asked.setdefault(k, grant.status)
            if grant.status == m.GRANTED:
                name, until_s = (grant.slot, grant.sequence), self.node.now_s + RESERVATION_S
                assert name not in self.held
                self.held[name] = Held(client, namespace, k, until_s, grant.tag)
                names.append(name)
                self.granted.append(name)
        return names

    @rule(client=CLIENT, ns=SPACE, keys=KEYS, length=LENGTHS, checksum=CHECKSUM)
    def put(self, client: int, ns: int, keys: list[int], length: int, checksum: int) -> None:
        names = self.reserve_pages(client, ns, keys, length)
        for tag, (connection, _) in list(self.transfers.items()):
            if connection == self.connections[client] and tag not in self.cancelled:
                self.finish(tag, True)
        self.send_commit(client, names, checksum)

    @rule(client=CLIENT, ns=SPACE, keys=KEYS, length=LENGTHS, checksum=CHECKSUM)
    def put_too(self, client: int, ns: int, keys: list[int], length: int, checksum: int) -> None:
        self.put(client, ns, keys, length, checksum)

    @rule(client=CLIENT, checksum=CHECKSUM, data=st.data(), foreign=st.booleans())
    def commit(self, client: int, checksum: int, data: st.DataObject, foreign: bool) -> None:
        names = [name for name, held in self.held.items() if foreign or held.client == client]
        names += self.granted[-6:]  # most of these have ended
        names += [(slot, sequence + 17) for slot, sequence in names[:2]]
        if names:
            chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=4))
            self.send_commit(client, chosen, checksum)

    def send_commit(self, client: int, names: list[tuple[int, int]], checksum: int) -> None:
        grants = [m.Grant(m.GRANTED, slot, 0, sequence) for slot, sequence in names]
        request_id, mask = self.node.next_id(), [0] * len(names)
        self.commits[client, request_id] = mask
        for place, name in enumerate(names):
            held = self.held.get(name)
            if held is None or held.client != client or held.commit:
                continue
            if held.tag in self.transfers:
                held.commit = mask, place, checksum
            else:
                self.committed(name, mask, place, checksum)
        self.send(client, commit(request_id, *grants, checksum=checksum))

    @rule(client=CLIENT, data=st.data())
    def abort(self, client: int, data: st.DataObject) -> None:
        names = [name for name, held in self.held.items() if held.client == client] + self.granted[-4:]
        if names:
            name = data.draw(st.sampled_from(names))
            held = self.held.get(name)
            if held is not None and held.client == client:
                del self.held[name]
            self.send(client, m.Abort([name[0]], [name[1]]))

    # --- reading

    @rule(client=CLIENT, ns=SPACE, keys=KEYS, hold=st.booleans(), data=st.data())
    def get(self, client: int, ns: int, keys: list[int], hold: bool, data: st.DataObject) -> None:
        namespace, store = self.namespaces[ns], self.node.state.store
        keys = [k for k in keys if not self.waits_to_read(namespace, k)]
        if not keys:
            return
        slots = [store.find(namespace, key(k)) for k in keys]
        known = [store.facts.length_bytes[slot] for slot in slots if slot >= 0]
        length = known[0] if known else data.draw(LENGTHS)
        present = self.exist(namespace, keys)
        [reply] = self.send(client, m.Get(2, namespace, [key(k) for k in keys], [length], hold))
        assert isinstance(reply, m.Got)
        is_sent = self.paths[client] == "ucx"
        misses = any(pin.status == m.MISS for pin in reply.pins)
        assert reply.held == (hold or (misses and not is_sent))
        for k, slot, was, pin in zip(keys, slots, present, reply.pins, strict=True):
            fits = bool(was) and store.facts.length_bytes[slot] == length
            assert pin.status == (m.HIT if fits else m.MISS)
            if fits:
                page = self.pages[namespace, k]
                assert (pin.slot, pin.sequence, pin.checksum) == page[:3]
                assert self.node.now_s < page.at_s + self.ttl_s(namespace)
            if fits and (reply.held or is_sent):
                lease = self.leases.setdefault((client, slot), Lease(pin.sequence, 0, 0.0))
                lease.count += 1
                lease.until_s = self.node.now_s + LEASE_S
                lease.tags.add(pin.tag)
                if not reply.held:
                    self.ending[pin.tag] = client, slot

    @rule(data=st.data(), wrong=st.integers(0, 4))
    def release(self, data: st.DataObject, wrong: int) -> None:
        if not self.leases:
            return
        client, slot = data.draw(st.sampled_from(sorted(self.leases)))
        lease = self.leases[client, slot]
        self.send(client, m.Release([slot], [lease.sequence + (wrong == 4)]))
        if wrong != 4:
            self.released((client, slot))

    def released(self, name: tuple[int, int]) -> None:
        """Once."""
        self.leases[name].count -= 1
        if not self.leases[name].count:
            del self.leases[name]

    @rule(client=CLIENT, ns=SPACE, keys=KEYS, timeout_s=TIMEOUTS)
    def wait(self, client: int, ns: int, keys: list[int], timeout_s: float) -> None:
        namespace, connection = self.namespaces[ns], self.connections[client]
        present = self.exist(namespace, keys)
        request = m.Wait(self.node.next_id(), namespace, [key(k) for k in keys], timeout_s)
        replies = self.send(client, request)
        if all(present) or not timeout_s > 0:
            assert replies == [m.Present(request.id, bytes(present))]
        elif sum(waiter == connection for waiter, _ in self.waits) == MAX_WAITS:
            assert [reply.code for reply in replies] == ["too_many_waiters"]  # type: ignore[union-attr]
        else:
            assert replies == []
            missing = {k for k, was in zip(keys, present, strict=True) if not was}
            until_s = self.node.now_s + timeout_s
            self.waits[connection, request.id] = OpenWait(namespace, keys, missing, until_s)

    # --- what happens meanwhile

    @rule(data=st.data(), ok=st.booleans())
    def transfer_done(self, data: st.DataObject, ok: bool) -> None:
        if self.transfers:
            self.finish(data.draw(st.sampled_from(sorted(self.transfers))), ok)

    def finish(self, tag: int, ok: bool) -> None:
        connection, _ = self.transfers.pop(tag)
        self.cancelled.discard(tag)
        if (name := self.ending.pop(tag, None)) in self.leases:
            self.released(name)
        if not ok:
            self.end(lambda held: held.tag == tag)
        for name, held in list(self.held.items()):
            if held.tag == tag and held.commit:
                self.committed(name, *held.commit)
        self.act(self.node.done(connection, tag, ok))

    def end(self, ended) -> None:  # type: ignore[no-untyped-def]
        self.held = {name: held for name, held in self.held.items() if not ended(held)}

    @rule(seconds=TIMES)
    def time(self, seconds: float) -> None:
        self.pass_time(seconds)

    def pass_time(self, seconds: float) -> list[Action]:
        now_s = self.node.now_s + seconds
        overdue = {held.tag for held in self.held.values() if held.until_s <= now_s}
        ended = {name: lease for name, lease in self.leases.items() if lease.until_s <= now_s}
        overdue |= {tag for lease in ended.values() for tag in lease.tags}
        self.ending = {tag: name for tag, name in self.ending.items() if name not in ended}
        self.end(lambda held: held.until_s <= now_s)
        self.leases = {name: lease for name, lease in self.leases.items() if name not in ended}
        actions = self.act(self.node.pass_time(seconds))
        assert overdue & self.transfers.keys() <= self.cancelled, "a transfer goes on after its time"
        assert self.node.state.next_deadline_s > self.node.now_s
        return actions

    @rule(client=CLIENT, by_peer=st.booleans(), rarely=st.integers(0, 4))
    def reconnect(self, client: int, by_peer: bool, rarely: int) -> None:
        if rarely:
            return
        old = self.connections[client]
        self.end(lambda held: held.client == client)
        self.leases = {name: lease for name, lease in self.leases.items() if name[0] != client}
        self.ending = {tag: name for tag, name in self.ending.items() if name[0] != client}
        self.waits = {name: wait for name, wait in self.waits.items() if name[0] != old}
        self.act(self.node.disconnect(old, by_peer))
        mine = {tag for tag, (connection, _) in self.transfers.items() if connection == old}
        assert mine <= self.cancelled, "transfers of a lost client are cancelled"
        self.connections[client] = self.node.connect(self.paths[client])

    @rule(client=CLIENT, ns=SPACE, k=st.integers(0, 11), wrong=st.integers(0, 2))
    def discard(self, client: int, ns: int, k: int, wrong: int) -> None:
        namespace = self.namespaces[ns]
        slot = self.node.state.store.find(namespace, key(k))
        sequence = self.node.state.store.facts.sequence[slot] + (wrong == 0) if slot >= 0 else 1
        [reply] = self.send(client, m.Discard(3, namespace, [key(k)], [sequence]))
        assert reply == m.Done(3, int(slot >= 0 and wrong != 0))
        assert slot < 0 or not wrong or self.exist(namespace, [k]) == [0]

    @rule(client=CLIENT, ns=SPACE, what=st.integers(0, 9))
    def clear(self, client: int, ns: int, what: int) -> None:
        number = self.namespaces[ns]
        if what > 1:
            return  # most of the time, so that there are pages
        self.end(lambda held: held.namespace == number)
        if what == 1:
            self.namespaces[ns] = -1
            self.send(client, m.DropNamespace(4, "ab"[ns]))
            self.namespaces[ns] = self.node.open(self.root, "ab"[ns])  # who makes one needs a token
            assert self.namespaces[ns] not in (number, self.secret)
        else:
            self.send(client, m.Clear(4, number))
            assert not any(self.exist(number, list(NUMBERS)))

    @rule(
        ns=SPACE,
        policy=st.sampled_from(POLICIES),
        ttl_s=st.sampled_from([0.0, 0.0, 7.0]),
        quota=st.sampled_from([0, 0, 8, 24]),
    )
    def configure(self, ns: int, policy: str, ttl_s: float, quota: int) -> None:
        policy = "lru" if policy == "ttl" and not ttl_s else policy
        self.settings[ns] = NamespaceSettings(policy=policy, ttl_s=ttl_s, quota_bytes=quota * KIB)
        request = PutNamespace(self.node.next_id(), "ab"[ns], self.settings[ns])
        self.act(self.node.send(self.root, request))

    @rule(client=CLIENT, what=st.integers(0, 5), keys=KEYS)
    def intrude(self, client: int, what: int, keys: list[int]) -> None:
        names, number = [key(k) for k in keys], self.secret
        request = [
            m.Exists(1, number, names),
            m.Get(1, number, names, [4 * KIB]),
            m.Reserve(1, number, names, [4 * KIB]),
            m.Wait(1, number, names, 5.0),
            m.Discard(1, number, names, [1] * len(names)),
            m.Clear(1, number),
        ][what]
        [reply] = self.send(client, request)  # type: ignore[arg-type]
        assert isinstance(reply, m.Fault)
        assert reply.code == "access_denied"

    # --- always

    @invariant()
    def the_node_counts_what_the_model_counts(self) -> None:
        if not hasattr(self, "node"):
            return
        status = self.node.status()
        assert status.pins == sum(lease.count for lease in self.leases.values())
        assert status.waiters == len(self.waits)
        for wait in self.waits.values():
            assert wait.until_s > self.node.now_s
            assert wait.missing, "a wait was not answered"
        used = status.used_bytes + status.reserved_bytes + status.quarantined_bytes
        assert status.free_bytes + used == status.capacity_bytes

    @invariant()
    def bytes_in_use_are_left_alone(self) -> None:
        """Slots in use do not overlap; a leased page keeps its filling; a transfer keeps its slot."""
        if not hasattr(self, "node"):
            return
        store = self.node.state.store
        used = [slot for slot, state in enumerate(store.states) if state not in (FREE, SWEEPING)]
        starts = {store.slots.offset(slot): store.slots.slot_bytes(slot) for slot in used}
        spans = sorted((start, start + size) for start, size in starts.items())
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert all(end <= store.slots.capacity_bytes for _, end in spans)
        assert {offset for _, offset in self.transfers.values()} <= starts.keys()
        for (_, slot), lease in self.leases.items():
            assert store.facts.sequence[slot] == lease.sequence
            assert store.state(slot) in (COMMITTED, DOOMED)
        for slot, sequence in self.held:
            assert store.facts.sequence[slot] == sequence

    def teardown(self) -> None:
        if not hasattr(self, "node"):
            return
        for connection in self.connections:
            self.act(self.node.disconnect(connection))
        for tag, (connection, _) in list(self.transfers.items()):
            self.node.done(connection, tag, False)
        for _ in range(20):  # until everything is swept
            self.node.pass_time(10)
        self.patched.undo()
        status = self.node.status()
        assert (status.reserved_bytes, status.quarantined_bytes, status.pins, status.waiters) == (0, 0, 0, 0)
        assert status.used_bytes + status.free_bytes == status.capacity_bytes
