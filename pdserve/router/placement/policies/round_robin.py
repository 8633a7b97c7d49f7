"""The policy `round_robin`: each worker in turn, independent of load."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.router.fleet.worker import Worker
from pdserve.router.placement.policies.base import Ask, Choice, PolicySettings


class RoundRobin:
    """Sends request n to worker n mod count."""

    needs_places = False

    def __init__(self, settings: PolicySettings) -> None:
        pass

    def choose(self, ask: Ask, workers: Sequence[Worker]) -> Choice:
        """The worker at index `ask.turn` mod count."""
        return Choice(workers[ask.turn % len(workers)], "round-robin")
