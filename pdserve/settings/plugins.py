"""What this and other packages add to pdserve by entry points: tiers, stores, places, policies."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pdserve.errors import ConfigError


def installed(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of a group, by name."""
    return _found(group, tuple(sys.path))


@cache
def _found(group: str, path: tuple[str, ...]) -> Mapping[str, EntryPoint]:
    """To look through all that is installed takes tens of milliseconds."""
    return {point.name: point for point in entry_points(group=group)}


def load(group: str, name: str, option: str, noun: str, *built_in: str) -> Any:
    """What the entry point `name` names. `option`: where the name was given; `noun`: what it is the name of;
    `built_in`: names that need no entry point, for the error. Raises ConfigError.
    """
    found = installed(group)
    if name not in found:
        names = ", ".join(sorted({*built_in, *found})) or "none"
        raise ConfigError(f"{option}: there is no {noun} '{name}'; installed are: {names}")
    try:
        return found[name].load()
    except (ImportError, AttributeError) as error:
        what = f"{option}: the {noun} '{name}' ({found[name].value}) cannot be loaded: {error}"
        raise ConfigError(f"{what}: install what it needs in this environment") from error
