"""Placement policies, found by name: those here, and those that other packages add by entry point."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Final

from pdserve.errors import ConfigError
from pdserve.router.placement.policies.affinity import Affinity
from pdserve.router.placement.policies.base import Ask, Choice, Policy, PolicySettings
from pdserve.router.placement.policies.cost_aware import CacheAware, LoadAware, PowerOfTwo
from pdserve.router.placement.policies.least_loaded import LeastLoaded
from pdserve.router.placement.policies.round_robin import RoundRobin
from pdserve.settings.plugins import installed, load

__all__ = ["POLICY_NAMES", "Ask", "Choice", "Policy", "PolicySettings", "make_policy"]

GROUP: Final = "pdserve.router.policies"
AFFINITY: Final = "affinity"
_BUILT_IN: Final[dict[str, Callable[[PolicySettings], Policy]]] = {
    "cache_aware": CacheAware,
    "least_loaded": LeastLoaded,
    "load_aware": LoadAware,
    "power_of_two": PowerOfTwo,
    "round_robin": RoundRobin,
}
POLICY_NAMES: Final = (AFFINITY, *_BUILT_IN)


def make_policy(name: str, settings: PolicySettings) -> Policy:
    """The policy called `name`. Raises ConfigError that suggests a similar name."""
    if name == AFFINITY:
        without_key = settings.stickiness.without_key
        if without_key == AFFINITY:
            raise ConfigError("'without_key' is for requests without a session; it cannot be 'affinity'")
        return Affinity(settings.stickiness, make_policy(without_key, settings))
    if name in _BUILT_IN:
        return _BUILT_IN[name](settings)
    if name not in (added := installed(GROUP)):
        known = (*POLICY_NAMES, *sorted(added))
        near = difflib.get_close_matches(name, known, n=1) or known[:1]
        raise ConfigError(f"unknown policy {name!r}; did you mean {near[0]!r}? ({', '.join(known)})")
    made: Policy = load(GROUP, name, "prefill_policy or decode_policy", "policy")(settings)
    return made
