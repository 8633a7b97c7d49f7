"""Which elastic workers prefill at present, and which decode: a decision with hysteresis. Pure.

A duty is a preference of the router. A worker with another duty finishes what it has, and nothing restarts.
But a session's next turn finds less in the memory of another worker, and answers are slower beside prompts.
So duties change seldom:

- Of E workers, E · share should prefill, a number with a fraction. One worker changes when this number is
  more than 1/2 + MARGIN away from the number that prefills. So noise of less than MARGIN around any value
  changes nothing, once the number is settled.
- After a change there is no other one for `dwell_s`: at most 1 + T / dwell_s changes in a time T.
- When workers come or go, duties change at once only as far as some worker must answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

from pdserve.router.fleet.worker import Worker

MARGIN: Final = 0.25
"""Part of a worker. With 1/2 a whole number would not always be reached."""


class Duties:
    """The duties of one model's elastic workers. The others of those asked for decode."""

    def __init__(self, dwell_s: float) -> None:
        self._dwell_s = dwell_s
        self._quiet_until_s = float("-inf")
        self._known: set[str] = set()
        self.prefilling: frozenset[str] = frozenset()
        """Ids of the workers that prefill."""
        self.changes = 0
        """Workers that got the other duty, since the start."""

    def update(
        self, workers: Sequence[Worker], share: float | None, *, has_decode: bool, now_s: float
    ) -> frozenset[str]:
        """The ids of those of `workers` that prefill now.

        `share`: of them that should prefill; None: as many as now. `has_decode`: other workers answer too, so
        that all of these may prefill.
        """
        ids = {worker.id for worker in workers}
        if ids != self._known:
            self._join(workers, ids, share)
        most = len(workers) if has_decode else max(0, len(workers) - 1)
        while len(self.prefilling) > most:
            self._give(workers, prefill=False)
        if share is not None and now_s >= self._quiet_until_s:
            step = wanted_step(len(workers) * share, len(self.prefilling), most)
            if step:
                self._give(workers, prefill=step > 0)
                self._quiet_until_s = now_s + self._dwell_s
        return self.prefilling

    def _join(self, workers: Sequence[Worker], ids: Collection[str], share: float | None) -> None:
        """Take in new workers, each where it is missing most. Those that are gone have no duty."""
        prefilling = {id_ for id_ in self.prefilling if id_ in ids}
        known = sum(worker.id in self._known for worker in workers)
        for worker in workers:
            if worker.id not in self._known:
                known += 1
                if len(prefilling) + 1 <= round(known * (0.5 if share is None else share)):
                    prefilling.add(worker.id)
        self.prefilling, self._known = frozenset(prefilling), set(ids)

    def _give(self, workers: Sequence[Worker], *, prefill: bool) -> None:
        """Give the other duty to the worker that has least of its present one."""
        here = [worker for worker in workers if (worker.id in self.prefilling) is not prefill]
        work: Callable[[Worker], int] = (lambda w: w.answering) if prefill else (lambda w: w.queued_tokens)
        one = min(here, key=lambda worker: (work(worker), worker.id))
        self.prefilling ^= {one.id}
        self.changes += 1


def wanted_step(target: float, count: int, most: int) -> int:
    """By how much the number `count` of prefilling workers should change now: -1, 0 or 1. `target` is the
    number that should prefill, `most` the largest that may.
    """
    if count < most and target > count + 0.5 + MARGIN:
        return 1
    return -1 if count > 0 and target < count - 0.5 - MARGIN else 0
