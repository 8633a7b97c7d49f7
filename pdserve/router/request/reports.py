"""What workers say in the headers of their answers: where the time went, and where a prompt's tokens came
from. Pure.

    server-timing: queue;dur=1.2, pull;dur=3.4, compute;dur=20.1  milliseconds (W3C Server Timing)

The client of a stream gets this header with the router's own parts of the time to its first token
(`metrics.names.PARTS`), so a browser's developer tools show them.

    x-pdserve-cached: device=0, host=0, pool=704, computed=17     prompt tokens

The client gets a decode worker's header as it is, and beside it `x-pdserve-prefill-cached` with what the
prefill worker found. `x-pdserve-miss` says what its client changed since the session's last turn
(`sessions.history`), and why the prefill worker did not find the rest, as that reports it:

    x-pdserve-miss: messages_changed=700, evicted=512;age_s=31.4, never_stored=64
"""

from __future__ import annotations

import re
from typing import Final

from pdserve.router.metrics.names import TIERS

TIMING_HEADER = b"server-timing"
_PULL: Final = re.compile(rb"(?:^|,)\s*pull;dur=(\d{1,12}(?:\.\d{1,12})?)\s*(?:,|$)")


def pull_s(timing: bytes) -> float:
    """How long the worker waited for pages of the pool, from a value of the header. 0: it does not say."""
    said = _PULL.search(timing)
    return float(said[1]) / 1e3 if said else 0.0


_IN_MS: Final = (1e3).__mul__
_WORDS: Final[dict[tuple[str, ...], bytes]] = {}
"""The header's value by the parts that it has. They are of `PARTS`, so these are few."""


def finish_parts(
    parts_s: dict[str, float], asked_s: float, pulled_s: float, started_s: float, now_s: float
) -> bytes:
    """Complete `parts_s`, the parts until now in their order, when the first token has come. `asked_s`: when
    the decode worker was asked. `started_s`: when the request arrived. No report of a worker makes a part
    negative. Returns the value of the header.
    """
    waited_s = now_s - asked_s if now_s > asked_s else 0.0
    if pulled_s > 0:
        parts_s["pull"] = pulled_s = pulled_s if pulled_s < waited_s else waited_s
    parts_s["decode"] = waited_s - pulled_s
    own_s = now_s - started_s - sum(parts_s.values())
    parts_s["router"] = own_s if own_s > 0 else 0.0
    names = tuple(parts_s)
    words = _WORDS.get(names)
    if words is None:
        words = _WORDS[names] = ", ".join([f"{name};dur=%.1f" for name in names]).encode()
    return words % tuple(map(_IN_MS, parts_s.values()))


def parse_timing(header: str) -> dict[str, float]:
    """Milliseconds by part, from a value of the header."""
    entries = [entry.partition(";dur=") for entry in header.split(",")]
    return {part.strip(): finite_number(dur) for part, found, dur in entries if found}


def finite_number(text: bytes | str) -> float:
    """The number in `text`. 0 for text that is no number, or a negative or huge one."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 <= value < 1e12 else 0.0


CACHED_HEADER = b"x-pdserve-cached"
PREFILL_CACHED_HEADER = b"x-pdserve-prefill-cached"
CACHED_WORDS: Final = ", ".join(f"{tier}=%d" for tier in TIERS).encode()
"""The value of either header, for tokens of all `TIERS` in their order."""


def parse_cached(header: str) -> dict[str, int]:
    """Tokens by tier from a value of either header. A count that is no number becomes 0."""
    entries = [entry.strip().partition("=") for entry in header.split(",")]
    return {tier: int(finite_number(count)) for tier, _, count in entries if tier in TIERS}
