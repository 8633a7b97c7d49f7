"""Storage of pages outside memory: the `Tier` contract, and the kinds of tiers. `open_tier` opens one.

The package knows files and devices, but no node. It may import: pdserve.kvpool.protocol, pdserve.sizes.
"""

from __future__ import annotations

from typing import Final

from pdserve.kvpool.tiers.base import Tier, TierSettings
from pdserve.settings.plugins import load

GROUP: Final = "pdserve.kvpool.tiers"


def open_tier(kind: str, settings: TierSettings) -> Tier:
    """Open a tier of an installed kind (an entry point of GROUP). Raises ConfigError, StartupError."""
    tier: Tier = load(GROUP, kind, f"node {settings.node}: tiers", "tier of kind")(settings)
    return tier
