"""The worker with the fewest requests in flight; equals take turns."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.router.fleet import Worker
from pdserve.router.policies.base import Choice
from pdserve.router.schema import Facts


class LeastLoaded:
    """Fewest requests in flight from this router."""

    def choose(self, facts: Facts, workers: Sequence[Worker], last_id: str | None) -> Choice:
        """The least loaded worker, searched from `turn` on so that equals take turns."""
        count = len(workers)
        best = workers[facts.turn % count]
        if count > 1:
            for i in range(facts.turn + 1, facts.turn + count):
                worker = workers[i % count]
                if worker.in_flight < best.in_flight:
                    best = worker
        return Choice(best, "least-loaded")
