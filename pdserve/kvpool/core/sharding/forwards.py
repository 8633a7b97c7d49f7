"""Pages that clients write here and other nodes own: handed to their owners at once. Pure.

    Reserve, Commit      as for any page, in this node's memory
    committed            the page can be read here from now on; it joins its owner's queue, and the Commit
                         waits for it
    PushPages            a batch of one namespace for one owner, one under way for each
    PagesPushed          the owner has it: the Commit's mask says so; the page here is a replica (fetches.py)

So a page that was acknowledged is where every node looks for it. What an owner cannot take now (another
client writes it, it does not know this view yet, it does not answer) is offered again until `FORWARD_S` after
the commit. Then the Commit is answered without the page: it stays here as a replica, and is not offered any
more, unless the ring changes (handover.py). An owner that is full, or never takes it, ends it at once.

Until it is taken the page is held, so that it is not evicted. The bytes of all that wait are bounded: beyond
the bound a Reserve of other nodes' pages is told that this node is full.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from pdserve.kvpool.core.events import FAILED, LATER, TAKEN, Action, Answer, PagesPushed, PushPages
from pdserve.kvpool.core.sessions import PendingCommit
from pdserve.kvpool.core.sharding.ownership import Ownership
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.protocol.messages import MAX_BATCH_BYTES, MAX_PAGES, Committed

FORWARD_S: Final = 3.0
"""How long a Commit waits for the owners of its pages; clients wait longer."""
RETRY_S: Final = 0.05


@dataclass(slots=True, eq=False)
class _Page:
    """A page that waits for its owner. `index`: in the mask of its Commit."""

    slot: int
    sequence: int
    namespace: int
    key: bytes
    length_bytes: int
    deadline_s: float
    commit: PendingCommit
    index: int
    owner: str = ""


@dataclass(slots=True)
class _Owner:
    queue: deque[_Page] = field(default_factory=deque)
    out: dict[bytes, _Page] | None = None  # by key: the push under way
    not_before_s: float = 0.0


class Forwards:
    """`max_bytes`: of all pages that wait."""

    def __init__(self, store: PageStore, ownership: Ownership, max_bytes: int) -> None:
        self._store = store
        self._ownership = ownership
        self._max_bytes = max_bytes
        self._pages: OrderedDict[tuple[int, int], _Page] = OrderedDict()  # by slot and sequence
        self._owners: dict[str, _Owner] = {}
        self._bytes = 0
        self.next_deadline_s = float("inf")
        self.forwarded = 0
        self.failed = 0

    @property
    def is_full(self) -> bool:
        """Whether no more pages of other nodes may be written for now."""
        return self._bytes >= self._max_bytes

    def foreign(self, slots: Sequence[int]) -> set[int]:
        """Those of the slots whose pages other nodes own."""
        if self._ownership.alone or not slots:
            return set()
        ours = self._ownership.ours([self._store.key_of(slot) for slot in slots]).tolist()
        return {slot for slot, mine in zip(slots, ours, strict=True) if not mine}

    def begin(self, slot: int, commit: PendingCommit, index: int, now_s: float) -> None:
        """A client has committed this page. Its Commit waits, and is answered by the last of its pages."""
        facts = self._store.facts
        page = _Page(
            slot,
            facts.sequence[slot],
            facts.namespace[slot],
            self._store.key_of(slot),
            facts.length_bytes[slot],
            now_s + FORWARD_S,
            commit,
            index,
        )
        self._pages[slot, page.sequence] = page
        self._bytes += self._store.slots.slot_bytes(slot)
        self._store.hold(slot)
        self._enqueue(page)
        self._expect(now_s)

    def pushed(self, event: PagesPushed, now_s: float, out: list[Action]) -> None:
        """A push to an owner has ended."""
        owner = self._owners[event.push.node]
        under_way, owner.out = owner.out or {}, None
        for key, outcome in zip(event.push.keys, event.outcomes, strict=True):
            page = under_way[key]
            if (page.slot, page.sequence) not in self._pages:
                continue  # its time was over meanwhile
            if outcome in (LATER, FAILED):
                owner.not_before_s = now_s + RETRY_S
                self._enqueue(page)
            else:
                self._end(page, ok=outcome == TAKEN, out=out)
        self._expect(now_s)

    def view_changed(self, now_s: float, out: list[Action]) -> None:
        """Owners are others now."""
        for owner in self._owners.values():
            owner.queue.clear()
            owner.not_before_s = 0.0
        under_way = {id(page) for owner in self._owners.values() for page in (owner.out or {}).values()}
        for page in list(self._pages.values()):
            if id(page) not in under_way:
                self._enqueue(page)
        self._owners = {name: o for name, o in self._owners.items() if o.queue or o.out is not None}
        self._expect(now_s)

    def pump(self, now_s: float, out: list[Action]) -> None:
        """Go on with what is due."""
        self.next_deadline_s = float("inf")
        while self._pages and (page := next(iter(self._pages.values()))).deadline_s <= now_s:
            self._end(page, ok=False, out=out)
        for name, owner in self._owners.items():
            if owner.out is not None or not owner.queue:
                continue
            if owner.not_before_s > now_s:
                self._expect(owner.not_before_s)
                continue
            self._push(name, owner, now_s, out)
        if self._pages:
            self._expect(next(iter(self._pages.values())).deadline_s)

    def disconnected(self, connection: int) -> None:
        """Nobody is left to answer; the pages go to their owners all the same."""
        for page in self._pages.values():
            if page.commit.connection == connection:
                page.commit.connection = -1

    def _push(self, name: str, owner: _Owner, now_s: float, out: list[Action]) -> None:
        batch, others, total_bytes = list[_Page](), list[_Page](), 0
        while owner.queue and len(batch) < MAX_PAGES and len(others) < MAX_PAGES:
            page = owner.queue.popleft()
            if (page.slot, page.sequence) not in self._pages:
                continue
            fits = not batch or total_bytes + page.length_bytes <= MAX_BATCH_BYTES
            if batch and (page.namespace != batch[0].namespace or not fits):
                others.append(page)
                continue
            batch.append(page)
            total_bytes += page.length_bytes
        owner.queue.extendleft(reversed(others))
        if name == self._ownership.name:  # it is this node's own by now
            for page in batch:
                self._end(page, ok=True, out=out)
            self._expect(now_s)
        elif batch:
            owner.out = {page.key: page for page in batch}
            keys, lengths = [page.key for page in batch], [page.length_bytes for page in batch]
            out.append(PushPages(name, batch[0].namespace, keys, lengths, written=True))

    def _enqueue(self, page: _Page) -> None:
        ring = self._ownership.ring
        if ring is None or not ring.nodes:
            return  # its time ends it
        page.owner = ring.owner(page.key).node
        self._owners.setdefault(page.owner, _Owner()).queue.append(page)

    def _end(self, page: _Page, *, ok: bool, out: list[Action]) -> None:
        del self._pages[page.slot, page.sequence]
        self._bytes -= self._store.slots.slot_bytes(page.slot)
        self._store.let_go(page.slot, out)
        self.forwarded += ok
        self.failed += not ok
        commit = page.commit
        commit.mask[page.index] = ok
        commit.missing -= 1
        if not commit.missing and commit.connection >= 0:
            out.append(Answer(commit.connection, Committed(commit.request_id, bytes(commit.mask))))

    def _expect(self, deadline_s: float) -> None:
        self.next_deadline_s = min(self.next_deadline_s, deadline_s)

    def counters(self) -> dict[str, int]:
        return {
            "pages_forwarded": self.forwarded,
            "forwards_failed": self.failed,
            "pages_to_forward": len(self._pages),
        }

    def check(self) -> None:
        """Assert that every page is held and waits for something. Slow: for tests."""
        assert self._bytes == sum(self._store.slots.slot_bytes(page.slot) for page in self._pages.values())
        for page in self._pages.values():
            assert self._store.holds(page.slot)
            assert page.commit.missing > 0
        assert not self._pages or self.next_deadline_s < float("inf"), "it would wait for good"
