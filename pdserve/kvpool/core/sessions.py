"""Sessions: the reservations, pins and waits of one client, each limited in time and number. Pure.

All leases of one kind have the same length, and a renewed pin moves to the end of its table. So the first
entry of each table is the next to expire.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final

from msgspec import Struct

from pdserve.kvpool.core.events import LOCAL
from pdserve.kvpool.protocol.messages import DataPathName, Get
from pdserve.kvpool.protocol.messages import Pin as PinReply

NO_TRANSFER: Final = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a node's clients; see PoolNodeConfig."""

    lease_s: float = 30.0
    reservation_lease_s: float = 30.0
    quarantine_s: float = 30.0
    max_waiters: int = 256
    max_waited_keys: int = 131_072  # in open waits per connection; a key takes about 300 bytes
    max_reserved_bytes: int = 1 << 62  # per connection
    max_pinned_bytes: int = 1 << 62  # per connection
    max_kept_bytes: int = 1 << 62  # of pages that clients want kept
    max_messages: int = 1 << 62  # segments under way per connection, UCX and TCP
    copy_lease_s: float = 100.0  # of replicas; much longer than it takes to notice a lost node
    push_bytes_s: float = 0.0  # to nodes that own pages of ours; 0: no limit
    push_batch_bytes: int = 8 << 20
    exchange_bytes: int = 256 << 20  # of pages under way from other nodes, and as much to them


@dataclass(slots=True)
class PendingCommit:
    """A Commit that waits for receives (UCX, TCP), or for other nodes to take pages. Answered when `missing`
    is 0. `connection`: -1 when its client is gone.
    """

    connection: int
    request_id: int
    mask: bytearray
    missing: int


class Reservation(Struct, gc=False):  # one per page: a Struct is made in a tenth of a dataclass's time
    """A slot that this client may fill and commit. (slot, sequence) names it."""

    slot: int
    sequence: int
    slot_bytes: int
    deadline_s: float
    tag: int = NO_TRANSFER  # of the receive under way (UCX, TCP)
    checksum: int = 0  # of the commit that waits for the receive
    commit: PendingCommit | None = None
    place: int = 0  # in the commit's mask


class Pin(Struct, gc=False):
    """A slot that this client reads. One hold of the slot, whatever `count` is."""

    slot: int
    sequence: int
    slot_bytes: int
    count: int
    deadline_s: float


@dataclass(slots=True, eq=False)
class Waiter:
    """An open Wait. `missing`: keys not committed yet. `elsewhere`: those that another node has."""

    connection: int
    request_id: int
    namespace: int
    keys: list[bytes]
    missing: set[bytes]
    deadline_s: float
    elsewhere: set[bytes] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class PendingGet:
    """A Get that waits for `missing` pages to come from a tier or another node. `pins` is its answer so far,
    `promoted` the places in it of the pages that a tier gave.
    """

    session: Session
    request: Get
    pins: list[PinReply]
    missing: int
    deadline_s: float
    promoted: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Session:
    """The reservations, pins, waits and rights of one connection."""

    connection: int
    data_path: DataPathName
    client: str
    peer: bool = False  # a node of this pool, or the node itself: has all rights
    token: str = ""  # SHA-256 hex digest
    rights: dict[int, tuple[int, int]] = field(default_factory=dict)  # kept by namespace_admin.py
    reserved_bytes: int = 0  # in bytes of slots, those in quarantine included
    reservations: dict[int, Reservation] = field(default_factory=dict)  # by slot
    quarantined: dict[int, Reservation] = field(default_factory=dict)  # by slot; may never be committed
    pins: dict[int, Pin] = field(default_factory=dict)  # by slot
    waiters: dict[int, Waiter] = field(default_factory=dict)  # by request id
    waited_keys: int = 0  # of all waiters
    gets: dict[int, PendingGet] = field(default_factory=dict)  # by request id
    pinned_bytes: int = 0  # in bytes of slots
    transfers: dict[int, int] = field(default_factory=dict)  # tag under way (UCX, TCP) -> its messages
    messages: int = 0  # of all transfers under way
    due_s: float = float("inf")  # when `Due` looks at it again

    @property
    def mapped(self) -> bool:
        """Whether the client copies the bytes itself: then only the client knows when it stops."""
        return self.data_path not in ("ucx", "tcp")

    @property
    def reads(self) -> bool:
        """Whether its gets are reads, of a client here or at another node: not those of this node itself."""
        return self.connection != LOCAL

    def begin_transfer(self, tag: int, messages: int) -> None:
        self.transfers[tag] = messages
        self.messages += messages

    def end_transfer(self, tag: int) -> None:
        self.messages -= self.transfers.pop(tag, 0)

    def next_deadline_s(self) -> float:
        """The earliest of all deadlines; infinite when there is none."""
        deadlines = [waiter.deadline_s for waiter in self.waiters.values()]
        if self.reservations:
            deadlines.append(next(iter(self.reservations.values())).deadline_s)
        if self.pins:
            deadlines.append(next(iter(self.pins.values())).deadline_s)
        deadlines += [get.deadline_s for get in self.gets.values()]
        return min(deadlines, default=float("inf"))


class Due:
    """The sessions by when something of theirs ends: a tick looks at those alone whose time has come.

    A session is looked at no later than its first deadline; where its leases were renewed since, for nothing.
    """

    def __init__(self) -> None:
        self._heap: list[
            tuple[float, int]
        ] = []  # when, connection; void where it is not the session's `due_s`

    def expect(self, session: Session) -> None:
        """The session's deadlines have changed."""
        due_s = session.next_deadline_s()
        if due_s < session.due_s:
            session.due_s = due_s
            heappush(self._heap, (due_s, session.connection))

    def take(self, sessions: Mapping[int, Session], now_s: float) -> list[Session]:
        """Those that are due, each once, in the order of their connections; `expect` each again."""
        due = {}
        while self._heap and self._heap[0][0] <= now_s:
            due_s, connection = heappop(self._heap)
            session = sessions.get(connection)
            if session is not None and session.due_s == due_s:
                session.due_s = float("inf")
                due[connection] = session
        return [due[connection] for connection in sorted(due)]

    @property
    def next_deadline_s(self) -> float:
        """When one is due; infinite when none is."""
        return self._heap[0][0] if self._heap else float("inf")


class Tags:
    """Tags of UCX and TCP, unique in an incarnation. A page of n segments takes n consecutive tags.

    The high bits are the incarnation's low bits: a client of several nodes gets no tag twice.
    """

    def __init__(self, incarnation: int, first: int) -> None:
        self._next = ((incarnation & 0x7FFF) << 48) + first

    def take(self, segments: int) -> int:
        tag = self._next
        self._next += segments
        return tag
