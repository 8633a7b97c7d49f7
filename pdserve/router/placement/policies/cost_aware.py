"""Policies that compare workers by the cost function (`pdserve.router.placement.cost`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pdserve.router.fleet.worker import Worker
from pdserve.router.placement.cost import cost_ms, cost_words
from pdserve.router.placement.policies.base import Ask, Choice, PolicySettings
from pdserve.router.placement.prefix_index import NOTHING, Cached


class CacheAware:
    """Takes the lowest cost: estimated cached tokens of the prompt against load."""

    needs_places = True
    reason = "cache-aware"

    def __init__(self, settings: PolicySettings) -> None:
        self._weights = settings.weights

    def choose(self, ask: Ask, workers: Sequence[Worker]) -> Choice:
        """The worker with the lowest cost. Equal workers alternate."""
        count, weights = len(workers), self._weights
        best, best_cached, least_ms = workers[0], NOTHING, math.inf
        for i in range(ask.turn, ask.turn + count):
            worker = workers[i % count]
            cached = self._cached(ask, worker)
            total_ms = cost_ms(weights, worker, ask.prompt_tokens, cached)
            if total_ms < least_ms:
                best, best_cached, least_ms = worker, cached, total_ms
        cause = "" if best_cached is NOTHING else "prefix"
        return Choice(best, self.reason, cost_words(least_ms, best, ask.prompt_tokens, best_cached), cause)

    def _cached(self, ask: Ask, worker: Worker) -> Cached:
        return NOTHING if ask.places is None else ask.places.cached(worker)


class LoadAware(CacheAware):
    """Takes the lowest cost without caches: queued tokens, requests and free KV memory."""

    needs_places = False
    reason = "load-aware"

    def _cached(self, ask: Ask, worker: Worker) -> Cached:
        return NOTHING


class PowerOfTwo(LoadAware):
    """Takes the less loaded of two workers drawn at random, so several routers do not all choose the same.

    Source: Mitzenmacher, "The power of two choices in randomized load balancing", 2001.
    """

    reason = "power-of-two"

    def choose(self, ask: Ask, workers: Sequence[Worker]) -> Choice:
        """The better of two different workers. Every pair is equally likely."""
        count = len(workers)
        if count > 2:
            first = ask.draw % count
            second = (first + 1 + ask.draw // count % (count - 1)) % count
            workers = workers[first], workers[second]
        return super().choose(ask, workers)
