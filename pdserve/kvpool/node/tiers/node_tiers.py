"""The tiers of one node: opened in order at its start, with one worker each, and stopped at its end.

After `pdserve pool upgrade` a node continues without a tier that it cannot open: the earlier program may
still hold a tier that hangs. The next start opens the tier again.

**The list of namespaces** on disk names the valid spaces after a reboot. One thread writes it durably. The
first tier keeps the list. Another tier may have an older list, if it was the first tier before. That list
is removed once the first tier has the newest one: an old list would make voided pages valid again. Of several
waiting lists only the newest is written. A failed write is tried again after a pause.

A node serves before its first list is written. If it ends before that, the next start uses the older lists,
as if this start had not been. No promise is broken: a clear or drop is answered `Done` only after a list
that has it was written (core/durable_answers.py). A tier that is away meanwhile keeps its older list, which
counts again if the tier comes back without the one that has the newer list.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from pdserve.errors import ConfigError, PdserveError
from pdserve.kvpool.core.events import (
    ErasePages,
    Event,
    ForgetPages,
    ForgetSpace,
    LoadPages,
    NamespacesSaved,
    OpenSpace,
    SaveNamespaces,
    StorePages,
)
from pdserve.kvpool.core.tiering.coordinator import facts_of
from pdserve.kvpool.core.tiering.tier_index import TieringLimits, TierSpec
from pdserve.kvpool.namespaces.catalog import Namespaces, take_over
from pdserve.kvpool.node.config import PoolNodeConfig, TierConfig
from pdserve.kvpool.node.tiers.worker import TierWorker
from pdserve.kvpool.protocol.page_bytes import Bytes1D
from pdserve.kvpool.tiers import open_tier
from pdserve.kvpool.tiers.base import Backoff, SharedTier, SpaceFacts, Tier, TierSettings

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S: Final = 5.0
CLAIM_TIMEOUT_S: Final = 3.0  # wait until the earlier node has released all tiers
CLAIM_POLL_S: Final = 0.02
LOAD_SHARE: Final = 0.25  # most of the arena that loads from tiers may fill at a time
WATERMARK: Final = 0.8  # used share of memory above which cold pages are written to a tier
MAX_GONE: Final = 1024  # spaces whose facts are kept for a while


class NodeTiers:
    """All tiers of a node. Opening is quick; `start` scans their pages in the background."""

    def __init__(
        self, config: PoolNodeConfig, memory: Bytes1D, namespaces: Namespaces, *, takes_over: bool = False
    ) -> None:
        """Raises ConfigError or StartupError, unless it takes over from a running node."""
        self._config = config
        self._deliver: Callable[[Event], None] | None = None
        self._facts: dict[int, SpaceFacts] = {}  # by space
        self._gone: deque[int] = deque()
        self._opened: list[TierConfig] = []
        self._workers: list[TierWorker] = []
        claim_until_s = time.monotonic() + CLAIM_TIMEOUT_S
        try:
            for tier in config.tiers:
                worker = self._claim(tier, memory, claim_until_s) if takes_over else self._open(tier, memory)
                if worker is not None:
                    self._opened.append(tier)
                    self._workers.append(worker)
        except PdserveError:
            self._close()
            raise
        for above, below in zip(self._workers, self._workers[1:], strict=False):
            above.below = below
        self.namespaces = self._take_over(namespaces, fresh=config.fresh and not takes_over)
        self._facts.update((one.space, facts_of(one)) for one in self.namespaces)
        # which pages count in the scans: actions tell the tiers of what was voided or opened since, in order
        self._known = frozenset(self._facts)
        tiers = [worker.tier for worker in self._workers]
        self._list_writer = NamespaceListWriter(config.name, tiers, self._post) if tiers else None

    def _take_over(self, namespaces: Namespaces, *, fresh: bool) -> Namespaces:
        """The newest list of namespaces: the memory's, or that of a tier."""
        node = self._config.name
        lists = [worker.tier.namespaces() for worker in self._workers]
        found, problems = take_over(namespaces, lists, time.time_ns() // 1000)
        for problem in problems:
            logger.warning("node %s: tiers: pages are dropped: %s", node, problem)
        for number in found.numbers if fresh else ():
            found.clear(number)
        return found

    def _claim(self, config: TierConfig, memory: Bytes1D, until_s: float) -> TierWorker | None:
        """Open the tier. None: it cannot be opened in time. Blocks."""
        while True:
            try:
                return self._open(config, memory)
            except PdserveError as error:
                if isinstance(error, ConfigError) or time.monotonic() >= until_s:
                    logger.warning("%s: the node goes on without this tier until its next start", error)
                    return None
            time.sleep(CLAIM_POLL_S)

    def _open(self, config: TierConfig, memory: Bytes1D) -> TierWorker:
        number = len(self._workers)
        settings = TierSettings(
            *(self._config.name, config.path, config.capacity_bytes, config.options),
            leaving=lambda names: self._workers[number].leaving(names),
            facts=self._facts.get,
            found=lambda pages: self._workers[number].found(pages),
            lost=lambda names: self._workers[number].lost(names),
        )
        tier = open_tier(config.kind, settings)
        takes_all = config.write == "all"
        return TierWorker(
            self._config.name, number, config.kind, tier, memory, self._post, takes_all=takes_all
        )

    @property
    def specs(self) -> list[TierSpec]:
        """For NodeState."""
        return [
            TierSpec(
                f"{tier.kind}:{tier.path}",
                tier.kind,
                tier.capacity_bytes,
                tier.write,
                shared=isinstance(worker.tier, SharedTier),
            )
            for tier, worker in zip(self._opened, self._workers, strict=True)
        ]

    @property
    def limits(self) -> TieringLimits:
        """For NodeState."""
        return TieringLimits(
            watermark=WATERMARK,
            load_bytes=int(self._config.capacity * LOAD_SHARE),
            promotion_timeout_s=self._config.promotion_timeout_s,
        )

    def start(self, deliver: Callable[[Event], None]) -> None:
        """Start the threads. `deliver` takes events from any thread."""
        self._deliver = deliver
        if self._list_writer is not None:
            self._list_writer.start(self.namespaces.dump(), self.namespaces.revision)
        for worker, config in zip(self._workers, self._opened, strict=True):
            worker.start(self._known, config.threads)

    def stop(self) -> None:
        """Stop all threads within STOP_TIMEOUT_S. Blocks."""
        if self._deliver is None:
            self._close()
            return
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        hangs = self._list_writer is not None and not self._list_writer.stop(deadline_s)
        for worker in self._workers[1 if hangs else 0 :]:  # the list is written to the first tier
            worker.stop(deadline_s)

    def acts(self) -> dict[type, Callable[[Any], None]]:
        """The handlers of the actions that concern tiers, by type."""
        return {
            StorePages: lambda action: self._workers[action.tier].store(action),
            LoadPages: lambda action: self._workers[action.tier].load(action),
            ForgetPages: lambda action: self._workers[action.tier].forget(action),
            ForgetSpace: self._forget_space,
            ErasePages: lambda action: self._workers[0].erase(action),
            OpenSpace: self._open_space,
        }

    def save_namespaces(self, action: SaveNamespaces) -> None:
        """Store the list for a start after a reboot. NamespacesSaved follows, if there are tiers."""
        if self._list_writer is not None:
            self._list_writer.save(action.text, action.revision)

    def _forget_space(self, action: ForgetSpace) -> None:
        for worker in self._workers:
            worker.forget_space(action)
        self._gone.append(action.space)  # what waits in the tiers' queues may still name it
        if len(self._gone) > MAX_GONE:
            self._facts.pop(self._gone.popleft(), None)

    def _open_space(self, action: OpenSpace) -> None:
        self._facts[action.space] = action.facts
        for worker in self._workers:
            worker.open_space(action)

    def _post(self, event: Event) -> None:
        assert self._deliver is not None
        self._deliver(event)

    def _close(self) -> None:
        for worker in self._workers:
            worker.tier.close()


class NamespaceListWriter:
    """`tiers`: at least one, top tier first. `post` passes an event to the node, from any thread."""

    def __init__(
        self,
        node: str,
        tiers: Sequence[Tier],
        post: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._where = f"node {node}: list of namespaces"
        self._first = tiers[0]
        self._others = list(tiers[1:])  # tiers that may have an older list
        self._post = post
        self._clock = clock
        self._changed = threading.Condition()
        self._newest: tuple[str, int] | None = None  # waiting text and revision
        self._stopping = False
        self._backoff = Backoff()
        self._thread: threading.Thread | None = None

    def start(self, text: str, revision: int) -> None:
        """Start the thread, and write this list first."""
        self.save(text, revision)
        self._thread = threading.Thread(target=self._run, name=self._where, daemon=True)
        self._thread.start()

    def save(self, text: str, revision: int) -> None:
        """Queue this list to be written. Does not wait."""
        with self._changed:
            self._newest = text, revision
            self._changed.notify()

    def stop(self, deadline_s: float) -> bool:
        """Write a waiting list and end the thread. False: the tier hangs. `deadline_s`: time.monotonic()."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is None:
            return True
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        failed: tuple[str, int] | None = None
        while True:
            with self._changed:
                while self._newest is None and not self._stopping:
                    pause_s = None if failed is None else max(0.0, self._backoff.retry_at_s - self._clock())
                    if not self._changed.wait(pause_s) and failed is not None:
                        break
                job, self._newest = self._newest or failed, None
                if job is None or (self._stopping and job is failed):
                    return
            failed = None if self._save(*job) else job

    def _save(self, text: str, revision: int) -> bool:
        try:
            problem = self._first.save_namespaces(text) or self._remove_others()
        except Exception as error:  # boundary: each list must be reported
            logger.exception("%s", self._where)
            problem = repr(error)
        if problem:
            if not self._backoff.failures:
                logger.warning(
                    "%s: not written, what is dropped or cleared may come back at a reboot: %s",
                    self._where,
                    problem,
                )
            self._backoff.failed(self._clock())
        elif self._backoff.failures:
            logger.info("%s: written again", self._where)
            self._backoff.worked()
        self._post(NamespacesSaved(revision, problem))
        return not problem

    def _remove_others(self) -> str:
        while self._others:
            problem = self._others[-1].save_namespaces(None)
            if problem:
                return problem
            self._others.pop()
        return ""
