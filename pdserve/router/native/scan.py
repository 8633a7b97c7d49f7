"""Words in bodies of any length, by the compiled module or in Python. A long body is copied and read at some
gigabytes a second; a regular expression, which stops at each quote, takes ten times as long.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec


def plain_has_after(text: bytes | msgspec.Raw, mark: bytes, words: tuple[bytes, ...]) -> bool:
    """Whether one of `words`, none of them empty, follows `mark`, a single byte, somewhere in `text`."""
    return bool(words) and _pattern(mark, words).search(text) is not None


@lru_cache(maxsize=16)
def _pattern(mark: bytes, words: tuple[bytes, ...]) -> re.Pattern[bytes]:
    return re.compile(re.escape(mark) + b"(?:%b)" % b"|".join(map(re.escape, words)))


if TYPE_CHECKING:
    has_after = plain_has_after
else:
    try:
        from pdserve.router.native._native import has_after
    except ImportError:
        has_after = plain_has_after
