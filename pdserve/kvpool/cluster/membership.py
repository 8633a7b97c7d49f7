"""One node's view of the pool: its copy of the state (state.py), and its own record. Pure."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
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
from pdserve.kvpool.namespaces.registry import MAX_LEARNED_BYTES, Registry
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


@dataclass(frozen=True)
class Update:
    """The effect of a change of the state."""

    members: tuple[Member, ...] = ()  # that changed, as they are now
    namespaces: tuple[NamespaceRecord, ...] = ()  # news, for whoever owns the registry to learn
    view: View | None = None  # the new one, if it changed
    own: bool = False  # this node made the change itself: it must tell the others
    rival: Member | None = None  # another process with this node's name

    def __bool__(self) -> bool:
        return bool(self.members or self.namespaces or self.view or self.own)


class Cluster:
    """The state of the pool as one node knows it. Every change returns an Update.

    `first_version` is the clock's millisecond at the node's start. `status` is the one before an upgrade.
    `registry`: the node's namespaces. They are only read here; `state` is without them.
    """

    def __init__(
        self, cluster: str, node: NodeAddress, incarnation: int, first_version: int, status: int = ACTIVE
    ) -> None:
        me = Member(node.node, node.address, node.weight, incarnation, first_version, status)
        self.name = node.node
        self.state = ClusterState(cluster, [me], [])
        self._members = {me.node: me}
        self.registry = Registry()
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
    def whole(self) -> ClusterState:
        """The state with all namespaces."""
        return replace(self.state, namespaces=list(self.registry))

    @property
    def digest(self) -> bytes:
        """Equal on nodes that know the same of members and namespaces."""
        return _digest_of(self._encoded + self.registry.digest)

    @property
    def settled(self) -> bool:
        """Whether all pages are where their owners are."""
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
        news = self.registry.news(other.namespaces)
        if self.registry.encoded_bytes + self.registry.added_bytes(news) > MAX_LEARNED_BYTES:
            raise FrameError(f"namespaces of more than {MAX_LEARNED_BYTES >> 20} MiB")
        me = self.me
        claimed = next((member for member in merged.members if member.node == self.name), None)
        if claimed is None:  # this node was cut off for so long that it was forgotten
            claimed = replace(me, version=max(me.version, merged.horizon) + 1, renewed=0)
            members = sorted([*merged.members, claimed], key=lambda member: member.node)
            return self._become(replace(merged, members=members), news)
        if member_order(claimed) != member_order(me) and me.status != LEFT:
            # another node has a wrong record of this one
            merged = _replaced(merged, replace(me, version=claimed.version + 1))
        update = self._become(merged, news, own=False)
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
        """Own nothing any more; LEFT once the others have the pages. Raises PoolRefused when there is
        no other ACTIVE node. If the last one goes later, this node is ACTIVE again, with all its pages.
        """
        if self.me.status != ACTIVE:
            return Update()
        if not any(member.status == ACTIVE for member in self._members.values() if member.node != self.name):
            raise PoolRefused(f"node {self.name} is the last of the pool: there is none to take its pages")
        return self._become(
            _replaced(self.state, replace(self.me, version=self.me.version + 1, status=LEAVING))
        )

    def settle(self, epoch: int) -> Update:
        """Nothing is left here that another node owns under the ring of `epoch`."""
        if not self.me.settled < epoch <= self.epoch:
            return Update()
        return self._become(_replaced(self.state, replace(self.me, settled=epoch)))

    def tidy(self, now_ms: int) -> Update:
        """Forget members that went long ago. While there are any, renew this node's own record, so that other
        nodes can forget them too. To be called now and then.
        """
        state, me = self.state, self.me
        gone = [member for member in state.members if member.status in (LEFT, DEAD)]
        if not gone or me.status not in (ACTIVE, LEAVING):
            return Update()
        after_ms = FORGET_MS if len(gone) <= MAX_GONE else FORGET_SOONER_MS
        if now_ms - stamp(me) >= after_ms // RENEWALS:
            state = _replaced(state, replace(me, renewed=now_ms))
        living = min(stamp(member) for member in state.members if member.status in (ACTIVE, LEAVING))
        horizon = min(now_ms - after_ms, living, MAX_HORIZON)
        if any(stamp(member) < horizon for member in gone):
            state = merge(state, ClusterState(state.cluster, [], [], horizon=horizon))
        return self._become(state)

    # --- inside

    def _become(
        self, state: ClusterState, news: Sequence[NamespaceRecord] = (), *, own: bool = True
    ) -> Update:
        state = self._follow(state)
        if state == self.state:
            return Update(namespaces=tuple(news))
        old_members, old_view, old_me = self._members, self.view, self.me
        self.state = state
        self._members = {member.node: member for member in state.members}
        self._look()
        return Update(
            tuple(m for m in state.members if old_members.get(m.node) != m),
            tuple(news),
            self.view if self.view != old_view else None,
            own or self.me != old_me,
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
        """Derive epoch and view from the state."""
        self.epoch = epoch_of(self.state)
        self._encoded = encoded(self.state)
        owners = owners_of(self._members.values())
        previous: list[NodeAddress] = []
        if not self.settled:
            up = {member.node: member for member in self.alive()}
            previous = [replace(n, address=up[n.node].address) for n in self.state.stable if n.node in up]
        self.view = View(0, self.epoch, owners, previous if previous != owners else [])


def _owners(state: ClusterState) -> list[Member]:
    """The owners, without fields that do not concern ownership."""
    return [replace(m, settled=0, renewed=0) for m in state.members if m.status == ACTIVE]


def _digest_of(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


def _settled(members: Iterable[Member], epoch: int) -> bool:
    """Whether every living node has settled. False without owners: all pages must stay."""
    living = [member for member in members if member.status in (ACTIVE, LEAVING)]
    has_owners = any(member.status == ACTIVE for member in living)
    return has_owners and all(member.settled >= epoch for member in living)


def _replaced(state: ClusterState, member: Member) -> ClusterState:
    return replace(state, members=[member if m.node == member.node else m for m in state.members])
