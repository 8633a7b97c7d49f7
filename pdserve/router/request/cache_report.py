"""Where a prompt's tokens came from, as workers say in their answers' headers. Pure.

    x-pdserve-cached: device=0, host=0, pool=704, ssd=0, computed=17     prompt tokens

The client gets a decode worker's header as it is, and beside it `x-pdserve-prefill-cached` with what the
prefill worker found. `x-pdserve-miss` says why it did not find the rest, as the worker reports it:

    x-pdserve-miss: evicted=512;age_s=31.4, never_stored=64
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pdserve.router.metrics.names import TIERS
from pdserve.router.request.timing import finite_number

CACHED_HEADER = b"x-pdserve-cached"


PREFILL_CACHED_HEADER = b"x-pdserve-prefill-cached"
MISS_HEADER = b"x-pdserve-miss"
_WORDS = ", ".join(f"{tier}=%d" for tier in TIERS).encode()


def cached_tokens(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, int]:
    """Prompt tokens by tier. A tier that the worker does not name is missing."""
    for name, value in headers:
        if name == CACHED_HEADER:
            return parse_cached(value.decode("latin-1"))
    return {}


def parse_cached(header: str) -> dict[str, int]:
    """Tokens by tier from a value of either header. A count that is no number becomes 0."""
    entries = [entry.strip().partition("=") for entry in header.split(",")]
    return {tier: int(finite_number(count)) for tier, _, count in entries if tier in TIERS}


def cached_words(tokens: Mapping[str, int]) -> bytes:
    """The header's value for `tokens` of all `TIERS`, in their order."""
    return _WORDS % tuple(tokens.values())
