"""The members of the pool, without consensus: any two nodes merge their states to the same result. Pure.

Pages are immutable, and a cache may miss. So nodes need not agree at every moment; they must agree in the
end. The state is a join-semilattice (Shapiro et al., "Conflict-free Replicated Data Types", 2011): `merge` is
commutative, associative and idempotent. So news may arrive in any order, several times, on any path, in
parts.

**Members.** Each node has one record. Of two, the one with the larger `version` is newer. A node changes its
own record by raising the version. Other nodes change it in one way only: they declare it dead. Equal versions
(a node leaves while another declares it dead) are ordered by incarnation, status, and encoding.

    from      to        by         when
    -         ACTIVE    itself     it starts
    ACTIVE    LEAVING   itself     it was asked to drain
    LEAVING   LEFT      itself     every living member has settled, itself included
    LEAVING   ACTIVE    itself     no member is ACTIVE any more: no node can take its pages
    ACTIVE    DEAD      another    no node could reach it (failure_detector.py)
    LEAVING   DEAD      another    the same
    DEAD      as before itself     it learns that it was declared dead
    any       ACTIVE    itself     it starts; after an upgrade it has the status from before

**Versions** start at the clock's millisecond: so a node that starts is newer than its own past, also where no
other node is left to say so. A node that sees a wrong record of itself takes the next higher version. Seconds
would be too coarse: a node that is declared dead and restarts within a second could take the version of its
death, and two different states would have one epoch. No file is needed: what a node forgets, other nodes
know.

**Epoch** of a state is the sum of its members' versions. It grows with every change, and equal states have
equal epochs. Of two states, one of which includes the other, the larger epoch is newer.

**Forgetting.** Where every new node has a new name, records would pile up. The *stamp* of a record is its
version, or `renewed` if that is later; living members renew theirs now and then. A state has a `horizon`, and
no record with a stamp below it; merging takes the larger horizon. So late news of a forgotten node are below
the horizon, and are ignored. A node keeps the horizon below the stamps of all members that it knows to be
alive. A member that was cut off for longer finds itself forgotten, and joins again, as after a false death.

The versions of forgotten members are added to `folded`, so that the epoch never falls. In a merge each state
first folds what it must forget, then the larger sum counts. So two states that forgot different nodes agree
on an epoch that is at least that of either.

**Settling.** A change of the ring moves pages: whoever has a page pushes it to its new owner. `settled` in a
node's record is the epoch for which it has nothing left that others own. `settled` only grows, and does not
count as a change of the record. Once all living members have settled, those that leave too, the ring of the
ACTIVE ones is the `stable` one. Until then the view names the stable ring's nodes as `previous`, where a page
may still be. Members that are dead or have left are not in `previous`: nothing can be read from them, and the
rest of the ring stays as it was.

Nodes send the records of namespaces along with this state; namespaces/registry.py joins them.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator
from typing import Final

import msgspec
from msgspec.structs import replace

from pdserve.errors import FrameError
from pdserve.kvpool.cluster.ring import MAX_WEIGHT
from pdserve.kvpool.namespaces.registry import NamespaceError, check_record
from pdserve.kvpool.protocol.base import Message, NodeAddress
from pdserve.kvpool.protocol.cluster_messages import (
    ACTIVE,
    DEAD,
    LEFT,
    MAX_MEMBERS,
    ClusterState,
    Member,
    NamespaceRecord,
)

MAX_HORIZON: Final = 1 << 42  # the clock's milliseconds in the year 2109
MAX_VERSION: Final = 1 << 52  # leaves room for the sum of all in 63 bits
MAX_FOLDED: Final = 1 << 62
MAX_FORGOTTEN: Final = 1 << 21  # members; each adds a version, that is a time, to `folded`
AHEAD_MS: Final = 24 * 3600 * 1000  # by which clocks may differ
MAX_ADDRESS_CHARS: Final = 256
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # as in PoolNodeConfig

_encoder = msgspec.msgpack.Encoder(order="sorted")


def merge(a: ClusterState, b: ClusterState) -> ClusterState:
    """The members on which two nodes agree, ordered by name. Raises ValueError for two clusters."""
    if a.cluster != b.cluster:
        raise ValueError(f"states of two clusters, '{a.cluster}' and '{b.cluster}'")
    members: dict[str, Member] = {}
    horizon = max(a.horizon, b.horizon)
    for member in (*a.members, *b.members):
        known = members.get(member.node)
        members[member.node] = member if known is None else newer_member(known, member)
    for name in [name for name, member in members.items() if stamp(member) < horizon]:
        del members[name]
    stable_epoch, stable = max(
        ((state.stable_epoch, state.stable) for state in (a, b)),
        key=lambda ring: (ring[0], encoded(ring[1])),
    )
    return ClusterState(
        a.cluster,
        [members[name] for name in sorted(members)],
        [],
        stable_epoch,
        stable,
        horizon,
        max(_folded(a, members), _folded(b, members)),
    )


def _folded(state: ClusterState, kept: Container[str]) -> int:
    """The state's `folded` after it forgets all members but `kept`. A member that it takes for living counts
    as if it had died, because the ring changes.
    """
    gone = [member for member in state.members if member.node not in kept]
    return state.folded + sum(member.version + (member.status < LEFT) for member in gone)


def stamp(member: Member) -> int:
    return max(member.version, member.renewed)


def newer_member(a: Member, b: Member) -> Member:
    """The newer of two records of one node, with the later `settled` and `renewed` of both."""
    if a == b:
        return a
    newer = max(a, b, key=member_order)
    settled = newer.settled
    if (a.version, a.incarnation) == (b.version, b.incarnation):
        settled = max(a.settled, b.settled)
    renewed = max(a.renewed, b.renewed)
    if renewed <= newer.version:
        renewed = 0  # equal states must have equal encodings
    if (settled, renewed) == (newer.settled, newer.renewed):
        return newer
    return replace(newer, settled=settled, renewed=renewed)


def member_order(member: Member) -> tuple[int, int, int, str, int]:
    """The order of records of one node: all fields but `settled` and `renewed`."""
    return (member.version, member.incarnation, member.status, member.address, member.weight)


def encoded(value: Message | Iterable[Message]) -> bytes:
    """The same bytes in every process: maps are ordered by key."""
    return _encoder.encode(value)


def epoch_of(state: ClusterState) -> int:
    """The newer of two states has the larger epoch."""
    return state.folded + sum(member.version for member in state.members)


def owners_of(members: Iterable[Member]) -> list[NodeAddress]:
    """The ring's nodes: the ACTIVE members, by name."""
    active = sorted((member for member in members if member.status == ACTIVE), key=lambda m: m.node)
    return [NodeAddress(member.node, member.address, member.weight) for member in active]


def check_state(state: ClusterState, now_ms: int = MAX_VERSION) -> None:
    """Raises FrameError for a state that no node can have at this time of our clock.

    A node must be able to take the version after one that others believe. No fixed bound allows this, because
    a peer can name the bound itself. A bound that moves with the clock does.

    A node sends all members that it knows. So no epoch in a state is above the epoch of the state.
    """
    if len(state.members) > MAX_MEMBERS:
        raise FrameError(f"a state of {len(state.members)} members, at most {MAX_MEMBERS} are allowed")
    latest_ms = min(MAX_VERSION, now_ms + AHEAD_MS)
    if max((stamp(member) for member in state.members), default=0) > latest_ms or state.horizon > latest_ms:
        raise FrameError("impossible news of a time to come: two nodes' clocks differ by more than a day")
    epoch = epoch_of(state)
    for member in state.members:
        good = (
            _good_node(member)
            and member.version >= 0
            and 0 <= member.incarnation < 1 << 63
            and 0 <= member.settled <= epoch
            and member.renewed >= 0
            and stamp(member) >= state.horizon
            and ACTIVE <= member.status <= DEAD
        )
        if not good:
            raise FrameError(f"an impossible member of the pool: {member}")
    if not 0 <= state.horizon <= MAX_HORIZON or not 0 <= state.folded < min(
        MAX_FOLDED, latest_ms * MAX_FORGOTTEN
    ):
        raise FrameError("an impossible horizon")
    for record in state.namespaces:
        try:
            check_record(record)
        except NamespaceError as error:
            raise FrameError(f"an impossible namespace: {error}") from error
    ring = state.stable
    good = 0 <= state.stable_epoch <= epoch and all(map(_good_node, ring))
    if not good or len({node.node for node in ring}) < len(ring):
        raise FrameError("an impossible stable ring")


def _good_node(node: Member | NodeAddress) -> bool:
    return (
        _NAME.fullmatch(node.node) is not None
        and 0 < len(node.address) <= MAX_ADDRESS_CHARS
        and node.address.isprintable()
        and 1 <= node.weight <= MAX_WEIGHT
    )


def parts(state: ClusterState, limit_bytes: int) -> Iterator[ClusterState]:
    """The state in parts that fit a frame: each has all members, and namespaces of about `limit_bytes`."""
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
