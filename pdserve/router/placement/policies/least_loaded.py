"""The policy `least_loaded`: the worker with the fewest requests."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.router.fleet.worker import Worker
from pdserve.router.placement.policies.base import Ask, Choice, PolicySettings


class LeastLoaded:
    """Counts this router's requests, and those of other routers as far as workers report them."""

    needs_places = False

    def __init__(self, settings: PolicySettings) -> None:
        pass

    def choose(self, ask: Ask, workers: Sequence[Worker]) -> Choice:
        """The least loaded worker. The search starts at `turn`, so equal workers alternate."""
        count = len(workers)
        best = workers[ask.turn % count]
        if count > 1:
            least = best.load
            for i in range(ask.turn + 1, ask.turn + count):
                worker = workers[i % count]
                if worker.load < least:
                    best, least = worker, worker.load
        return Choice(best, "least-loaded")
