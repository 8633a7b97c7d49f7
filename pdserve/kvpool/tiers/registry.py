"""The installed kinds of tiers (entry point group `pdserve.kvpool.tiers`)."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from pdserve.errors import ConfigError
from pdserve.kvpool.tiers.base import Tier, TierSettings

GROUP: Final = "pdserve.kvpool.tiers"


@cache
def _installed() -> dict[str, EntryPoint]:
    """The kinds by name. To look through all that is installed takes tens of milliseconds."""
    return {point.name: point for point in entry_points(group=GROUP)}


def open_tier(kind: str, settings: TierSettings) -> Tier:
    """Open a tier of an installed kind. Raises ConfigError, StartupError."""
    found = _installed()
    if kind not in found:
        installed = ", ".join(sorted(found)) or "none"
        raise ConfigError(
            f"node {settings.node}: tiers: there is no tier of kind '{kind}'; installed are: {installed}"
        )
    try:
        make = found[kind].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"node {settings.node}: tiers: the tier '{kind}' ({found[kind].value}) cannot be loaded: {error}"
        ) from error
    tier: Tier = make(settings)
    return tier
