"""Each worker in turn, whatever its load."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.router.fleet import Worker
from pdserve.router.policies.base import Choice
from pdserve.router.schema import Facts


class RoundRobin:
    """Request n goes to worker n mod count."""

    def choose(self, facts: Facts, workers: Sequence[Worker], last_id: str | None) -> Choice:
        """The worker whose turn it is."""
        return Choice(workers[facts.turn % len(workers)], "round-robin")
