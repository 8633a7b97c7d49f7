"""One node's view of the pool: its copy of the state (state.py), and its own record. Pure."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from pdserve.errors import FrameError, PoolRefused
from pdserve.kvpool.cluster.state import (
    MAX_HORIZON,
    MAX_VERSION,
    check_state,
    encoded,
    epoch_of,
    member_order,
    merge,
    owners_of,
    stamp,
)
from pdserve.kvpool.namespaces.registry import MAX_REGISTRY_BYTES, Dropped, Floors
from pdserve.kvpool.protocol.base import NodeAddress
from pdserve.kvpool.protocol.cluster_messages import (
    ACTIVE,
    DEAD,
    LEAVING,
    LEFT,
    MAX_MEMBERS,
    ClusterState,
    Member,
    NamespaceRecord,
    View,
)

MAX_GONE: Final = 256  # members that are dead or have left; beyond that they are forgotten sooner
FORGET_MS: Final = 24 * 3600 * 1000
FORGET_SOONER_MS: Final = 600 * 1000
RENEWALS: Final = 4  # of a record in the time after which members are forgotten
MAX_NAMESPACE_BYTES: Final = 2 * MAX_REGISTRY_BYTES  # encoded; several nodes may add some at once


@dataclass(frozen=True)
class Update:
    """The effect of a change of the state."""

    members: tuple[Member, ...] = ()  # that changed, as they are now
    namespaces: tuple[NamespaceRecord, ...] = ()
    view: View | None = None  # the new one, if it changed
    own: bool = False  # this node made the change itself: it must tell the others
    rival: Member | None = None  # another process with this node's name
    forgotten: tuple[str, ...] = ()  # namespaces
    floors: Floors | None = None  # the new ones, if they changed

    def __bool__(self) -> bool:
        return bool(self.members or self.namespaces or self.floors or self.view or self.own)


class Cluster:
    """The state of the pool as one node knows it. Every change returns an Update.

    `first_version` is the clock's millisecond at the node's start. `status` is the one before an upgrade.
    """

    def __init__(
        self, cluster: str, node: NodeAddress, incarnation: int, first_version: int, status: int = ACTIVE
    ) -> None:
        me = Member(node.node, node.address, node.weight, incarnation, first_version, status)
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
        """All remembered members, by name. Not to be changed."""
        return self._members

    @property
    def namespaces(self) -> dict[str, NamespaceRecord]:
        """By name. Not to be changed."""
        return self._namespaces

    @property
    def settled(self) -> bool:
        """Whether all owners have all pages that they own."""
        return _settled(self._members.values(), self.epoch)

    def alive(self) -> list[Member]:
        """The members that are up, this node included."""
        return [member for member in self._members.values() if member.status in (ACTIVE, LEAVING)]

    # --- changes

    def receive(self, other: ClusterState, now_ms: int = MAX_VERSION) -> Update:
        """Merge another node's state. Raises FrameError, and merges nothing, if that state is impossible at
        this time of our clock (by default at any time), or too large.
        """
        if other.cluster != self.state.cluster:
            raise FrameError(f"news of cluster '{other.cluster}', this is '{self.state.cluster}'")
        if not (other.members or other.namespaces or other.stable):
            return Update()
        check_state(other, now_ms)
        merged = merge(self.state, other)
        if len(merged.members) > MAX_MEMBERS:
            raise FrameError(f"more than {MAX_MEMBERS} nodes were in the pool lately: give nodes fixed names")
        if self._added_bytes(merged) + self._namespace_bytes > MAX_NAMESPACE_BYTES:
            raise FrameError(f"namespaces of more than {MAX_NAMESPACE_BYTES >> 20} MiB")
        me = self.me
        claimed = next((member for member in merged.members if member.node == self.name), None)
        if claimed is None:  # this node was cut off for so long that it was forgotten
            claimed = replace(me, version=max(me.version, merged.horizon) + 1, renewed=0)
            members = sorted([*merged.members, claimed], key=lambda member: member.node)
            return self._become(replace(merged, members=members))
        if member_order(claimed) != member_order(me) and me.status != LEFT:
            # another node has a wrong record of this one
            merged = _replaced(merged, replace(me, version=claimed.version + 1))
        update = self._become(merged, own=False)
        if claimed.incarnation != me.incarnation and claimed.status in (ACTIVE, LEAVING):
            return dataclasses.replace(update, rival=claimed)
        return update

    def declare_dead(self, node: str, version: int) -> Update:
        """No node could reach the member. Ignored if its record has another version by now."""
        member = self._members.get(node)
        alive = member is not None and member.version == version and member.status in (ACTIVE, LEAVING)
        if member is None or not alive or node == self.name:
            return Update()
        return self._become(_replaced(self.state, replace(member, version=version + 1, status=DEAD)))

    def leave(self) -> Update:
        """Own nothing any more; LEFT once the others have pulled the pages. Raises PoolRefused when there is
        no other ACTIVE node. If the last one goes later, this node is ACTIVE again, with all its pages.
        """
        if self.me.status != ACTIVE:
            return Update()
        if not any(member.status == ACTIVE for member in self._members.values() if member.node != self.name):
            raise PoolRefused(f"node {self.name} is the last of the pool: there is none to take its pages")
        return self._become(
            _replaced(self.state, replace(self.me, version=self.me.version + 1, status=LEAVING))
        )

    def quit(self) -> Update:
        """The node stops: its record says so."""
        return self._become(_replaced(self.state, replace(self.me, version=self.me.version + 1, status=LEFT)))

    def settle(self, epoch: int) -> Update:
        """This node has all pages that it owns under the ring of `epoch`."""
        if not self.me.settled < epoch <= self.epoch:
            return Update()
        return self._become(_replaced(self.state, replace(self.me, settled=epoch)))

    def tidy(self, now_ms: int, kept: Container[str] = ()) -> Update:
        """Forget members that went long ago. While there are any, renew this node's own record, so that other
        nodes can forget them too. Forget tombstones after their grace period, except `kept`. To be called now
        and then.
        """
        floors = self._dropped.due(self.state.namespaces, now_ms, kept)
        state, me = self._above(floors) if floors else self.state, self.me
        gone = [member for member in state.members if member.status in (LEFT, DEAD)]
        if not gone or me.status not in (ACTIVE, LEAVING):
            return Update() if state is self.state else self._become(state)
        after_ms = FORGET_MS if len(gone) <= MAX_GONE else FORGET_SOONER_MS
        if now_ms - stamp(me) >= after_ms // RENEWALS:
            state = _replaced(state, replace(me, renewed=now_ms))
        living = min(stamp(member) for member in state.members if member.status in (ACTIVE, LEAVING))
        horizon = min(now_ms - after_ms, living, MAX_HORIZON)
        if any(stamp(member) < horizon for member in gone):
            state = merge(state, ClusterState(state.cluster, [], [], horizon=horizon))
        return self._become(state)

    def _above(self, floors: Floors) -> ClusterState:
        return merge(self.state, ClusterState(self.state.cluster, [], [], floors=floors))

    def raise_floors(self, floors: Floors) -> Update:
        """Take in the floors that this node saved before its start."""
        return self._become(self._above(floors))

    def publish(self, record: NamespaceRecord) -> Update:
        """Merge a record of this node. An older record than the known one changes nothing."""
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
        """What this node concludes from a new state about its own record."""
        mine = next(member for member in state.members if member.node == self.name)
        if mine.status == LEAVING and len(state.members) > 1 and not owners_of(state.members):
            mine = replace(mine, version=mine.version + 1, status=ACTIVE)  # no node can take its pages
            state = _replaced(state, mine)
        epoch = epoch_of(state)
        if self.me.settled >= self.epoch and mine.settled < epoch and self._same_owners(state):
            mine = replace(mine, settled=epoch)  # no page has another owner now
            state = _replaced(state, mine)
        if not _settled(state.members, epoch):
            return state
        if epoch > state.stable_epoch:
            state = replace(state, stable_epoch=epoch, stable=owners_of(state.members))
        if mine.status == LEAVING:
            state = _replaced(state, replace(mine, version=mine.version + 1, status=LEFT))
        return state

    def _same_owners(self, state: ClusterState) -> bool:
        """Whether the ACTIVE members are the same, and none of them was away in between."""
        return _owners(state) == _owners(self.state)

    def _look(self) -> None:
        """Derive epoch, digest and view from the state."""
        self.epoch = epoch_of(self.state)
        self.digest = self._digest()
        owners = owners_of(self._members.values())
        previous: list[NodeAddress] = []
        if not self.settled:
            up = {member.node: member for member in self.alive()}
            previous = [replace(n, address=up[n.node].address) for n in self.state.stable if n.node in up]
        self.view = View(0, self.epoch, owners, previous if previous != owners else [])

    def _digest(self) -> bytes:
        """Of the whole state. Namespaces are large and seldom change: their digests are kept."""
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
        """How many bytes longer its namespaces are than the known ones."""
        new = [record for record in state.namespaces if self._namespaces.get(record.name) is not record]
        old = [self._digests[record.name][2] for record in new if record.name in self._digests]
        return sum(len(encoded(record)) for record in new) - sum(old)


def _owners(state: ClusterState) -> list[Member]:
    """The owners, without fields that do not concern ownership."""
    return [replace(m, settled=0, renewed=0) for m in state.members if m.status == ACTIVE]


def _digest_of(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


def _settled(members: Iterable[Member], epoch: int) -> bool:
    """Whether every owner has settled. False without owners: all pages must stay."""
    owners = [member for member in members if member.status == ACTIVE]
    return bool(owners) and all(member.settled >= epoch for member in owners)


def _replaced(state: ClusterState, member: Member) -> ClusterState:
    return replace(state, members=[member if m.node == member.node else m for m in state.members])
