"""Pages that other nodes own now: pushed to them by the node that has them. Pure.

    view changed       every page here is looked at, the most recently used quarter first, then the pages that
                       only tiers have; those of other nodes wait in a queue for their owner
    committed later    it came up from a tier: it joins its owner's queue then
    PushPages          a batch of one namespace for one owner, one under way for each, MAX_TARGETS at a time
    PagesPushed        a page counts as handed over once its owner says that it has it
    Settled            nothing is left or under way, and no tier is still reporting: every page that another
                       node owns is there, or was given up

What clients write meanwhile goes to its owners at once (forwards.py).
So a node needs nobody's help to know when it has settled, and a page is never in no place: it stays here, for
readers that ask the owner before, until all nodes have settled (`Ownership`, cluster/state.py). A node that
restarts begins anew; owners refuse the pages that they have, before any byte is sent. A node that leaves owns
nothing, so all that it has is pushed. A page whose owner changes again is pushed on by whoever has it.

What an owner cannot take now waits: another client writes the page, its tier is behind, it does not know this
view yet. It is asked again after LATER_S, and LATER_PATIENCE_S without any progress gives up what waits for
it. An owner that takes nothing because it is full, FULL_TRIES times, gets no more of that namespace. One that
does not answer is tried again, later each time; after ATTEMPTS in a row what it owns is given up. Either
costs cache misses only, when the pages are dropped here. A node that died leaves the view, and a new one
begins.

Pages go at `bytes_s` at most, for all owners together. The token bucket may go into debt by one batch,
because a page may be larger than any bucket. Bytes that a batch did not need are given back.

The queues are bounded: the scan pauses while they hold MAX_QUEUED pages. One step of it looks at
MAX_LOOKED_AT keys, about a millisecond.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from pdserve.kvpool.cluster.ring import Ring
from pdserve.kvpool.core.events import (
    FAILED,
    LATER,
    NO_ROOM,
    TAKEN,
    Action,
    PagesPushed,
    PushPages,
    Settled,
)
from pdserve.kvpool.core.sharding.ownership import TierPages
from pdserve.kvpool.core.store.index import NONE
from pdserve.kvpool.core.store.page_store import PageStore

MAX_LOOKED_AT: Final = 2048  # keys
STEP_S: Final = 0.002  # between steps of the scan: requests are served meanwhile
MAX_QUEUED: Final = 65_536  # pages in all queues; about 100 bytes each
MAX_TARGETS: Final = 4  # pushed to at a time
BATCH_PAGES: Final = 64
LATER_S: Final = 0.1
LATER_PATIENCE_S: Final = 30.0
FULL_TRIES: Final = 3
ATTEMPTS: Final = 5
RETRY_S: Final = 0.25  # doubled with every failure in a row
MAX_RETRY_S: Final = 5.0
TIERS_S: Final = 0.2  # between looks whether the tiers have reported their pages
BURST_S: Final = 0.1  # of unused bandwidth that may be used later
SAMPLE: Final = 4096  # pages whose last use tells of all


@dataclass(slots=True)
class _Target:
    """What one other node is to get."""

    queue: deque[tuple[int, bytes]] = field(default_factory=deque)  # namespace and key, next first
    full: dict[int, int] = field(default_factory=dict)  # namespace -> how often in a row it had no room
    failures: int = 0  # in a row
    waited_s: float = 0.0  # since a page was last taken
    not_before_s: float = 0.0
    given_up: bool = False


class Handover:
    """The pages of one node that others own. `replicas`: slots that stay here as they are, though others own
    their pages; they are offered to new owners once, at a change of the view.
    """

    def __init__(
        self, store: PageStore, tiers: TierPages, replicas: Container[int], bytes_s: float, batch_bytes: int
    ) -> None:
        self.settled = 0  # the last epoch for which nothing was left
        self.next_deadline_s = float("inf")
        self.pages_pushed = 0
        self.bytes_pushed = 0
        self.pushes_failed = 0  # pages of pushes that ended without an answer
        self.peers_given_up = 0
        self._store = store
        self._tiers = tiers
        self._replicas = replicas
        self._bytes_s = bytes_s
        self._batch_bytes = batch_bytes
        self._ring = Ring([])
        self._mine = -1  # this node's number in the ring
        self._targets: dict[str, _Target] = {}
        self._out: dict[str, tuple[int, int, PushPages]] = {}  # by node: epoch, bytes charged
        self._tokens = 0.0
        self._tokens_at_s: float | None = None
        # the scan
        self._seen = bytearray()  # by slot: it was looked at
        self._heat: list[int] = []  # least last use of each pass over the slots that is to come
        self._cursor = 0
        self._tier_keys: list[tuple[int, list[bytes]]] | None = None  # None: not there yet
        self._step_at_s = 0.0

    @property
    def moving(self) -> bool:
        """Whether there is anything left to do."""
        return self.settled != self._ring.epoch

    @property
    def pages_to_move(self) -> int:
        """The pages found so far."""
        out = sum(len(push.keys) for _, _, push in self._out.values())
        return out + sum(len(target.queue) for target in self._targets.values())

    # --- what happens

    def view_changed(self, ring: Ring, mine: int, now_s: float, out: list[Action]) -> None:
        """Begin anew under this ring."""
        self._ring, self._mine = ring, mine
        self._targets = {node.node: _Target() for i, node in enumerate(ring.nodes) if i != mine}
        self._cursor, self._tier_keys, self._heat = 0, None, []
        if self._targets:
            self._seen = bytearray(self._store.slots.slots)
            self._heat = self._classes()
        self._step_at_s = now_s
        self.pump(now_s, out)

    def committed(self, slots: Sequence[int], now_s: float) -> None:
        """Pages have come to these slots."""
        if not self.moving or not self._targets:
            return
        facts = self._store.facts
        late = [slot for slot in slots if slot not in self._replicas]
        owners = self._ring.owners([facts.key[slot] or b"" for slot in late]).tolist()
        for slot, owner in zip(late, owners, strict=True):
            if owner != self._mine:
                self._seen[slot] = 1
                self._add(owner, facts.namespace[slot], self._store.key_of(slot))
                self.next_deadline_s = min(self.next_deadline_s, now_s)

    def pushed(self, event: PagesPushed, now_s: float, out: list[Action]) -> None:
        """A push has ended."""
        push = event.push
        epoch, charged_bytes, _ = self._out.pop(push.node)
        self._tokens += charged_bytes - event.copied_bytes
        self.bytes_pushed += event.copied_bytes
        self.pages_pushed += event.copied
        target = self._targets.get(push.node)
        if target is not None and epoch == self._ring.epoch:  # else all is looked at anew anyway
            if FAILED in event.outcomes:
                self._failed(target, event, now_s)
            else:
                self._answered(target, event, now_s)
        self.pump(now_s, out)

    def _failed(self, target: _Target, event: PagesPushed, now_s: float) -> None:
        left = [key for key, end in zip(event.push.keys, event.outcomes, strict=True) if end == FAILED]
        self.pushes_failed += len(left)
        target.queue.extendleft((event.push.namespace, key) for key in reversed(left))
        target.failures += 1
        target.not_before_s = now_s + min(MAX_RETRY_S, RETRY_S * 2 ** (target.failures - 1))
        if target.failures >= ATTEMPTS:
            self._give_up(target)

    def _answered(self, target: _Target, event: PagesPushed, now_s: float) -> None:
        namespace, target.failures = event.push.namespace, 0
        later = [k for k, end in zip(event.push.keys, event.outcomes, strict=True) if end in (LATER, NO_ROOM)]
        target.queue.extend((namespace, key) for key in later)
        if (
            TAKEN in event.outcomes or not later
        ):  # some of a batch may be more than it reserves for one client
            target.full.pop(namespace, None)
            target.waited_s = 0.0
            return
        if NO_ROOM in event.outcomes:
            target.full[namespace] = target.full.get(namespace, 0) + 1
        target.not_before_s = now_s + LATER_S
        target.waited_s += LATER_S
        if target.waited_s >= LATER_PATIENCE_S:
            self._give_up(target)

    def _give_up(self, target: _Target) -> None:
        self.peers_given_up += 1
        target.given_up = True
        target.queue.clear()

    # --- the scan

    def _classes(self) -> list[int]:
        """The last uses that divide the pages into quarters, the most recent first; 0 at the end."""
        slots = self._store.committed_slots(0, self._store.slots.slots)
        if not len(slots):
            return [0]
        sample = np.frombuffer(self._store.facts.last_use, np.uint64)[slots[:: max(1, len(slots) // SAMPLE)]]
        return [*np.quantile(sample, (0.75, 0.5, 0.25)).astype(np.uint64).tolist(), 0]

    def _scan(self, now_s: float) -> None:
        """One step."""
        self._step_at_s = now_s + STEP_S
        if self._heat:
            self._scan_slots()
        elif self._tier_keys is None:
            if not self._tiers.ready:
                self._step_at_s = now_s + TIERS_S
            else:
                self._tier_keys = [(n, self._tiers.own_keys(n)) for n in self._tiers.namespaces()]
        elif self._tier_keys:
            self._scan_tiers(self._tier_keys)

    @property
    def _scanned(self) -> bool:
        return not self._targets or (not self._heat and self._tier_keys == [])

    def _scan_slots(self) -> None:
        slots = self._store.committed_slots(self._cursor, MAX_LOOKED_AT)
        if len(slots) < MAX_LOOKED_AT:
            least, self._cursor = self._heat.pop(0), 0
        else:
            least, self._cursor = self._heat[0], int(slots[-1]) + 1
        seen, last_use = (
            np.frombuffer(self._seen, np.uint8),
            np.frombuffer(self._store.facts.last_use, np.uint64),
        )
        slots = slots[(seen[slots] == 0) & (last_use[slots] >= least)]
        seen[slots] = 1
        found = slots.tolist()
        key_of, namespace_of = self._store.key_of, self._store.facts.namespace
        for i, owner in self._foreign([key_of(slot) for slot in found]):
            self._add(owner, namespace_of[found[i]], key_of(found[i]))

    def _scan_tiers(self, tier_keys: list[tuple[int, list[bytes]]]) -> None:
        """Keys that only tiers have. One that rises into memory meanwhile is `committed`; one that sank
        since it was seen in a slot is in a queue.
        """
        namespace, keys = tier_keys[-1]
        some = keys[-MAX_LOOKED_AT:]
        del keys[-MAX_LOOKED_AT:]
        if not keys:
            tier_keys.pop()
        committed = self._store.index.namespace(namespace).committed
        for i, owner in self._foreign(some):
            if some[i] not in committed:
                self._add(owner, namespace, some[i])

    def _foreign(self, keys: list[bytes]) -> list[tuple[int, int]]:
        """The indices of the keys that other nodes own, each with its owner's number."""
        if not keys:
            return []
        owners = self._ring.owners(keys)
        foreign: npt.NDArray[np.intp] = np.flatnonzero(owners != self._mine)
        return list(zip(foreign.tolist(), owners[foreign].tolist(), strict=True))

    def _add(self, owner: int, namespace: int, key: bytes) -> None:
        target = self._targets[self._ring.nodes[owner].node]
        if not target.given_up:
            target.queue.append((namespace, key))

    # --- pushes

    def pump(self, now_s: float, out: list[Action]) -> None:
        """Go on with what is due."""
        self.next_deadline_s = float("inf")
        if not self.moving or not self._ring.nodes:
            return
        queued = sum(len(target.queue) for target in self._targets.values())
        if not self._scanned and queued < MAX_QUEUED and now_s >= self._step_at_s:
            self._scan(now_s)
        self._refill(now_s)
        for name, target in self._targets.items():
            if len(self._out) >= MAX_TARGETS:
                break  # the next answer calls this again
            if name not in self._out and target.queue:
                self._push(name, target, now_s, out)
        if not self._scanned:
            self._expect(self._step_at_s if queued < MAX_QUEUED else now_s + STEP_S)
        elif not self._out and not any(target.queue for target in self._targets.values()):
            self.settled, self._seen = self._ring.epoch, bytearray()
            self.next_deadline_s = float("inf")
            out.append(Settled(self.settled))

    def _push(self, name: str, target: _Target, now_s: float, out: list[Action]) -> None:
        if target.not_before_s > now_s:
            self._expect(target.not_before_s)
            return
        if self._bytes_s and self._tokens <= -1:  # smaller debts are rounding errors
            self._expect(now_s - self._tokens / self._bytes_s)
            return
        push = self._batch(name, target)
        if push is not None:
            charged_bytes = sum(push.lengths)
            self._tokens -= charged_bytes
            self._out[name] = self._ring.epoch, charged_bytes, push
            out.append(push)

    def _batch(self, name: str, target: _Target) -> PushPages | None:
        """At least one page, and as many more of its namespace as the limits allow; None: all are gone."""
        queue, keys, lengths, total_bytes, namespace = target.queue, list[bytes](), list[int](), 0, NONE
        others: list[tuple[int, bytes]] = []
        while queue and len(keys) < BATCH_PAGES and len(others) < BATCH_PAGES:
            number, key = queue.popleft()
            length_bytes = self._length_bytes(number, key)
            if not length_bytes or target.full.get(number, 0) >= FULL_TRIES:
                continue
            if keys and (number != namespace or total_bytes + length_bytes > self._batch_bytes):
                others.append((number, key))
                continue
            namespace = number
            keys.append(key)
            lengths.append(length_bytes)
            total_bytes += length_bytes
        queue.extendleft(reversed(others))
        return PushPages(name, namespace, keys, lengths) if keys else None

    def _length_bytes(self, namespace: int, key: bytes) -> int:
        """0: it is gone."""
        slot = self._store.find(namespace, key)
        return self._tiers.length(namespace, key) if slot == NONE else self._store.facts.length_bytes[slot]

    def _refill(self, now_s: float) -> None:
        if self._tokens_at_s is not None:
            earned = self._bytes_s * (now_s - self._tokens_at_s)
            self._tokens = min(BURST_S * self._bytes_s, self._tokens + earned)
        self._tokens_at_s = now_s

    def _expect(self, deadline_s: float) -> None:
        self.next_deadline_s = min(self.next_deadline_s, deadline_s)

    def check(self) -> None:
        """Assert that it ends, and keeps its bounds. For tests."""
        assert len(self._out) <= MAX_TARGETS + len(self._targets)
        queued = sum(len(target.queue) for target in self._targets.values())
        assert queued < MAX_QUEUED + MAX_LOOKED_AT + self._store.slots.slots
        if self.moving and self._ring.nodes and len(self._out) < MAX_TARGETS:
            assert self._out or self.next_deadline_s < float("inf"), "it would wait for good"
