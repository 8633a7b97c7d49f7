"""Where a stream's first token spent its time, and where its prompt's tokens came from: what workers say of
it in their answers' headers, and what the client is told. Pure.

    server-timing: queue;dur=1.2, pull;dur=3.4, compute;dur=20.1  milliseconds (W3C Server Timing)
    x-pdserve-cached: device=0, host=0, pool=704, ssd=0, computed=17     prompt tokens

Workers send both (pdserve/engine: first_token, reuse). The client of a stream gets the first one with the
router's own parts (`metric_names.PARTS`), so a browser's developer tools show them; the second one as it is,
and beside it `x-pdserve-prefill-cached` with what the prefill worker found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pdserve.router.metrics.names import PARTS, TIERS

TIMING_HEADER = b"server-timing"
CACHED_HEADER = b"x-pdserve-cached"
PREFILL_CACHED_HEADER = b"x-pdserve-prefill-cached"


def pull_s(headers: Iterable[tuple[bytes, bytes]]) -> float:
    """How long the worker's request waited for pages of the pool; 0 if it does not say."""
    for name, value in headers:
        if name == TIMING_HEADER:
            pull_ms = parse_timing(value.decode("latin-1")).get("pull")
            if pull_ms is not None:
                return pull_ms / 1e3
    return 0.0


def cached_tokens(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, int]:
    """Prompt tokens by tier, as far as the worker says."""
    return next(
        (parse_cached(value.decode("latin-1")) for name, value in headers if name == CACHED_HEADER), {}
    )


def parse_cached(header: str) -> dict[str, int]:
    """A value of `x-pdserve-(prefill-)cached`: tokens by tier; 0 for what is no number."""
    entries = [entry.strip().partition("=") for entry in header.split(",")]
    return {tier: int(_number(count)) for tier, _, count in entries if tier in TIERS}


def cached_words(tokens: Mapping[str, int]) -> bytes:
    """Such a value."""
    return ", ".join([f"{tier}={count}" for tier, count in tokens.items()]).encode()


def own_memory_tokens(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """Of which the worker found in its device and host memory; None where it does not say."""
    found = cached_tokens(headers)
    return found["device"] + found["host"] if "device" in found and "host" in found else None


def finish(
    parts_s: dict[str, float], asked_s: float, pulled_s: float, started_s: float, now_s: float
) -> None:
    """The first token is here: `parts_s` gets the last ones. `asked_s`: when the decode worker was asked;
    `started_s`: when the request came. What a worker says never makes a part negative.
    """
    waited_s = max(0.0, now_s - asked_s)  # 0 within one millisecond: uvloop's clock counts these
    if pulled_s > 0:
        pulled_s = parts_s["pull"] = min(pulled_s, waited_s)
    parts_s["decode"] = waited_s - pulled_s
    parts_s["router"] = max(0.0, now_s - started_s - sum(parts_s.values()))


def timing(parts_s: Mapping[str, float]) -> bytes:
    """The value of `server-timing`."""
    return ", ".join([f"{p};dur={1e3 * parts_s[p]:.1f}" for p in PARTS if p in parts_s]).encode()


def parse_timing(header: str) -> dict[str, float]:
    """A value of `server-timing`: milliseconds by part; 0 for what is no number."""
    entries = [entry.partition(";dur=") for entry in header.split(",")]
    return {part.strip(): _number(dur) for part, found, dur in entries if found}


def _number(text: bytes | str) -> float:
    """Not negative and finite; 0 for what is no number."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 <= value < 1e12 else 0.0
