"""Which model an alias means for a conversation. Pure.

Weighted rendezvous hashing: each model scores -ln(u) / weight, where u is the hash of conversation and model
as a number in (0, 1), and the lowest score is taken. So each model gets the share of its weight, routers
agree without talking to each other, and a change of weights moves conversations only to models whose share
grew. Those that a router has in its session table stay even then. Source: Schindelhauer & Schomaker,
"Weighted distributed hash tables", 2005.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import xxhash

from pdserve.router.config.aliases import Alias
from pdserve.router.fleet.models import DEFAULT_MODEL


class Aliases:
    """All aliases of a router."""

    def __init__(self, aliases: Iterable[Alias] = (), default: str = "") -> None:
        """`default`: the model of requests that name none; it may be an alias."""
        self.models: Mapping[str, Mapping[str, float]] = {
            alias.name: {model: weight for model, weight in alias.models.items() if weight > 0}
            for alias in aliases
        }
        """Name → the models behind it, and their weights."""
        self._default = default

    def named(self, requested: str | None) -> str | None:
        """The alias that a request means; None: it means a model."""
        if requested in self.models:
            return requested
        means_default = requested in (None, "", DEFAULT_MODEL)
        return self._default if means_default and self._default in self.models else None

    def choose(self, alias: str, key: str, ready: Mapping[str, str], last: str = "") -> str:
        """The model, or BASE:ADAPTER, for the conversation of this key. `last`: the served model that
        answered its last turn, if known. `ready`: of the models behind the alias those that can answer, each
        with the served model that it is. Where none can, all may be chosen.
        """
        weights = self.models[alias]
        among = [model for model in weights if model in ready] or list(weights)
        same = [model for model in among if ready.get(model) == last]
        if last and len(same) == 1:  # of several adapters of one model, its worker does not tell which it was
            return same[0]
        return min(among, key=lambda model: (_distance(key, model) / weights[model], model))


def _distance(key: str, model: str) -> float:
    """Exponentially distributed over keys, with mean 1."""
    hashed = xxhash.xxh3_64_intdigest(f"{key}\0{model}".encode("utf-8", "surrogatepass"))
    return -math.log((hashed + 1) / 2.0**64)
