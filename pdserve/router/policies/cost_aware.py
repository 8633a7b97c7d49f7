"""Policies that compare workers by the cost function (`pdserve.router.cost`)."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.router.cost import Cost, cost_of
from pdserve.router.policies.base import Ask, Choice, PolicySettings
from pdserve.router.prefixes import Cached
from pdserve.router.workers import Worker

_NOTHING = Cached()


class CacheAware:
    """The least cost, what each worker is thought to have of the prompt weighed against its load."""

    needs_places = True
    reason = "cache-aware"

    def __init__(self, settings: PolicySettings) -> None:
        self._weights = settings.weights

    def choose(self, ask: Ask, workers: Sequence[Worker]) -> Choice:
        """The cheapest worker; equals take turns."""
        count = len(workers)
        best = workers[ask.turn % count]
        least = self._cost(ask, best)
        for i in range(ask.turn + 1, ask.turn + count):
            worker = workers[i % count]
            cost = self._cost(ask, worker)
            if cost.total_ms < least.total_ms:
                best, least = worker, cost
        return Choice(best, self.reason, least.words())

    def _cost(self, ask: Ask, worker: Worker) -> Cost:
        cached = ask.places.cached(worker) if ask.places is not None and self.needs_places else _NOTHING
        leaves = ask.last_id is not None and ask.last_id != worker.id
        return cost_of(self._weights, worker, ask.prompt_tokens, cached, leaves=leaves)


class LoadAware(CacheAware):
    """The least cost with nothing cached: queued tokens, requests and free KV memory."""

    needs_places = False
    reason = "load-aware"


class PowerOfTwo(LoadAware):
    """The cheaper by load of two drawn at random: routers that see the same load do not all choose the same.

    Source: Mitzenmacher, "The power of two choices in randomized load balancing", 2001.
    """

    reason = "power-of-two"

    def choose(self, ask: Ask, workers: Sequence[Worker]) -> Choice:
        """One of two different workers, every pair equally likely."""
        count = len(workers)
        if count > 2:
            first = ask.draw % count
            second = (first + 1 + ask.draw // count % (count - 1)) % count
            workers = workers[first], workers[second]
        return super().choose(ask, workers)
