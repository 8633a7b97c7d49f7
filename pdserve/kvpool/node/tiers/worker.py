"""The threads of one tier: one writer and some readers. They take actions and return events.

The writer works in the order of its queue. NodeState bounds the stores in the queue, and SPILL_BYTES bounds
pages that come from the tier above. After a failed write of such pages there is a pause (`Backoff`).
Loads are divided into pieces, so several readers share a batch and its first pages are answered first.

A tier must not raise. If it does, only the pages of that call are lost.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Final

from pdserve.kvpool.core.events import (
    ErasePages,
    Event,
    ForgetPages,
    ForgetSpace,
    LoadPages,
    OpenSpace,
    PagesErased,
    PagesFound,
    PagesGone,
    PagesLoaded,
    PagesStored,
    SlotPage,
    StorePages,
)
from pdserve.kvpool.protocol.page_bytes import Bytes1D
from pdserve.kvpool.tiers.base import (
    LOADED,
    READ_FAILED,
    STORED,
    WRITE_FAILED,
    Backoff,
    PageMemory,
    PageName,
    PutResult,
    ReadResult,
    SharedTier,
    Tier,
    TierPage,
    padded,
    page_memories,
)

logger = logging.getLogger(__name__)

IDLE_S: Final = 0.5  # interval of checks for background work
PIECE_BYTES: Final = 4 << 20  # loaded by one reader at a time, at least one page
SPILL_BYTES: Final = 64 << 20  # most bytes in progress from the tier above
SPILL_PIECE_BYTES: Final = 8 << 20

Job = Callable[[], None]


class TierWorker:
    """Runs a tier for a node. `memory`: the arena. `post` passes an event to the node, from any thread.
    `takes_all`: as a lower tier it gets every page that the first one stores.
    """

    def __init__(
        self,
        node: str,
        number: int,
        kind: str,
        tier: Tier,
        memory: Bytes1D,
        post: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        takes_all: bool = False,
    ) -> None:
        self.tier = tier
        self.below: TierWorker | None = None
        self.takes_all = takes_all
        self._where = f"node {node}: tier {kind}"
        self._number = number
        self._memory = memory
        self._post = post
        self._clock = clock
        self._writes: queue.Queue[Job | None] = queue.Queue()
        self._reads: queue.Queue[Job | None] = queue.Queue()
        self._threads: list[threading.Thread] = []
        self._stopping = False
        self._backoff = Backoff()
        self._spill_lock = threading.Lock()
        self._spill_bytes = 0

    def start(self, known: Collection[int], readers: int) -> None:
        """Start the threads. `known`: spaces whose pages count. `readers`: number of reading threads."""
        loops = [lambda: self._write_loop(known), *[self._read_loop] * readers]
        for loop in loops:
            thread = threading.Thread(target=loop, name=self._where, daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self, deadline_s: float) -> bool:
        """End the threads and close the tier. False: a thread hangs, and the tier stays open.

        `deadline_s`: a time of time.monotonic().
        """
        self._stopping = True
        self._writes.put(None)
        for _ in self._threads[1:]:
            self._reads.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            logger.warning("%s: it does not answer: left as it is", self._where)
            return False
        self.tier.close()
        return True

    # --- from the node's thread

    def store(self, action: StorePages) -> None:
        self._writes.put(lambda: self._store(action.pages))

    def load(self, action: LoadPages) -> None:
        for piece in _pieces(action.pages):
            self._reads.put(lambda piece=piece: self._load(piece))  # type: ignore[misc]

    def forget(self, action: ForgetPages) -> None:
        self._writes.put(lambda: self._forget(action.names))

    def forget_space(self, action: ForgetSpace) -> None:
        self._writes.put(lambda: self.tier.forget_space(action.space))

    def erase(self, action: ErasePages, problem: str = "") -> None:
        """Erase here and then in the tiers below: so what goes from here to there meanwhile is erased too.
        `problem`: of the tiers above.
        """
        self._writes.put(lambda: self._erase(action, problem))

    def open_space(self, action: OpenSpace) -> None:
        tier = self.tier
        if isinstance(tier, SharedTier):
            self._writes.put(lambda: tier.open_space(action.space))

    # --- the writer's thread

    def _write_loop(self, known: Collection[int]) -> None:
        self._guarded(lambda: self._scan(known))
        self._post(PagesFound(self._number, (), self.tier.used_bytes, last=True))
        more = False
        while True:
            try:
                job = self._writes.get(block=not more, timeout=IDLE_S)
            except queue.Empty:
                job = _nothing
            if job is None:
                return
            self._guarded(job)
            more = self._maintain()

    def _scan(self, known: Collection[int]) -> None:
        started_s = time.monotonic()
        count = 0
        for pages in self.tier.scan(known):
            if self._stopping:
                return
            count += len(pages)
            self._post(PagesFound(self._number, tuple(pages), self.tier.used_bytes))
        if count:
            took_ms = (time.monotonic() - started_s) * 1000
            logger.info("%s: found %d pages in %.0f ms", self._where, count, took_ms)

    def _maintain(self) -> bool:
        try:
            return self.tier.maintain() and not self._stopping
        except Exception:  # boundary: a tier's mistake must not end its thread
            logger.exception("%s: maintenance", self._where)
            return False

    def _store(self, pages: Sequence[SlotPage]) -> None:
        data = [self._slot(one) for one in pages]
        result = self._put([one.page for one in pages], data)
        self._copy_down([one.page for one in pages], data)
        slots = tuple(one.slot for one in pages)
        failed = WRITE_FAILED in result.statuses
        self._post(
            PagesStored(self._number, slots, tuple(result.statuses), self.tier.used_bytes, failed=failed)
        )

    def _copy_down(self, pages: Sequence[TierPage], data: Sequence[PageMemory]) -> None:
        """Give tiers below that take every page a copy of these, as far as they keep up."""
        below = self.below
        while below is not None and not self._stopping:
            if below.takes_all:
                below.copy(pages, data)
            below = below.below

    def copy(self, pages: Sequence[TierPage], data: Sequence[PageMemory]) -> None:
        """Queue copies of these pages. Called in another tier's thread."""
        tier, wanted = self.tier, list(zip(pages, data, strict=True))
        if isinstance(tier, SharedTier):  # other nodes may have stored them
            wanted = [one for one in wanted if not tier.has(_name(one[0]))]
        size = sum(padded(page.length_bytes) for page, _ in wanted)
        if not wanted or not self.take_in(size):
            return
        copies = page_memories([page.length_bytes for page, _ in wanted])
        for (page, source), to in zip(wanted, copies, strict=True):
            to[: page.length_bytes] = source[: page.length_bytes]
        found = [(page, to) for (page, _), to in zip(wanted, copies, strict=True)]
        self._writes.put(lambda: self._store_spilled(found, size))

    def _put(self, pages: Sequence[TierPage], data: Sequence[PageMemory]) -> PutResult:
        try:
            result = self.tier.put(pages, data)
            _check_length(result.statuses, pages)
        except Exception as error:  # boundary: each store must be reported
            logger.exception("%s: put", self._where)
            result = PutResult([WRITE_FAILED] * len(pages), repr(error))
        failing = self._backoff.failures > 0
        if WRITE_FAILED in result.statuses:
            self._backoff.failed(self._clock())
            if not failing:
                logger.warning("%s: cannot write for now, reads go on: %s", self._where, result.error)
        elif failing and STORED in result.statuses:
            self._backoff.worked()
            logger.info("%s: can write again", self._where)
        return result

    def _forget(self, names: Sequence[PageName]) -> None:
        self.tier.forget(names)
        # this also covers a page that came from above, or from the scan, after it was forgotten
        self._post(PagesGone(self._number, tuple(names), self.tier.used_bytes))

    def _erase(self, action: ErasePages, problem: str) -> None:
        try:
            found = self.tier.erase(action.space, action.keys)
        except Exception as error:  # boundary: each must be reported
            logger.exception("%s: erase", self._where)
            found = repr(error)
        # this also covers a page that came from above, or was found in a listing, after it was forgotten
        names = tuple(PageName(action.space, key, 0) for key in action.keys or ())
        self._post(PagesGone(self._number, names, self.tier.used_bytes))
        problem = "; ".join(filter(None, (problem, found)))
        if self.below is not None:
            self.below.erase(action, problem)
        else:
            self._post(PagesErased(action.ticket, problem))

    # --- from tier to tier

    def leaving(self, names: Sequence[PageName]) -> None:
        """Pass pages that the tier evicts to the tier below. Called in the writer's thread."""
        self._post(PagesGone(self._number, tuple(names), self.tier.used_bytes))
        below = self.below
        if below is None or self._stopping:
            return
        batch: list[PageName] = []
        for at, name in enumerate(names):
            batch.append(name)
            size = sum(padded(one.length_bytes) for one in batch)
            if size >= SPILL_PIECE_BYTES or at == len(names) - 1:
                if not below.take_in(size):
                    return  # the tier below is behind, or cannot write: the other pages are lost
                self._spill(below, batch, size)
                batch = []

    def _spill(self, below: TierWorker, names: list[PageName], size: int) -> None:
        found: list[tuple[TierPage, PageMemory]] = []
        try:
            memory = page_memories([name.length_bytes for name in names])
            for result, data in zip(self.tier.read(names, memory), memory, strict=True):
                if result.page is not None:
                    found.append((result.page, data))
        finally:  # this job alone gives back the bytes that it counted
            below._writes.put(lambda: below._store_spilled(found, size))

    def take_in(self, size: int) -> bool:
        """Whether `size` bytes may come from the tier above now. If so, they are counted.

        While the tier cannot write, one batch is accepted after each pause.
        """
        with self._spill_lock:
            if self._backoff.failures and (self._spill_bytes or self._clock() < self._backoff.retry_at_s):
                return False
            if self._stopping or self._spill_bytes + size > SPILL_BYTES:
                return False
            self._spill_bytes += size
            return True

    def _store_spilled(self, found: Sequence[tuple[TierPage, PageMemory]], size: int) -> None:
        try:
            result = self._put([page for page, _ in found], [data for _, data in found])
        finally:
            with self._spill_lock:
                self._spill_bytes -= size
        stored = tuple(
            page for (page, _), status in zip(found, result.statuses, strict=True) if status == STORED
        )
        failed = result.statuses.count(WRITE_FAILED)
        self._post(PagesFound(self._number, stored, self.tier.used_bytes, failed=failed))

    # --- from a shared tier's own thread

    def found(self, pages: Sequence[TierPage]) -> None:
        """Other nodes have stored these pages."""
        self._post(PagesFound(self._number, tuple(pages), self.tier.used_bytes))

    def lost(self, names: Sequence[PageName]) -> None:
        """Other nodes have removed these pages."""
        self._post(PagesGone(self._number, tuple(names), self.tier.used_bytes))

    # --- the readers' threads

    def _read_loop(self) -> None:
        while (job := self._reads.get()) is not None:
            if not self._stopping:
                self._guarded(job)

    def _load(self, pages: Sequence[SlotPage]) -> None:
        names = [_name(one.page) for one in pages]
        try:
            results = self.tier.read(names, [self._slot(one) for one in pages])
            _check_length(results, pages)
        except Exception:  # boundary: each load must be reported
            logger.exception("%s: read", self._where)
            results = [ReadResult(READ_FAILED)] * len(pages)
        checksums = tuple(
            result.page.checksum if result.status == LOADED and result.page is not None else 0
            for result in results
        )
        slots = tuple(one.slot for one in pages)
        self._post(PagesLoaded(self._number, slots, tuple(one.status for one in results), checksums))

    def _slot(self, page: SlotPage) -> PageMemory:
        return self._memory[page.offset : page.offset + padded(page.page.length_bytes)]

    def _guarded(self, job: Job) -> None:
        try:
            job()
        except Exception:  # boundary: a tier's mistake must not end its thread
            logger.exception("%s", self._where)


def _check_length(answers: Sequence[object], pages: Sequence[object]) -> None:
    """Raises TypeError: the node takes the answers for those of the pages, one by one."""
    if len(answers) != len(pages):
        raise TypeError(f"the tier gave {len(answers)} answers for {len(pages)} pages")


def _nothing() -> None:
    """An empty job: the writer then only does maintenance."""


def _pieces(pages: Sequence[SlotPage]) -> list[list[SlotPage]]:
    pieces: list[list[SlotPage]] = []
    size = PIECE_BYTES
    for page in pages:
        if size + page.page.length_bytes > PIECE_BYTES:
            pieces.append([])
            size = 0
        pieces[-1].append(page)
        size += page.page.length_bytes
    return pieces


def _name(page: TierPage) -> PageName:
    return PageName(page.space, page.key, page.length_bytes)
