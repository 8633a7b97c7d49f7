"""What a node pulls from other nodes after the ring changed: from which, in which order, how fast. Pure.

The new owner pulls. It does not derive where its pages were: the ring may have changed several times, and a
node may have been away. It asks every other living member for the pages that the new ring gives to the asker,
and fetches those that it lacks. Members that lost most to it come first.

The node goes through one member in passes:

    Survey   the member's namespaces                      -> Surveyed
    List     the node's pages in one, from a cursor       -> Listed, without pages that the node has
    Pull     fetch a batch of these                       -> Pulled

A member answers once it knows the asker's epoch. From then on it grants no client a reservation of a page
that it does not own. So more pages of the asker can come to it only from reservations made before.
`Listed.writing` of the first answer is above 0 while there are any, and later when the member lost the place
in its list: then the namespace gets another pass. Reservations end with their lease, so there are few passes.
Pages that were listed but not delivered (a tier was slow, for example) get another pass too, up to `passes`.

The node has settled when every member is done. A member that fails is tried again, later each time, and
skipped after `attempts` failures in a row: this costs cache misses only. A member that died leaves the view,
and the new view begins a new plan.

A new view discards the plan. Pulled pages stay, and are not listed again. The node waits for requests under
way, so no member has two.

Pages come at `bytes_s` at most. The token bucket may go into debt by one batch, because a page may be larger
than any bucket. Bytes that a batch did not need are given back.

A cache is full most of the time, and pages come in no order of heat. So pulled pages may take free space and
evict the coldest pages here, up to `room_bytes` in all: room for a share of the hottest pages, but not so
much that pulled pages evict each other.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias, assert_never

import msgspec

BURST_S: Final = 0.1  # of unused bandwidth that may be used later


@dataclass(frozen=True, slots=True)
class MigrationLimits:
    """`bytes_s` 0: no limit."""

    bytes_s: float = 0.0
    batch_bytes: int = 8 << 20
    batch_pages: int = 64
    list_keys: int = 4096
    max_peers: int = 4  # asked at a time, one request each
    attempts: int = 5
    passes: int = 3  # for pages that were listed but not delivered
    retry_s: float = 0.25  # doubled with every failure in a row
    max_retry_s: float = 5.0
    stale_retry_s: float = 0.1  # until both sides know the same epoch
    stale_patience_s: float = 30.0  # after that it counts as a failure
    writing_retry_s: float = 0.2  # between passes


# --- events


class Begin(msgspec.Struct, frozen=True):
    """The view changed. `peers` are the other living members, those that lost most to this node first. At
    most `room_bytes` are pulled in all.
    """

    epoch: int
    peers: tuple[str, ...]
    room_bytes: float = math.inf


class Surveyed(msgspec.Struct, frozen=True):
    ask: int
    namespaces: tuple[str, ...]


class Listed(msgspec.Struct, frozen=True):
    """Pages that this node lacks. `cursor` is 0 at the end. `writing` above 0: another pass is needed."""

    ask: int
    keys: Sequence[bytes]
    lengths: Sequence[int]
    cursor: int
    writing: int


class Pulled(msgspec.Struct, frozen=True):
    """`pages` of `moved_bytes` have come. `missing` were not delivered; all others were here already. `full`:
    there was no room for at least one.
    """

    ask: int
    pages: int
    moved_bytes: int
    full: bool = False
    missing: Sequence[bytes] = ()


class Failed(msgspec.Struct, frozen=True):
    """The request failed. `stale`: only because the two nodes know different epochs."""

    ask: int
    stale: bool = False


class Elapsed(msgspec.Struct, frozen=True):
    """Time has passed. Due at `Migration.next_deadline_s`."""


MoveEvent: TypeAlias = Begin | Surveyed | Listed | Pulled | Failed | Elapsed


# --- actions


class Survey(msgspec.Struct, frozen=True):
    ask: int
    epoch: int
    peer: str


class List(msgspec.Struct, frozen=True):
    ask: int
    epoch: int
    peer: str
    namespace: str
    cursor: int
    limit: int


class Pull(msgspec.Struct, frozen=True):
    ask: int
    epoch: int
    peer: str
    namespace: str
    keys: Sequence[bytes]
    lengths: Sequence[int]


class Settled(msgspec.Struct, frozen=True):
    """All pages that this node owns in this epoch's ring, and could get, are here."""

    epoch: int


MoveAction: TypeAlias = Survey | List | Pull | Settled


@dataclass(slots=True)
class _Peer:
    """The progress with one member."""

    name: str
    surveyed: bool = False
    todo: deque[str] = field(default_factory=deque)  # namespaces of this pass, the current one first
    again: list[str] = field(default_factory=list)  # namespaces of the next pass
    cursor: int = 0
    listed: bool = False  # the current namespace up to its end
    keys: deque[bytes] = field(default_factory=deque)  # to pull, of the current namespace
    lengths: deque[int] = field(default_factory=deque)
    passes: int = 0  # done
    failures: int = 0  # in a row
    stale_s: float = 0.0  # waited for it to know this node's epoch
    not_before_s: float = 0.0


class Migration:
    """The plan of one node. Each action but Settled is answered by one event with its `ask`."""

    def __init__(self, limits: MigrationLimits) -> None:
        self.epoch = 0
        self.settled = 0
        self.next_deadline_s = float("inf")
        self.pages_pulled = 0
        self.bytes_pulled = 0
        self.pulls_failed = 0
        self.peers_given_up = 0
        self._limits = limits
        self._peers: dict[str, _Peer] = {}  # not done yet, in order
        self._out: dict[int, tuple[int, Survey | List | Pull]] = {}  # by ask; its bytes
        self._busy: set[str] = set()  # members with a request out
        self._full: set[str] = set()  # namespaces without room here
        self._room_bytes = math.inf
        self._last_ask = 0
        self._tokens = 0.0
        self._tokens_at_s: float | None = None

    @property
    def moving(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self._peers)

    @property
    def pages_to_move(self) -> int:
        """The pages known so far."""
        out = sum(len(action.keys) for _, action in self._out.values() if isinstance(action, Pull))
        return out + sum(len(peer.keys) for peer in self._peers.values())

    def handle(self, event: MoveEvent, now_s: float) -> list[MoveAction]:
        """What to do about the event, in order."""
        out: list[MoveAction] = []
        match event:
            case Begin():
                self.epoch = event.epoch
                self._peers = {name: _Peer(name, not_before_s=now_s) for name in event.peers}
                self._full.clear()
                self._room_bytes = event.room_bytes
            case Surveyed() | Listed() | Pulled() | Failed():
                self._answered(event, now_s)
            case Elapsed():
                pass
            case _:
                assert_never(event)
        self._advance(now_s, out)
        if not self._peers and self.settled != self.epoch:
            self.settled = self.epoch
            out.append(Settled(self.epoch))
        return out

    # --- answers

    def _answered(self, event: Surveyed | Listed | Pulled | Failed, now_s: float) -> None:
        charged_bytes, action = self._out.pop(event.ask)
        self._busy.discard(action.peer)
        moved_bytes = 0
        if isinstance(event, Pulled):
            self.pages_pulled += event.pages
            self.bytes_pulled += event.moved_bytes
            moved_bytes = event.moved_bytes
            self._room_bytes -= moved_bytes
        self._tokens += charged_bytes - moved_bytes
        peer = self._peers.get(action.peer)
        if peer is None or action.epoch != self.epoch:
            return  # of an earlier view
        if isinstance(event, Failed):
            self._failed(peer, action, event.stale, now_s)
            return
        peer.failures = 0
        if isinstance(event, Surveyed):
            peer.surveyed = True
            peer.todo.extend(event.namespaces)
        elif isinstance(event, Listed):
            assert isinstance(action, List)
            if event.writing and action.namespace not in peer.again:
                peer.again.append(action.namespace)
            peer.keys.extend(event.keys)
            peer.lengths.extend(event.lengths)
            peer.cursor = event.cursor
            peer.listed = event.cursor == 0
        else:
            assert isinstance(action, Pull)
            self._pulled(peer, event, action)
        self._step(peer, now_s)

    def _pulled(self, peer: _Peer, event: Pulled, action: Pull) -> None:
        if event.full:
            self._full.add(action.namespace)
        elif event.missing and event.pages:  # a part came: as much as the member pins for one reader
            length_of = dict(zip(action.keys, action.lengths, strict=True))
            peer.keys.extendleft(reversed(event.missing))
            peer.lengths.extendleft(length_of[key] for key in reversed(event.missing))
        elif event.missing and peer.passes < self._limits.passes and action.namespace not in peer.again:
            peer.again.append(action.namespace)  # pages that are gone are not listed again

    def _failed(self, peer: _Peer, action: Survey | List | Pull, stale: bool, now_s: float) -> None:
        limits = self._limits
        if isinstance(action, Pull):
            self.pulls_failed += 1
            peer.keys.extendleft(reversed(action.keys))
            peer.lengths.extendleft(reversed(action.lengths))
        if stale and peer.stale_s < limits.stale_patience_s:
            peer.stale_s += limits.stale_retry_s
            peer.not_before_s = now_s + limits.stale_retry_s
            return
        peer.failures += 1
        if peer.failures >= limits.attempts:
            self.peers_given_up += 1
            del self._peers[peer.name]
            return
        peer.not_before_s = now_s + min(limits.max_retry_s, limits.retry_s * 2 ** (peer.failures - 1))

    def _step(self, peer: _Peer, now_s: float) -> None:
        """Go on after a namespace, a pass or the member is done."""
        if self._room_bytes <= 0:
            self._full.update(peer.todo)
        while peer.todo and ((peer.listed and not peer.keys) or peer.todo[0] in self._full):
            peer.todo.popleft()
            peer.cursor, peer.listed = 0, False
            peer.keys.clear()
            peer.lengths.clear()
        if peer.surveyed and not peer.todo:
            peer.passes += 1
            peer.todo.extend(name for name in peer.again if name not in self._full)
            peer.again.clear()
            peer.not_before_s = now_s + self._limits.writing_retry_s
            if not peer.todo:
                del self._peers[peer.name]

    # --- requests

    def _advance(self, now_s: float, out: list[MoveAction]) -> None:
        self.next_deadline_s = float("inf")
        self._refill(now_s)
        for peer in list(self._peers.values()):
            if len(self._busy) >= self._limits.max_peers:
                return  # the next answer calls this again
            if peer.name in self._busy:
                continue
            if peer.not_before_s > now_s:
                self.next_deadline_s = min(self.next_deadline_s, peer.not_before_s)
            else:
                self._ask(peer, now_s, out)

    def _ask(self, peer: _Peer, now_s: float, out: list[MoveAction]) -> None:
        self._step(peer, now_s)
        if peer.name not in self._peers:
            return
        limits, ask, charged_bytes = self._limits, self._last_ask + 1, 0
        action: Survey | List | Pull
        if not peer.surveyed:
            action = Survey(ask, self.epoch, peer.name)
        elif not peer.keys:
            action = List(ask, self.epoch, peer.name, peer.todo[0], peer.cursor, limits.list_keys)
        elif limits.bytes_s and self._tokens <= -1:  # smaller debts are rounding errors
            self.next_deadline_s = min(self.next_deadline_s, now_s - self._tokens / limits.bytes_s)
            return
        else:
            keys, lengths = self._batch(peer)
            charged_bytes = sum(lengths)
            self._tokens -= charged_bytes
            action = Pull(ask, self.epoch, peer.name, peer.todo[0], keys, lengths)
        self._last_ask = ask
        self._out[ask] = (charged_bytes, action)
        self._busy.add(peer.name)
        out.append(action)

    def _batch(self, peer: _Peer) -> tuple[list[bytes], list[int]]:
        """At least one page, and as many more as the limits allow."""
        keys: list[bytes] = []
        lengths: list[int] = []
        total_bytes = 0
        while peer.keys and len(keys) < self._limits.batch_pages:
            if keys and total_bytes + peer.lengths[0] > self._limits.batch_bytes:
                break
            keys.append(peer.keys.popleft())
            lengths.append(peer.lengths.popleft())
            total_bytes += lengths[-1]
        return keys, lengths

    def _refill(self, now_s: float) -> None:
        rate = self._limits.bytes_s
        if self._tokens_at_s is not None:
            self._tokens = min(BURST_S * rate, self._tokens + rate * (now_s - self._tokens_at_s))
        self._tokens_at_s = now_s

    # --- conservation

    def check(self) -> None:
        """Assert that the plan is whole. For tests."""
        assert self._busy == {action.peer for _, action in self._out.values()}
        assert len(self._out) == len(self._busy) <= self._limits.max_peers
        for peer in self._peers.values():
            assert len(peer.keys) == len(peer.lengths)
            assert not peer.keys or peer.todo
        if not self._peers:
            assert self.settled == self.epoch
        waiting = any(name not in self._busy for name in self._peers)
        if waiting and len(self._busy) < self._limits.max_peers:
            assert self.next_deadline_s < float("inf"), "it would wait for good"
