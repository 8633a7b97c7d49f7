"""The worker with the fewest requests; equals take turns."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.router.fleet.worker import Worker
from pdserve.router.placement.policies.base import Ask, Choice, PolicySettings


class LeastLoaded:
    """Fewest requests, from this router and, as far as the workers say, from others."""

    needs_places = False

    def __init__(self, settings: PolicySettings) -> None:
        pass

    def choose(self, ask: Ask, workers: Sequence[Worker]) -> Choice:
        """The least loaded worker, searched from `turn` on so that equals take turns."""
        count = len(workers)
        best = workers[ask.turn % count]
        if count > 1:
            least = best.load
            for i in range(ask.turn + 1, ask.turn + count):
                worker = workers[i % count]
                if worker.load < least:
                    best, least = worker, worker.load
        return Choice(best, "least-loaded")
