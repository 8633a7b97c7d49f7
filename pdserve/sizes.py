"""Sizes as people write them. Pure."""

from __future__ import annotations

import re
from typing import Annotated, TypeAlias

from msgspec import Meta

Size: TypeAlias = Annotated[int, Meta(extra={"size": True})]
"""Bytes. Where a file or a flag gives them, `settings.config_file` reads them by `parse_bytes`."""

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: int | str) -> int:
    """A size in bytes from 4096 or "4GiB", "512 MiB", "1.5GB". Raises ValueError, in words for a person."""
    if isinstance(value, int):
        return value
    match = _SIZE.fullmatch(value)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{value!r} is not a size: write a number of bytes, or one like '4GiB'")
    return int(float(match[1]) * unit)
