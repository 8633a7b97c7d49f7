"""Paths as clients make them of a base URL: what they mean, and what they should have been. Pure.

Slashes that stand twice or at the end change nothing: `/v1//chat/completions/` is served. A `/v1` that is
missing or doubled is a mistake in a client's base URL, and the answer (404) names the path that was meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_SLASHES = re.compile(r"/{2,}")
MAX_SHOWN_CHARS = 200


def fold(path: str) -> str:
    """`path` with single slashes, and none at its end."""
    return _SLASHES.sub("/", path).rstrip("/") or "/"


def similar(path: str, known: Iterable[str]) -> str | None:
    """The known path that `path` was probably meant to be: the same but for `/v1`, or with more before it."""
    asked = _without_version(path)
    found = [each for each in known if _without_version(each) == asked]
    if not found:
        found = [each for each in known if each.count("/") > 1 and asked.endswith(_without_version(each))]
    return max(found, key=len, default=None)


def not_found(method: str, path: str, known: Iterable[str]) -> str:
    """What a client is told of a path that there is not."""
    meant = similar(path, known)
    return f"{method} {path[:MAX_SHOWN_CHARS]}: Not Found" + (f"; did you mean {meant}?" if meant else "")


def _without_version(path: str) -> str:
    return "".join(f"/{part}" for part in path.split("/") if part not in ("", "v1"))
