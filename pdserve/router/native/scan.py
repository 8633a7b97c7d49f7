"""Words in bodies of any length, by the compiled module or in Python. A long body is copied and read at some
gigabytes a second; a regular expression, which stops at each quote, takes ten times as long.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import msgspec


def plain_has_after(text: bytes | msgspec.Raw, mark: bytes, words: tuple[bytes, ...]) -> bool:
    """Whether one of `words`, none of them empty, follows `mark`, a single byte, somewhere in `text`."""
    return bool(words) and _pattern(mark, words).search(text) is not None


@lru_cache(maxsize=16)
def _pattern(mark: bytes, words: tuple[bytes, ...]) -> re.Pattern[bytes]:
    return re.compile(re.escape(mark) + b"(?:%b)" % b"|".join(map(re.escape, words)))


_NUMBER: Final = re.compile(rb"\s*(\d{1,15})\b")


def plain_number_after(text: bytes, mark: bytes) -> int:
    """The number of at most 15 digits that follows the last `mark`, which is not empty. 0: there is none."""
    at = text.rfind(mark)
    found = _NUMBER.match(text, at + len(mark)) if at >= 0 else None
    return int(found[1]) if found else 0


if TYPE_CHECKING:
    has_after, number_after = plain_has_after, plain_number_after
else:
    try:
        from pdserve.router.native._native import has_after, number_after
    except ImportError:
        has_after, number_after = plain_has_after, plain_number_after
