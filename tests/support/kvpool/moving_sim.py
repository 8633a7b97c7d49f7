"""Pool nodes in simulated time: the real states of nodes and members over a network that delays, loses and
cuts, with nodes that join, drain, die and come back, and clients that each speak with one of them. A seed
determines a run.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence

from pdserve.errors import PoolRefused
from pdserve.kvpool.cluster.membership import Cluster, Update
from pdserve.kvpool.cluster.ring import Ring
from pdserve.kvpool.core import events as ev
from pdserve.kvpool.core.sharding.replicas import Replicas
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.base import NodeAddress
from pdserve.kvpool.protocol.cluster_messages import ACTIVE, LEFT, ClusterState, View
from tests.support.kvpool.cluster_sim import Timeline
from tests.support.kvpool.node_model import KIB, Node, answers, commit, key

PAGE = 4 * KIB
TIMEOUT_S = 1.0  # of a push
DETECTED_S = 0.8  # after a death
GOSSIPS = 0.3  # a tick
CHECKED_SHARE = 0.05  # of all steps of a node's state
ENDS = {m.PRESENT: ev.TAKEN, m.FULL: ev.NO_ROOM}


class SimNode:
    """One node. Its memory outlives a kill."""

    def __init__(self, sim: Sim, name: str, slabs: int) -> None:
        self.sim = sim
        self.name = name
        self.node = Node(slabs=slabs, slab_bytes=64 * KIB, follows_places=False, push_batch_bytes=6 * PAGE)
        self.node.state.name = self.node.state.sharding.ownership.name = name
        self.contents: dict[int, int] = {}  # what the bytes of a slot say
        self.connections = itertools.count(1)
        self.up = False
        self.pushes: list[ev.PushPages] = []  # under way
        self.fetches: list[ev.FetchPages] = []  # under way
        self.awaited: dict[int, Callable[[m.Reply], None]] = {}  # by connection: what the client waits for
        self.life = 0  # grows with every start and end: late messages of an earlier one are void
        self.do(ev.Connected(ev.LOCAL, "shm", "this node", 0, peer=True))

    def start(self) -> None:
        sim, self.up, self.life = self.sim, True, self.life + 1
        version = 1000 + int(sim.now_s * 1000)
        self.cluster = Cluster(
            "pool", NodeAddress(self.name, f"sim:{self.name}"), sim.rng.getrandbits(60), version
        )
        seeds = [node for node in sim.nodes.values() if node.up and node is not self]
        if seeds:
            self.cluster.receive(sim.rng.choice(seeds).cluster.whole)
        self.told: tuple[int, bool] | None = None
        self.apply(Update(own=True))
        self.tick(self.life)

    def kill(self) -> None:
        self.up, self.life = False, self.life + 1
        while self.pushes:
            push = self.pushes[0]
            self.pushed(push, bytes([ev.FAILED] * len(push.keys)))
        self.awaited.clear()
        while self.fetches:
            self.fetched(self.fetches[0], bytes([ev.FAILED] * len(self.fetches[0].keys)))
        for pin in list(self.node.state.sessions[ev.LOCAL].pins.values()):
            self.send(ev.LOCAL, m.Release([pin.slot] * pin.count, [pin.sequence] * pin.count))
        for connection in list(self.node.state.sessions):
            if connection != ev.LOCAL:
                self.do(ev.Disconnected(connection))

    # --- members

    def apply(self, update: Update) -> None:
        seen = self.cluster.epoch, self.cluster.settled
        if self.told != seen:
            self.told = seen
            view = self.cluster.view
            previous = Ring(view.previous) if view.previous else None
            self.do(ev.ViewChanged(Ring(view.nodes, view.epoch), self.cluster.settled, previous))
        if update.own:
            for other in list(self.sim.nodes.values()):
                self.tell(other)

    def tell(self, other: SimNode) -> None:
        state, life = self.cluster.whole, other.life

        def arrive() -> None:
            if other.up and other.life == life and other is not self:
                other.receive(state)

        self.sim.carry(arrive)

    def receive(self, state: ClusterState) -> None:
        self.apply(self.cluster.receive(state))

    def tick(self, life: int) -> None:
        if life != self.life:
            return
        self.node.now_s = max(self.node.now_s, 100 + self.sim.now_s)
        if self.node.state.next_deadline_s <= self.node.now_s:
            self.do(ev.Tick())
        if self.sim.rng.random() < GOSSIPS:
            self.tell(self.sim.rng.choice(list(self.sim.nodes.values())))
        self.sim.after(0.05, lambda: self.tick(life))

    # --- what the state decides

    def do(self, event: ev.Event) -> list[ev.Action]:
        self.node.now_s = max(self.node.now_s, 100 + self.sim.now_s)
        actions = self.act(self.node.state.handle(event, self.node.now_s))
        if self.sim.rng.random() < CHECKED_SHARE:
            self.node.state.check()
            self.node.state.sharding.handover.check()
        return actions

    def send(self, connection: int, message: m.Request) -> list[m.Reply]:
        return answers(self.do(ev.Received(connection, message)), connection)

    def act(self, actions: list[ev.Action]) -> list[ev.Action]:
        life = self.life
        for action in actions:
            if isinstance(action, ev.Settled):
                epoch = action.epoch

                def settle(epoch: int = epoch) -> None:
                    if life == self.life:
                        self.apply(self.cluster.settle(epoch))

                self.sim.after(0.0, settle)
            elif isinstance(action, ev.PushPages):
                self.pushes.append(action)
                if self.up:
                    Push(self, action)
            elif isinstance(action, ev.FetchPages):
                self.fetches.append(action)
                if self.up:
                    Fetch(self, action)
            elif isinstance(action, ev.Answer) and action.connection in self.awaited:
                self.awaited.pop(action.connection)(action.message)
        return actions

    def ask(self, connection: int, request: m.Request, answered: Callable[[m.Reply], None]) -> None:
        """`answered` is called with the reply, at once or later, or never if the node is killed before."""
        self.awaited[connection] = answered
        self.do(ev.Received(connection, request))

    def fetched(self, fetch: ev.FetchPages, ends: bytes, contents: Sequence[int] = ()) -> None:
        self.fetches = [other for other in self.fetches if other is not fetch]
        for slot, k in zip(fetch.slots, contents, strict=False):
            self.contents[slot] = k
        count = len(fetch.keys)
        self.do(ev.PagesFetched(fetch, ends, [7] * count, [0.0] * count))

    def pushed(self, push: ev.PushPages, ends: bytes, copied: int = 0) -> None:
        self.pushes = [other for other in self.pushes if other is not push]
        self.do(ev.PagesPushed(push, ends, copied, copied * PAGE))

    @property
    def replicas(self) -> Replicas:
        return self.node.state.sharding.replicas

    def holds(self, k: int) -> bool:
        return self.node.state.store.find(1, key(k)) >= 0

    def holds_right(self, k: int) -> bool:
        """Whether the page is here; its bytes are checked."""
        slot = self.node.state.store.find(1, key(k))
        assert slot < 0 or self.contents[slot] == k, f"{self.name} gives wrong bytes for page {k}"
        return self.up and slot >= 0


class Push:
    """One push, as the shell carries it out: two requests to the other node, either of which, or its answer,
    may be lost.
    """

    def __init__(self, source: SimNode, push: ev.PushPages) -> None:
        self.source, self.push, self.life = source, push, source.life
        self.target = source.sim.nodes[push.node]
        self.target_life = self.target.life
        self.connection = 0
        self.ends = dict.fromkeys(push.keys, ev.FAILED)
        self.pins: list[m.Pin] = []
        self.copied = 0
        self.over = False
        source.sim.after(TIMEOUT_S, self.end)
        self.step(self.reserve)

    def step(self, work: Callable[[], None]) -> None:
        def arrive() -> None:
            lives = self.life == self.source.life and self.target.up and self.target_life == self.target.life
            if lives and not self.over:
                work()

        self.source.sim.carry(arrive)

    def reserve(self) -> None:
        self.connection = next(self.target.connections) + 1000 * self.target.life
        peer = ev.Connected(self.connection, "shm", f"node {self.source.name}", 1, peer=True)
        self.target.do(peer)
        push = self.push
        [opened] = self.target.send(self.connection, m.OpenNamespace(1, "ns", {}, 0))
        assert isinstance(opened, m.Opened)
        request = m.Reserve(2, opened.namespace, push.keys, push.lengths[:1], push.replica, push.written)
        [reserved] = self.target.send(self.connection, request)
        assert isinstance(reserved, m.Reserved)
        self.step(lambda: self.reserved(reserved.grants))

    def reserved(self, grants: list[m.Grant]) -> None:
        """At the source."""
        granted = {k: g for k, g in zip(self.push.keys, grants, strict=True) if g.status == m.GRANTED}
        self.ends |= {k: ENDS.get(g.status, ev.LATER) for k, g in zip(self.push.keys, grants, strict=True)}
        if not granted:
            self.end()
            return
        self.ends |= dict.fromkeys(granted, ev.FAILED)
        [got] = self.source.send(
            ev.LOCAL, m.Get(3, self.push.namespace, list(granted), self.push.lengths[:1])
        )
        assert isinstance(got, m.Got)
        self.pins = [pin for pin in got.pins if pin.status == m.HIT]
        self.ends |= {k: ev.GONE for k, p in zip(granted, got.pins, strict=True) if p.status != m.HIT}
        pairs = [(k, g, p) for (k, g), p in zip(granted.items(), got.pins, strict=True) if p.status == m.HIT]
        unused = [g for g, p in zip(granted.values(), got.pins, strict=True) if p.status != m.HIT]
        self.step(lambda: self.fill(pairs, unused))

    def fill(self, pairs: list[tuple[bytes, m.Grant, m.Pin]], unused: list[m.Grant]) -> None:
        """At the target."""
        for _, grant, pin in pairs:
            self.target.contents[grant.slot] = self.source.contents[pin.slot]
        if unused:
            abort = m.Abort([grant.slot for grant in unused], [grant.sequence for grant in unused])
            self.target.send(self.connection, abort)
        if pairs:
            grants = [grant for _, grant, _ in pairs]
            keys = [k for k, _, _ in pairs]
            self.target.ask(self.connection, commit(4, *grants), lambda reply: self.answered(keys, reply))
        else:
            self.step(lambda: self.committed([], b""))

    def answered(self, keys: list[bytes], reply: m.Reply) -> None:
        """At the target, which may not own the pages any more, and has handed them on then."""
        if isinstance(reply, m.Committed):
            self.step(lambda: self.committed(keys, reply.mask))

    def committed(self, keys: list[bytes], mask: bytes) -> None:
        """At the source."""
        self.ends |= {k: ev.TAKEN if ok else ev.LATER for k, ok in zip(keys, mask, strict=True)}
        self.copied = sum(mask)
        self.end()

    def end(self) -> None:
        if self.over:
            return
        self.over = True
        if self.connection and self.target_life == self.target.life:
            self.target.do(ev.Disconnected(self.connection))
        if self.life != self.source.life:
            return
        if self.pins:
            release = m.Release([pin.slot for pin in self.pins], [pin.sequence for pin in self.pins])
            self.source.send(ev.LOCAL, release)
        ends = bytes(self.ends[k] for k in self.push.keys)
        self.source.pushed(self.push, ends, self.copied)


class Fetch:
    """One fetch, as the shell carries it out: a request to the other node and its answer, either of which may
    be lost.
    """

    def __init__(self, source: SimNode, fetch: ev.FetchPages) -> None:
        self.source, self.fetch, self.life, self.over = source, fetch, source.life, False
        self.target = source.sim.nodes[fetch.node]
        source.sim.after(TIMEOUT_S, lambda: self.end(bytes([ev.FAILED] * len(fetch.keys)), []))
        source.sim.carry(self.read)

    def read(self) -> None:
        """At the target."""
        target, fetch = self.target, self.fetch
        if self.over or not target.up:
            return
        connection = next(target.connections) + 1000 * target.life
        target.do(ev.Connected(connection, "shm", f"node {self.source.name}", 1, peer=True))
        [opened] = target.send(connection, m.OpenNamespace(1, "ns", {}, 0))
        assert isinstance(opened, m.Opened)
        [got] = target.send(connection, m.Get(2, opened.namespace, fetch.keys, [fetch.length_bytes]))
        assert isinstance(got, m.Got)
        ends = bytes(ev.TAKEN if pin.status == m.HIT else ev.GONE for pin in got.pins)
        contents = [target.contents.get(pin.slot, -1) for pin in got.pins]
        target.do(ev.Disconnected(connection))
        self.source.sim.carry(lambda: self.end(ends, contents))

    def end(self, ends: bytes, contents: list[int]) -> None:
        if not self.over and self.life == self.source.life:
            self.source.fetched(self.fetch, ends, contents)
        self.over = True


class Sim(Timeline):
    """`loss`: the share of messages that are lost."""

    def __init__(self, seed: int, nodes: int, *, loss: float = 0.0, slabs: int = 16) -> None:
        super().__init__(seed)
        self.loss = 0.0
        self.nodes: dict[str, SimNode] = {}
        self.written: set[int] = set()
        self.steady: set[int] = set()  # written while nothing moved: to be found at any moment from then on
        self.reads = self.missed = 0
        self._slabs = slabs
        self._last_key = 0
        for _ in range(nodes):
            self.join()
        self.settle()
        self.loss = loss

    def carry(self, work: Callable[[], None]) -> None:
        if self.rng.random() >= self.loss:
            self.after(0.001 + 0.05 * self.rng.random() ** 3, work)

    # --- what happens to nodes

    @property
    def up(self) -> list[SimNode]:
        return [node for node in self.nodes.values() if node.up]

    @property
    def active(self) -> list[SimNode]:
        return [node for node in self.up if node.cluster.me.status == ACTIVE]

    def join(self) -> SimNode:
        node = self.nodes[f"n{len(self.nodes)}"] = SimNode(self, f"n{len(self.nodes)}", self._slabs)
        node.start()
        return node

    def drain(self, node: SimNode) -> None:
        with contextlib.suppress(PoolRefused):  # it is the last
            node.apply(node.cluster.leave())

    def kill(self, node: SimNode) -> None:
        """Its pages are lost, where no other node has them, until it comes back."""
        node.kill()
        for other in self.up:
            life = other.life

            def notice(other: SimNode = other, life: int = life) -> None:
                member = other.cluster.members.get(node.name)
                if member is not None and not node.up and life == other.life:
                    other.apply(other.cluster.declare_dead(node.name, member.version))

            self.after(DETECTED_S * (0.5 + self.rng.random()), notice)
        self.written -= {k for k in self.written if node.holds(k)}  # others may drop it
        self.steady.clear()  # those who do not know of the death yet may ask it

    # --- clients

    def write(self, count: int) -> None:
        """Clients of some nodes write; the commits come later."""
        for _ in range(count if self.up else 0):
            self._last_key += 1
            self._write_one(self.rng.choice(self.up), self._last_key)

    def _write_one(self, node: SimNode, k: int) -> None:
        client, life, still = next(node.connections) + 1000 * node.life, node.life, self.still
        node.do(ev.Connected(client, "shm", "client", 1))
        node.send(client, m.OpenNamespace(1, "ns", {}, 0))
        [reserved] = node.send(client, m.Reserve(2, 1, [key(k)], [PAGE]))
        assert isinstance(reserved, m.Reserved)
        [grant] = reserved.grants

        def committed(reply: m.Reply) -> None:
            if isinstance(reply, m.Committed) and reply.mask == b"\1":
                self.written.add(k)
                if still and self.still:
                    self.steady.add(k)
            self.after(0.0, lambda: node.do(ev.Disconnected(client)) if node.life == life else None)

        def commit_it() -> None:
            if node.life == life and grant.status == m.GRANTED:
                node.contents[grant.slot] = k
                node.ask(client, commit(3, grant), committed)

        if still:
            commit_it()
        else:
            self.after(self.rng.random(), commit_it)

    def read(self, count: int) -> None:
        """Clients of some nodes read pages that must be found."""
        for k in self.rng.sample(sorted(self.steady), min(count, len(self.steady))) if self.up else ():
            self._read_one(self.rng.choice(self.up), k)

    def _read_one(self, node: SimNode, k: int) -> None:
        client, life = next(node.connections) + 1000 * node.life, node.life
        node.do(ev.Connected(client, "shm", "client", 1))
        node.send(client, m.OpenNamespace(1, "ns", {}, 0))

        def got(reply: m.Reply) -> None:
            assert isinstance(reply, m.Got)
            [pin] = reply.pins
            self.reads += 1
            self.missed += pin.status == m.MISS
            right = pin.status == m.MISS or node.contents[pin.slot] == k
            assert right, f"{node.name} gives wrong bytes for page {k}"
            self.after(0.0, lambda: node.do(ev.Disconnected(client)) if node.life == life else None)

        node.ask(client, m.Get(2, 1, [key(k)], [PAGE]), got)

    @property
    def still(self) -> bool:
        """Whether all nodes know that nothing moves."""
        return len({node.cluster.epoch for node in self.up}) == 1 and all(n.cluster.settled for n in self.up)

    def _found(self, k: int, view: View) -> bool:
        """Whether the owner has it, or the one before."""
        rings = [Ring(view.nodes), *([Ring(view.previous)] if view.previous else [])]
        return any(self.nodes[ring.owner(key(k)).node].holds_right(k) for ring in rings if ring.nodes)

    def check(self) -> None:
        """Some of the pages that must be found are where a node looks for them, under a view it has now."""
        if self.steady and self.up and self.rng.random() < 0.2:
            view = self.rng.choice(self.up).cluster.view
            for k in self.rng.sample(sorted(self.steady), min(3, len(self.steady))):
                assert self._found(k, view), f"page {k} is not found at {self.now_s:.3f} s"

    # --- the end

    def settle(self, limit_s: float = 60.0) -> None:
        """Run until nothing moves and nothing is left to drop."""
        end_s = self.now_s + limit_s
        while not self.at_rest:
            assert self.now_s < end_s, f"it does not settle: {[n.node.status().counters for n in self.up]}"
            self.run(0.1)
        self.run(4.0)  # until the last client has its answer
        if not self.at_rest:
            self.settle(limit_s)

    @property
    def at_rest(self) -> bool:
        return self.still and all(
            node.node.state.sharding.ownership.next_step_s == float("inf") for node in self.up
        )

    def check_all(self) -> None:
        """Every page is at its owner, and elsewhere as a replica only; drained nodes have left."""
        [view] = {node.cluster.view.epoch: node.cluster.view for node in self.up}.values()
        ring = Ring(view.nodes, view.epoch)
        for k in sorted(self.written):
            owner = ring.owner(key(k)).node
            others = [node for node in self.up if node.holds(k) and node.name != owner]
            assert all(node.node.state.store.find(1, key(k)) in node.replicas for node in others)
            assert self.nodes[owner].holds_right(k), f"page {k} of {owner}"
        for node in self.up:
            assert node.cluster.me.status in (ACTIVE, LEFT)
            report = node.node.status()
            assert report.reserved_bytes == report.pins == 0
