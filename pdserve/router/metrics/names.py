"""Words that label values are made of, and how a metric is declared. Pure.

Label values are bounded: routes are the router's own, statuses HTTP's, reasons, outcomes, parts, tiers and
turns words of the code; workers and models as many as there are, tenants as many as the keys file names.
"""

from __future__ import annotations

from typing import Any, Final

from pdserve.metric import Definition, Labels

PREFIX: Final = "pdserve_router_"

PARTS: Final = ("queue", "settle", "prefill", "publish", "pull", "decode", "router")
"""Of the time to a stream's first token, in their order; in sum they are all of it."""
CACHES: Final = ("device", "host", "pool")
TIERS: Final = (*CACHES, "computed")
"""Where a worker had a prompt's tokens from. pool: a pool node, of its memory or a tier below it."""


def counter(labels: Labels, says: str, *, name: str = "") -> Any:
    """Declares a counter as the default of an attribute. `name`: another one than the attribute's."""
    return Definition(name, "counter", labels, says, PREFIX)


def gauge(labels: Labels, says: str, *, name: str = "") -> Any:
    """Declares a gauge."""
    return Definition(name, "gauge", labels, says, PREFIX)


def histogram(labels: Labels, says: str, *, name: str = "") -> Any:
    """Declares a histogram of seconds."""
    return Definition(name, "histogram", labels, says, PREFIX)


_TURNS: Final = ("none", "1", "2", "3", *("4-7",) * 4, *("8-15",) * 8, "16+")


def turn_label(turn: int) -> str:
    """The label of a session's so manieth turn, from 1; 0: no session."""
    return _TURNS[turn] if turn < len(_TURNS) else _TURNS[-1]
