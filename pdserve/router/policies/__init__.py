"""Placement policies, found by name."""

from __future__ import annotations

import difflib

from pdserve.errors import ConfigError
from pdserve.router.config import Session
from pdserve.router.policies.affinity import Affinity
from pdserve.router.policies.base import Choice, Policy
from pdserve.router.policies.least_loaded import LeastLoaded
from pdserve.router.policies.round_robin import RoundRobin

__all__ = ["POLICY_NAMES", "Choice", "Policy", "make_policy"]

POLICY_NAMES = ("affinity", "least_loaded", "round_robin")


def make_policy(name: str, session: Session) -> Policy:
    """The policy called `name`. Raises ConfigError naming the nearest one that exists."""
    if name == "affinity":
        return Affinity(
            LeastLoaded(),
            overload_factor=session.overload_factor,
            overload_min_requests=session.overload_min_requests,
        )
    if name == "least_loaded":
        return LeastLoaded()
    if name == "round_robin":
        return RoundRobin()
    near = difflib.get_close_matches(name, POLICY_NAMES, n=1) or POLICY_NAMES[:1]
    raise ConfigError(f"unknown policy {name!r}; did you mean {near[0]!r}? ({', '.join(POLICY_NAMES)})")
