"""Tables to TOML text: the standard library reads TOML and does not write it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(tables: Mapping[str, Any]) -> str:
    """TOML text that `tomllib` reads back as `tables`; paths become strings, keys whose value is None are
    left out.

    Raises TypeError for a value TOML has no form for.
    """
    return "\n".join(_lines(tables, ())).lstrip("\n") + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    sub_tables = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    for key, value in table.items():
        if key not in sub_tables and value is not None:
            yield f"{_key(key)} = {_value(value)}"
    for key, value in sub_tables.items():
        inner = (*path, key)
        yield f"\n[{'.'.join(map(_key, inner))}]"
        yield from _lines(value, inner)


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _string(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str | Path):
        return _string(str(value))
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(entry) for entry in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None) + "}"
    raise TypeError(f"TOML has no form for {type(value).__name__}")


def _string(text: str) -> str:
    # JSON's escapes are TOML's, but for the delete character, which JSON leaves bare
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
