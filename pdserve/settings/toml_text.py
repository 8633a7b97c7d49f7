"""Configuration tables as TOML text. The standard library reads TOML and does not write it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w


def to_toml(tables: Mapping[str, Any]) -> str:
    """TOML text that `tomllib` reads back as `tables`. Paths become strings, None is left out.

    Raises TypeError for a value that TOML has no form for.
    """
    return tomli_w.dumps(_plain(tables))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value
