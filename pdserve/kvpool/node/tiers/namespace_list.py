"""The list of namespaces on disk, which names the valid spaces after a reboot. One thread writes it durably.

The first tier keeps the list. Another tier may have an older list, if it was the first tier before. That list
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
from collections.abc import Callable, Sequence

from pdserve.kvpool.core.events import Event, NamespacesSaved
from pdserve.kvpool.tiers.base import Backoff, Tier

logger = logging.getLogger(__name__)


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
