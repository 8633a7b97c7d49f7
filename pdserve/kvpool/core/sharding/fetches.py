"""Pages of other nodes that clients of this node read: they are brought here once, for all readers. Pure.

    Get of a page that another node owns, and that is not here
      -> a slot is reserved, as for a writer
      -> FetchPages: the shell copies the page from its owner into the slot, and checks its bytes
      -> PagesFetched: the slot is committed as a replica and pinned for every waiting Get, or given back

One fetch serves all Gets of its key. While pages move, the owner before is asked where the owner has nothing;
if the view changes meanwhile, the search begins anew: the page may have moved past it. A miss is a miss of
one view. A page that is just being written here, by another node's push for example, is waited for.

At the deadline of a Get its unfinished fetches are misses, and late: later Gets do not wait for them. A node
that failed, or was late, is asked for nothing more for SHUN_S, so that a node that hangs costs one deadline
and not one for each Get. A late page is kept nevertheless, if it comes.

Fetched pages are replicas with a lease, and the first to make room: before a reservation evicts other pages,
the oldest of them go (`make_room`), unless somebody reads them. So the working set of this node's own pages
does not suffer from what its clients read elsewhere. All fetches under way have a bound in bytes; a Get
beyond it has misses.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from pdserve.kvpool.core.events import FAILED as NO_ANSWER
from pdserve.kvpool.core.events import TAKEN, Action, FetchPages, PagesFetched
from pdserve.kvpool.core.pending_gets import PendingGets
from pdserve.kvpool.core.sessions import PendingGet
from pdserve.kvpool.core.sharding.ownership import Ownership
from pdserve.kvpool.core.sharding.replicas import Replicas
from pdserve.kvpool.core.store.index import NONE
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.protocol.slot_table import COMMITTED, QUARANTINED, RESERVED

HOP_S: Final = 1.5
"""How much longer a Get waits for other nodes than for tiers: they load pages from theirs first."""
SHUN_S: Final = 0.5
MAX_VIEWS: Final = 4
"""That one search follows; a pool that changes faster causes misses."""
MAX_AGE_S: Final = 1e9
MAX_PASSED: Final = 256
"""Replicas that are read, or of another class, in one search for those that go."""

OnCommit: TypeAlias = Callable[[list[int], float, list[Action]], None]


@dataclass(slots=True, eq=False)
class _Fetch:
    slot: int
    namespace: int
    key: bytes
    length_bytes: int
    sequence: int
    node: str  # that is asked
    others: list[str]  # that are asked next
    view: int  # that chose them
    views: int = 1
    void: bool = False  # its namespace was dropped or cleared, or the page erased
    late: bool = False
    waiting: dict[PendingGet, list[int]] = field(default_factory=dict)  # -> indices of the page in the Get


class Fetches:
    """Fetches for all sessions, for `gets` that wait. `on_commit(slots, now_s, out)` is called as pages
    become readable. `max_bytes`: of slots that are being filled.
    """

    def __init__(
        self,
        store: PageStore,
        ownership: Ownership,
        replicas: Replicas,
        gets: PendingGets,
        on_commit: OnCommit,
        max_bytes: int,
    ) -> None:
        self._store = store
        self._ownership = ownership
        self._replicas = replicas
        self._gets = gets
        self._on_commit = on_commit
        self._max_bytes = max_bytes
        self._fetches: dict[int, _Fetch] = {}  # by slot, void ones too
        self._by_name: dict[tuple[int, bytes], _Fetch] = {}
        self._bytes = 0
        self._written: dict[tuple[int, bytes], dict[PendingGet, list[int]]] = {}  # waited for, not fetched
        self._shunned: dict[str, float] = {}  # until when
        self._spare: OrderedDict[int, int] = OrderedDict()  # slot -> sequence of replicas, the oldest first
        self.fetched = 0
        self.missed = 0
        self.failed = 0
        self.refused = 0

    # --- a Get

    def begin(self, get: PendingGet, missing: Sequence[int], now_s: float, out: list[Action]) -> list[int]:
        """See `pending_gets.Source`."""
        if get.session.peer or not self._ownership.has_others:
            return list(missing)
        request, left = get.request, list[int]()
        length_bytes = sum(request.segment_bytes)
        sources = self._ownership.sources([request.keys[index] for index in missing])
        batches: dict[str, list[_Fetch]] = {}
        writing = self._store.index.namespace(request.namespace).writing
        for index, nodes in zip(missing, sources, strict=True):
            key = request.keys[index]
            fetch = self._by_name.get((request.namespace, key))
            if fetch is None and nodes and key in writing:
                self._written.setdefault((request.namespace, key), {}).setdefault(get, []).append(index)
                continue
            if fetch is None:
                usable = [node for node in nodes if not self._shuns(node, now_s)]
                fetch = self._fetch(request.namespace, key, length_bytes, usable, out) if usable else None
                if fetch is not None:
                    batches.setdefault(fetch.node, []).append(fetch)
            elif fetch.late or fetch.length_bytes != length_bytes:
                fetch = None
            if fetch is None:
                left.append(index)
            else:
                fetch.waiting.setdefault(get, []).append(index)
        self._send(batches, out)
        if len(left) < len(missing):
            get.deadline_s += HOP_S
        return left

    def _fetch(
        self, namespace: int, key: bytes, length_bytes: int, nodes: list[str], out: list[Action]
    ) -> _Fetch | None:
        slot_bytes = self._store.slots.class_of(length_bytes)
        pages = self._store.index.namespace(namespace)
        if slot_bytes is None or key in pages.committed:
            return None
        if self._bytes and self._bytes + slot_bytes > self._max_bytes:
            self.refused += 1
            return None
        self.make_room(slot_bytes, 1, out)
        slots = self._store.take(pages, [key], length_bytes, slot_bytes, out)
        if not slots:
            self.refused += 1
            return None
        slot, view = slots[0], self._ownership.views
        sequence = self._store.facts.sequence[slot]
        fetch = _Fetch(slot, namespace, key, length_bytes, sequence, nodes[0], nodes[1:], view)
        self._fetches[slot] = self._by_name[namespace, key] = fetch
        self._bytes += slot_bytes
        return fetch

    def _send(self, batches: dict[str, list[_Fetch]], out: list[Action]) -> None:
        offset = self._store.slots.offset
        for node, fetches in batches.items():
            by_kind: dict[tuple[int, int], list[_Fetch]] = {}
            for fetch in fetches:
                by_kind.setdefault((fetch.namespace, fetch.length_bytes), []).append(fetch)
            for (namespace, length_bytes), some in by_kind.items():
                slots = [fetch.slot for fetch in some]
                keys, offsets = [fetch.key for fetch in some], [offset(slot) for slot in slots]
                out.append(FetchPages(node, namespace, length_bytes, keys, slots, offsets))

    def leave(self, get: PendingGet, *, late: bool) -> None:
        """See `pending_gets.Source`. Nodes that are late are asked for nothing more for a while."""
        for key in get.request.keys:
            name = get.request.namespace, key
            fetch, waiting = self._by_name.get(name), self._written.get(name, {})
            if waiting.pop(get, None) and not waiting:
                del self._written[name]
            if fetch is not None and fetch.waiting.pop(get, []) and late:
                fetch.late = True
                self._shunned[fetch.node] = self._store.now_s + SHUN_S

    def _shuns(self, node: str, now_s: float) -> bool:
        until_s = self._shunned.get(node)
        if until_s is not None and until_s <= now_s:
            del self._shunned[node]
        return until_s is not None and until_s > now_s

    # --- its end

    def ended(self, event: PagesFetched, now_s: float, out: list[Action]) -> None:
        """The shell has finished writing into these slots."""
        batches: dict[str, list[_Fetch]] = {}
        ends = zip(event.fetch.slots, event.outcomes, event.checksums, event.ages_s, strict=True)
        for slot, outcome, checksum, age_s in ends:
            fetch = self._fetches[slot]
            if outcome == TAKEN and not fetch.void:
                self._came(fetch, checksum, age_s, now_s, out)
                continue
            if outcome == NO_ANSWER:
                self.failed += 1
                self._shunned[fetch.node] = now_s + SHUN_S
            if not fetch.void and self._ask_next(fetch, now_s):
                batches.setdefault(fetch.node, []).append(fetch)
                continue
            self.missed += outcome != NO_ANSWER
            self._end(fetch)
            self._store.give_back([slot], out)
            self._gets.arrived(fetch.waiting, NONE, now_s, out, from_tier=False)
        self._send(batches, out)

    def written(self, slots: Sequence[int], now_s: float, out: list[Action]) -> None:
        """Pages were committed in these slots."""
        for slot in slots if self._written else ():
            name = self._store.facts.namespace[slot], self._store.key_of(slot)
            self._gets.arrived(self._written.pop(name, {}), slot, now_s, out, from_tier=False)

    def _came(self, fetch: _Fetch, checksum: int, age_s: float, now_s: float, out: list[Action]) -> None:
        age_s = min(age_s, MAX_AGE_S) if age_s > 0 else 0.0  # also when it is no number
        slot = fetch.slot
        self._end(fetch)
        self._store.commit([slot], [checksum], now_s - age_s, out)
        self.fetched += 1
        self.spare(slot, now_s)
        self._on_commit([slot], now_s, out)
        self._gets.arrived(fetch.waiting, slot, now_s, out, from_tier=False)

    def _ask_next(self, fetch: _Fetch, now_s: float) -> bool:
        """Choose the node to ask next, if there is one, and anybody waits."""
        if not fetch.waiting:
            return False
        if fetch.view != self._ownership.views and fetch.views < MAX_VIEWS:
            fetch.view, fetch.views = self._ownership.views, fetch.views + 1
            [fetch.others] = self._ownership.sources([fetch.key])
        while fetch.others:
            fetch.node = fetch.others.pop(0)
            if not self._shuns(fetch.node, now_s):
                return True
        return False

    def _end(self, fetch: _Fetch) -> None:
        del self._fetches[fetch.slot]
        if not fetch.void:
            del self._by_name[fetch.namespace, fetch.key]
        self._bytes -= self._store.slots.slot_bytes(fetch.slot)

    def clear(self, namespace: int, now_s: float, out: list[Action]) -> None:
        """The namespace is cleared or dropped: what comes is void."""
        fetches = [fetch for fetch in self._by_name.values() if fetch.namespace == namespace]
        self.void([fetch.slot for fetch in fetches], now_s, out)
        for name in [name for name in self._written if name[0] == namespace]:
            self._gets.arrived(self._written.pop(name), NONE, now_s, out, from_tier=False)

    def void(self, slots: Sequence[int], now_s: float, out: list[Action]) -> None:
        """What is fetched into those of these slots is not wanted any more."""
        for fetch in [self._fetches[slot] for slot in slots if slot in self._fetches]:
            if fetch.void:
                continue
            fetch.void = True
            del self._by_name[fetch.namespace, fetch.key]
            self._store.quarantine(fetch.slot)
            waiting, fetch.waiting = fetch.waiting, {}
            self._gets.arrived(waiting, NONE, now_s, out, from_tier=False)

    # --- replicas that make room

    def spare(self, slot: int, now_s: float) -> None:
        """The page in this slot is elsewhere too: a replica from now on, and among the first to make room."""
        self._replicas.add(slot, now_s)
        self._spare.pop(slot, None)
        self._spare[slot] = self._store.facts.sequence[slot]

    def make_room(self, slot_bytes: int, count: int, out: list[Action]) -> None:
        """Have `count` slots of this class free, as far as replicas that nobody reads are in the way; the
        oldest of them go.
        """
        store, passed = self._store, dict[int, int]()
        lacking = 0 if store.sweeps else count - store.slots.available(slot_bytes, count)
        while self._spare and lacking > 0 and len(passed) < MAX_PASSED:
            slot, sequence = self._spare.popitem(last=False)
            if store.facts.sequence[slot] != sequence or slot not in self._replicas:
                continue  # it is gone, or this node's by now
            is_free = store.state(slot) == COMMITTED and not store.holds(slot)
            if is_free and store.slots.slot_bytes(slot) == slot_bytes:
                store.drop([slot], out)
                lacking -= 1
            else:
                passed[slot] = sequence
        for slot in reversed(passed):
            self._spare[slot] = passed[slot]
            self._spare.move_to_end(slot, last=False)

    # --- status, conservation

    def counters(self) -> dict[str, int]:
        return {
            "pages_fetched": self.fetched,
            "fetches_missed": self.missed,
            "fetches_failed": self.failed,
            "fetches_refused": self.refused,
        }

    def reserved_slots(self) -> list[int]:
        """The slots reserved by fetches, not by clients."""
        return [fetch.slot for fetch in self._fetches.values() if not fetch.void]

    def waited_for(self, get: PendingGet) -> int:
        """How many pages of the Get are being fetched, or written. For tests."""
        waiting = [*(fetch.waiting for fetch in self._fetches.values()), *self._written.values()]
        return sum(len(gets.get(get, ())) for gets in waiting)

    def check(self) -> None:
        """Assert that fetches own their slots. Slow: for tests."""
        for slot, fetch in self._fetches.items():
            assert self._store.state(slot) == (QUARANTINED if fetch.void else RESERVED)
            assert self._store.facts.sequence[slot] == fetch.sequence
            assert fetch.void == (self._by_name.get((fetch.namespace, fetch.key)) is not fetch)
        assert self._bytes == sum(self._store.slots.slot_bytes(slot) for slot in self._fetches)
        assert len(self._spare) <= 2 * self._store.slots.slots
