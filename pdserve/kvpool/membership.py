"""Who is in the pool, without consensus: a state that any two nodes merge to the same result. Pure.

Pages are immutable and a cache may miss, so nodes need not agree at every moment; they must end up agreeing.
The state is a join-semilattice (Shapiro et al., "Conflict-free Replicated Data Types", 2011): `merge` is
commutative, associative and idempotent, so it does not matter in which order, how often, or by which way news
arrives, and a part of a state is as good as a whole one.

**Members.** Each node has one record. Of two, the one with the larger `version` is newer. A node changes its
own record by raising the version; others change it in one way only: they declare it dead. Equal versions
(a node leaves while another declares it dead) are ordered by incarnation, status, and encoding.

    from      to        by         when
    -         ACTIVE    itself     it starts
    ACTIVE    LEAVING   itself     it was asked to drain
    LEAVING   LEFT      itself     every ACTIVE member has settled
    ACTIVE    DEAD      another    nobody could reach it (detector.py)
    LEAVING   DEAD      another    the same
    DEAD      as it was itself     it hears that it is dead, and is not
    any       ACTIVE    itself     it starts anew

**Versions** start at the clock's millisecond, so that a node that starts is newer than its own past even
where nobody is left to tell; and a node that hears of a record of itself that is not its own goes one above
that. Seconds would not do: a node that is found dead and starts again within one could take the very version
that its death had, and two different states would have one epoch.
So nothing of this needs a file: what a node forgets, the others know.

**Epoch** of a state is the sum of its members' versions. It grows with every change, is equal for equal
states, and of two states one of which includes the other the larger epoch is the newer.

**Forgetting.** Names would pile up where every new node has a new one. The *stamp* of a record is its
version, or `renewed` if that is later: living members renew theirs now and then, which changes nothing else.
A state has a `horizon`, of which merging takes the larger, and no record whose stamp is below it: "older than
that and not here" means gone for good. So late news of a forgotten node are older than the horizon, and no
news.
Whoever raises the horizon keeps it below the stamps of all members that live as far as it knows. One that
lives all the same, cut off for longer than nodes are remembered, finds itself forgotten when it hears of the
others, and says anew that it is there, as after a false death.
The versions of what is forgotten go into `folded`, so that the epoch never falls: each state of a merge
first folds what it must forget, then the larger sum counts. Two states that forgot different nodes thus
agree, on an epoch that is at least that of either.

**Settling.** A change of the ring moves pages: a new owner pulls what it lacks. It says so by `settled`, the
epoch for which it has everything. `settled` is no change of the record, only grows, and raises no epoch. Once
all ACTIVE members have settled, their ring is the `stable` one; until then the view names the stable ring's
nodes as `previous`, where a page may still be. A member that is dead, or has left, is not in `previous`:
nothing can be read from it, and the rest of a consistent-hash ring stays as it was.

**Namespaces.** Their records travel in the same state; registry.py says how two of one name are joined, and
how those are forgotten that were dropped: a day after this node learnt of it, or sooner if there are many.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec.structs import replace

from pdserve.errors import FrameError, PoolRefused
from pdserve.kvpool.cluster_messages import (
    ACTIVE,
    DEAD,
    LEAVING,
    LEFT,
    ClusterState,
    Member,
    NamespaceRecord,
    View,
)
from pdserve.kvpool.namespace_settings import MAX_COUNT, check_record
from pdserve.kvpool.registry import (
    FLOORS,
    MAX_REGISTRY_BYTES,
    Dropped,
    Floors,
    NamespaceError,
    above,
    highest,
    join,
)
from pdserve.kvpool.ring import MAX_WEIGHT_SUM
from pdserve.kvpool.wire import Message, NodeAddress

MAX_MEMBERS: Final = 1024  # known at a time; at 100 bytes each they fit a frame many times
MAX_GONE: Final = 256  # members that are gone; when there are more, they are forgotten sooner
FORGET_MS: Final = 24 * 3600 * 1000
FORGET_SOONER_MS: Final = 600 * 1000
RENEWALS: Final = 4  # in the time after which members are forgotten
MAX_HORIZON: Final = 1 << 42  # the clock's milliseconds in the year 2109
MAX_VERSION: Final = 1 << 52  # leaves room for the sum of all in 63 bits
MAX_ADDRESS_CHARS: Final = 256
MAX_NAMESPACE_BYTES: Final = 2 * MAX_REGISTRY_BYTES  # encoded; several nodes may have added some at once

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # as in PoolNodeConfig

_encoder = msgspec.msgpack.Encoder(order="sorted")


def merge(a: ClusterState, b: ClusterState) -> ClusterState:
    """What both know. The lists come out ordered by name. Raises ValueError: two different clusters."""
    if a.cluster != b.cluster:
        raise ValueError(f"states of two clusters, '{a.cluster}' and '{b.cluster}'")
    members: dict[str, Member] = {}
    horizon = max(a.horizon, b.horizon)
    for member in (*a.members, *b.members):
        known = members.get(member.node)
        members[member.node] = member if known is None else newer_member(known, member)
    for name in [name for name, member in members.items() if _stamp(member) < horizon]:
        del members[name]
    namespaces: dict[str, NamespaceRecord] = {}
    for record in (*a.namespaces, *b.namespaces):
        other = namespaces.get(record.name)
        namespaces[record.name] = record if other in (None, record) else join(other, record)
    stable_epoch, stable = max(
        ((state.stable_epoch, state.stable) for state in (a, b)),
        key=lambda ring: (ring[0], encoded(ring[1])),
    )
    floors = highest(a.floors, b.floors)
    return ClusterState(
        a.cluster,
        [members[name] for name in sorted(members)],
        above((namespaces[name] for name in sorted(namespaces)), floors),
        stable_epoch,
        stable,
        horizon,
        max(_folded(a, members), _folded(b, members)),
        floors,
    )


def _folded(state: ClusterState, kept: Container[str]) -> int:
    """The state's `folded` once it has forgotten all but these. One that it takes for living counts as if it
    had died, because the ring changes.
    """
    gone = [member for member in state.members if member.node not in kept]
    return state.folded + sum(member.version + (member.status < LEFT) for member in gone)


def _stamp(member: Member) -> int:
    return max(member.version, member.renewed)


def newer_member(a: Member, b: Member) -> Member:
    """The newer of two records of one node, with what either knows of its settling."""
    if a == b:
        return a
    newer = max(a, b, key=_member_order)
    settled = newer.settled
    if (a.version, a.incarnation) == (b.version, b.incarnation):
        settled = max(a.settled, b.settled)
    renewed = max(a.renewed, b.renewed)
    if renewed <= newer.version:
        renewed = 0  # one way to say it
    if (settled, renewed) == (newer.settled, newer.renewed):
        return newer
    return replace(newer, settled=settled, renewed=renewed)


def _member_order(member: Member) -> tuple[int, int, int, str, int]:
    """All of the record but `settled` and `renewed`, which have an order of their own."""
    return (member.version, member.incarnation, member.status, member.address, member.weight)


def encoded(value: Message | Iterable[Message]) -> bytes:
    """The same bytes in every process: maps are ordered by key."""
    return _encoder.encode(value)


def epoch_of(state: ClusterState) -> int:
    """The larger of two states' is the newer state's."""
    return state.folded + sum(member.version for member in state.members)


def owners_of(members: Iterable[Member]) -> list[NodeAddress]:
    """The ring's nodes: the ACTIVE ones, by name. Weights that add up to more than a ring can hold are halved
    until they fit, at least 1 each.
    """
    active = sorted((member for member in members if member.status == ACTIVE), key=lambda m: m.node)
    weights = [member.weight for member in active]
    while sum(weights) > MAX_WEIGHT_SUM:
        weights = [max(1, weight // 2) for weight in weights]
    return [
        NodeAddress(member.node, member.address, weight)
        for member, weight in zip(active, weights, strict=True)
    ]


def check_state(state: ClusterState) -> None:
    """Raises FrameError when another node's state would do harm: nothing in it that no node could have said.

    Whoever sent a member sent all others that he knew of, so no epoch in it is above its own.
    """
    if len(state.members) > MAX_MEMBERS:
        raise FrameError(f"a state of {len(state.members)} members, at most {MAX_MEMBERS} are allowed")
    epoch = epoch_of(state)
    for member in state.members:
        good = (
            _good_node(member)
            and 0 <= member.version <= MAX_VERSION
            and 0 <= member.incarnation < 1 << 63
            and 0 <= member.settled <= epoch
            and 0 <= member.renewed <= MAX_VERSION
            and _stamp(member) >= state.horizon
            and ACTIVE <= member.status <= DEAD
        )
        if not good:
            raise FrameError(f"an impossible member of the pool: {member}")
    if not 0 <= state.horizon <= MAX_HORIZON or not 0 <= state.folded < 1 << 62:
        raise FrameError("an impossible horizon")
    buckets = [bucket for bucket, _ in state.floors]
    good = all(0 <= bucket < FLOORS and 0 < floor < MAX_COUNT // 2 for bucket, floor in state.floors)
    if not good or buckets != sorted(set(buckets)):
        raise FrameError("impossible floors of namespaces")
    for record in state.namespaces:
        try:
            check_record(record)
        except NamespaceError as error:
            raise FrameError(f"an impossible namespace: {error}") from error
    ring = state.stable
    good = 0 <= state.stable_epoch <= epoch and all(map(_good_node, ring))
    if (
        not good
        or len({node.node for node in ring}) < len(ring)
        or sum(n.weight for n in ring) > MAX_WEIGHT_SUM
    ):
        raise FrameError("an impossible stable ring")


def _good_node(node: Member | NodeAddress) -> bool:
    return (
        _NAME.fullmatch(node.node) is not None
        and 0 < len(node.address) <= MAX_ADDRESS_CHARS
        and node.address.isprintable()
        and 1 <= node.weight <= MAX_WEIGHT_SUM
    )


def parts(state: ClusterState, limit_bytes: int) -> Iterator[ClusterState]:
    """The state in pieces that fit a frame: each has all members, and namespaces of about `limit_bytes`."""
    namespaces: list[NamespaceRecord] = []
    size = 0
    for record in state.namespaces:
        record_bytes = len(encoded(record))
        if namespaces and size + record_bytes > limit_bytes:
            yield replace(state, namespaces=namespaces)
            namespaces, size = [], 0
        namespaces.append(record)
        size += record_bytes
    yield replace(state, namespaces=namespaces)


@dataclass(frozen=True)
class Update:
    """What a change of the state amounts to."""

    members: tuple[Member, ...] = ()  # whose records changed, as they are now
    namespaces: tuple[NamespaceRecord, ...] = ()
    view: View | None = None  # the new one, if it changed
    own: bool = False  # this node changed something by itself: the others must hear of it
    rival: Member | None = None  # a record of this node's name that is not its own
    forgotten: tuple[str, ...] = ()  # namespaces
    floors: Floors | None = None  # the new ones, if they changed

    def __bool__(self) -> bool:
        return bool(self.members or self.namespaces or self.floors or self.view or self.own)


class Cluster:
    """What one node knows, and its own record, which nobody else may decide.

    `first_version` is the clock's millisecond at the node's start. Every change returns an Update.
    """

    def __init__(self, cluster: str, node: NodeAddress, incarnation: int, first_version: int) -> None:
        me = Member(node.node, node.address, node.weight, incarnation, first_version)
        self.name = node.node
        self.state = ClusterState(cluster, [me], [])
        self._members = {me.node: me}
        self._namespaces: dict[str, NamespaceRecord] = {}
        self._digests: dict[str, tuple[NamespaceRecord, bytes, int]] = {}  # and how long it is encoded
        self._namespace_bytes = 0
        self._dropped = Dropped(FORGET_MS, FORGET_SOONER_MS, MAX_GONE)
        self._look()

    # --- what is known

    @property
    def me(self) -> Member:
        """This node's own record."""
        return self._members[self.name]

    @property
    def members(self) -> dict[str, Member]:
        """All that are remembered, by name. Not to be changed."""
        return self._members

    @property
    def namespaces(self) -> dict[str, NamespaceRecord]:
        """By name. Not to be changed."""
        return self._namespaces

    @property
    def settled(self) -> bool:
        """Whether all owners have what they own."""
        return _settled(self._members.values(), self.epoch)

    def alive(self) -> list[Member]:
        """The members that are up, this one too."""
        return [member for member in self._members.values() if member.status in (ACTIVE, LEAVING)]

    # --- changes

    def receive(self, other: ClusterState) -> Update:
        """Take in what another node knows. Raises FrameError, and takes nothing, if it cannot be true, or
        would be too much.
        """
        if other.cluster != self.state.cluster:
            raise FrameError(f"news of cluster '{other.cluster}', this is '{self.state.cluster}'")
        if not (other.members or other.namespaces or other.stable):
            return Update()
        check_state(other)
        merged = merge(self.state, other)
        if len(merged.members) > MAX_MEMBERS:
            raise FrameError(f"more than {MAX_MEMBERS} nodes were in the pool lately: give nodes fixed names")
        if self._added_bytes(merged) + self._namespace_bytes > MAX_NAMESPACE_BYTES:
            raise FrameError(f"namespaces of more than {MAX_NAMESPACE_BYTES >> 20} MiB")
        me = self.me
        claimed = next((member for member in merged.members if member.node == self.name), None)
        if claimed is None:  # cut off for so long that it is forgotten
            claimed = replace(me, version=max(me.version, merged.horizon) + 1, renewed=0)
            members = sorted([*merged.members, claimed], key=lambda member: member.node)
            return self._become(replace(merged, members=members))
        if _member_order(claimed) != _member_order(me) and me.status != LEFT:
            # somebody is wrong about this node
            merged = _replaced(merged, replace(me, version=claimed.version + 1))
        update = self._become(merged, own=False)
        if claimed.incarnation != me.incarnation and claimed.status in (ACTIVE, LEAVING):
            return dataclasses.replace(update, rival=claimed)
        return update

    def declare_dead(self, node: str, version: int) -> Update:
        """Nobody could reach the node. Nothing happens if its record is not of this version any more."""
        member = self._members.get(node)
        alive = member is not None and member.version == version and member.status in (ACTIVE, LEAVING)
        if member is None or not alive or node == self.name:
            return Update()
        return self._become(_replaced(self.state, replace(member, version=version + 1, status=DEAD)))

    def leave(self) -> Update:
        """Own nothing any more, and be LEFT once the others have pulled what is here. Raises PoolRefused when
        there is nobody to take it.
        """
        if self.me.status != ACTIVE:
            return Update()
        if not any(member.status == ACTIVE for member in self._members.values() if member.node != self.name):
            raise PoolRefused(f"node {self.name} is the last of the pool: there is none to take its pages")
        return self._become(
            _replaced(self.state, replace(self.me, version=self.me.version + 1, status=LEAVING))
        )

    def quit(self) -> Update:
        """The node stops; the others need not find out."""
        return self._become(_replaced(self.state, replace(self.me, version=self.me.version + 1, status=LEFT)))

    def settle(self, epoch: int) -> Update:
        """This node has all that it owns under the ring of `epoch`."""
        if not self.me.settled < epoch <= self.epoch:
            return Update()
        return self._become(_replaced(self.state, replace(self.me, settled=epoch)))

    def tidy(self, now_ms: int, kept: Container[str] = ()) -> Update:
        """Forget members that have been gone for long; where there are any, renew this node's own record, so
        that others can. Forget namespaces that were dropped long ago, but for those `kept`. To be called now
        and then.
        """
        floors = self._dropped.due(self.state.namespaces, now_ms, kept)
        state, me = self._above(floors) if floors else self.state, self.me
        gone = [member for member in state.members if member.status in (LEFT, DEAD)]
        if not gone or me.status not in (ACTIVE, LEAVING):
            return Update() if state is self.state else self._become(state)
        after_ms = FORGET_MS if len(gone) <= MAX_GONE else FORGET_SOONER_MS
        if now_ms - _stamp(me) >= after_ms // RENEWALS:
            state = _replaced(state, replace(me, renewed=now_ms))
        living = min(_stamp(member) for member in state.members if member.status in (ACTIVE, LEAVING))
        horizon = min(now_ms - after_ms, living, MAX_HORIZON)
        if any(_stamp(member) < horizon for member in gone):
            state = merge(state, ClusterState(state.cluster, [], [], horizon=horizon))
        return self._become(state)

    def _above(self, floors: Floors) -> ClusterState:
        return merge(self.state, ClusterState(self.state.cluster, [], [], floors=floors))

    def raise_floors(self, floors: Floors) -> Update:
        """What this node knew before its start."""
        return self._become(self._above(floors))

    def publish(self, record: NamespaceRecord) -> Update:
        """Make a namespace's record known; an older one than what is known changes nothing."""
        return self._become(merge(self.state, ClusterState(self.state.cluster, [], [record])))

    # --- inside

    def _become(self, state: ClusterState, *, own: bool = True) -> Update:
        state = self._follow(state)
        if state == self.state:
            return Update()
        old_members, old_namespaces, old_view, old_me = self._members, self._namespaces, self.view, self.me
        old_floors, self.state = self.state.floors, state
        self._members = {member.node: member for member in state.members}
        self._namespaces = {record.name: record for record in state.namespaces}
        self._look()
        return Update(
            tuple(m for m in state.members if old_members.get(m.node) != m),
            tuple(r for r in state.namespaces if old_namespaces.get(r.name) != r),
            self.view if self.view != old_view else None,
            own or self.me != old_me,
            forgotten=tuple(name for name in old_namespaces if name not in self._namespaces),
            floors=state.floors if state.floors != old_floors else None,
        )

    def _follow(self, state: ClusterState) -> ClusterState:
        """What this node concludes at once from a new state."""
        mine = next(member for member in state.members if member.node == self.name)
        epoch = epoch_of(state)
        if self.me.settled >= self.epoch and mine.settled < epoch and self._same_owners(state):
            mine = replace(mine, settled=epoch)  # nothing moved: what was complete still is
            state = _replaced(state, mine)
        if not _settled(state.members, epoch):
            return state
        owners = owners_of(state.members)
        if epoch > state.stable_epoch and owners:
            state = replace(state, stable_epoch=epoch, stable=owners)
        others_up = any(m.status in (ACTIVE, LEAVING) for m in state.members if m.node != self.name)
        if mine.status == LEAVING and others_up:
            state = _replaced(state, replace(mine, version=mine.version + 1, status=LEFT))
        return state

    def _same_owners(self, state: ClusterState) -> bool:
        """Whether the ACTIVE members are the same, and none of them was away in between."""
        return _owners(state) == _owners(self.state)

    def _look(self) -> None:
        """Work out what follows from the state."""
        self.epoch = epoch_of(self.state)
        self.digest = self._digest()
        owners = owners_of(self._members.values())
        previous: list[NodeAddress] = []
        if not self.settled:
            up = {member.node: member for member in self.alive()}
            previous = [replace(n, address=up[n.node].address) for n in self.state.stable if n.node in up]
        self.view = View(0, self.epoch, owners, previous if previous != owners else [])

    def _digest(self) -> bytes:
        """Of all that is known. Namespaces are large and seldom change: theirs are remembered."""
        digests = {}
        for record in self.state.namespaces:
            known = self._digests.get(record.name)
            if known is None or known[0] is not record:
                text = encoded(record)
                known = record, _digest_of(text), len(text)
            digests[record.name] = known
        self._digests = digests
        self._namespace_bytes = sum(size for _, _, size in digests.values())
        rest = encoded(replace(self.state, namespaces=[]))
        return _digest_of(rest + b"".join(digest for _, digest, _ in digests.values()))

    def _added_bytes(self, state: ClusterState) -> int:
        """By how much its namespaces are longer than those known now."""
        new = [record for record in state.namespaces if self._namespaces.get(record.name) is not record]
        old = [self._digests[record.name][2] for record in new if record.name in self._digests]
        return sum(len(encoded(record)) for record in new) - sum(old)


def _owners(state: ClusterState) -> list[Member]:
    """Without what says nothing of who owns what."""
    return [replace(m, settled=0, renewed=0) for m in state.members if m.status == ACTIVE]


def _digest_of(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


def _settled(members: Iterable[Member], epoch: int) -> bool:
    return all(member.settled >= epoch for member in members if member.status == ACTIVE)


def _replaced(state: ClusterState, member: Member) -> ClusterState:
    return replace(state, members=[member if m.node == member.node else m for m in state.members])
