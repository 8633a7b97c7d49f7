"""A placement policy: workers on the router's own host first, unless they have much more to do."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.router.fleet.worker import Worker
from pdserve.router.placement.policies import Ask, Choice, PolicySettings

OWN_HOSTS = ("127.0.0.1", "localhost")
MORE_REQUESTS = 4


class OwnHostFirst:
    """A `Policy`. It holds no lock, clock or random source."""

    needs_places = False  # it does not look at what workers have of the prompt

    def __init__(self, settings: PolicySettings) -> None:
        pass

    def choose(self, ask: Ask, workers: Sequence[Worker]) -> Choice:
        """`workers` are all usable, and never empty."""
        least = min(workers, key=lambda worker: worker.in_flight)
        near = [worker for worker in workers if worker.host in OWN_HOSTS]
        if near:
            best = min(near, key=lambda worker: worker.in_flight)
            if best.in_flight <= least.in_flight + MORE_REQUESTS:
                return Choice(best, "own-host")
        return Choice(least, "least-loaded", f"requests={least.in_flight}")
