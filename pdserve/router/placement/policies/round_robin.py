"""Each worker in turn, whatever its load."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.router.fleet.worker import Worker
from pdserve.router.placement.policies.base import Ask, Choice, PolicySettings


class RoundRobin:
    """Request n goes to worker n mod count."""

    needs_places = False

    def __init__(self, settings: PolicySettings) -> None:
        pass

    def choose(self, ask: Ask, workers: Sequence[Worker]) -> Choice:
        """The worker whose turn it is."""
        return Choice(workers[ask.turn % len(workers)], "round-robin")
