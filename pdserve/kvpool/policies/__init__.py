"""Orders of eviction. A policy suggests a victim, the store decides. `make_policy` makes one by name.

Pure. May import: nothing of the pool.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Final

from pdserve.errors import ConfigError
from pdserve.kvpool.policies.base import EvictionPolicy, Links
from pdserve.kvpool.policies.orders import Arc, Fifo, Lfu, Lru, Ttl

_MAKERS: Final[dict[str, Callable[[Links], EvictionPolicy]]] = {
    "arc": Arc,
    "fifo": Fifo,
    "lfu": Lfu,
    "lru": Lru,
}
POLICIES: Final = (*_MAKERS, "ttl")
KEEP: Final = "keep"
"""No order: pages of such a namespace are never evicted, and writes beyond its quota or the memory are
refused. The store sees to it; their order of use is kept as by lru, for what is written to tiers first."""


def check_policy(name: str, ttl_s: float | None) -> None:
    """Raises ConfigError, in words for a person, when `make_policy` could not make it."""
    if name not in (*POLICIES, KEEP):
        near = difflib.get_close_matches(name.lower(), POLICIES, n=1, cutoff=0.0)
        raise ConfigError(
            f"'{name}' is no eviction policy: choose one of {', '.join((*POLICIES, KEEP))} "
            f"(the nearest is '{near[0]}')"
        )
    if ttl_s is not None and not ttl_s > 0:
        raise ConfigError(f"ttl_s is {ttl_s}: it must be above 0, or absent when pages live on")
    if name == "ttl" and ttl_s is None:
        raise ConfigError("the policy 'ttl' evicts the page that ends first: set ttl_s, or choose another")


def make_policy(name: str, links: Links, ttl_s: float | None = None) -> EvictionPolicy:
    """A new policy. Raises ConfigError for an unknown name, or without the `ttl_s` that 'ttl' needs."""
    check_policy(name, ttl_s)
    if name == "ttl":
        assert ttl_s is not None
        return Ttl(links, ttl_s)
    return Lru(links) if name == KEEP else _MAKERS[name](links)
