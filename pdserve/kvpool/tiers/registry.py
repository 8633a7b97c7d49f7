"""The installed kinds of tiers (entry point group `pdserve.kvpool.tiers`)."""

from __future__ import annotations

from typing import Final

from pdserve.kvpool.tiers.base import Tier, TierSettings
from pdserve.settings.plugins import load

GROUP: Final = "pdserve.kvpool.tiers"


def open_tier(kind: str, settings: TierSettings) -> Tier:
    """Open a tier of an installed kind. Raises ConfigError, StartupError."""
    tier: Tier = load(GROUP, kind, f"node {settings.node}: tiers", "tier of kind")(settings)
    return tier
