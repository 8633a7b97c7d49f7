"""Where the time to a stream's first token went: what workers say in their answers, and what the client gets.
Pure.

    server-timing: queue;dur=1.2, pull;dur=3.4, compute;dur=20.1  milliseconds (W3C Server Timing)

The client of a stream gets this header with the router's own parts (`metrics.names.PARTS`), so a browser's
developer tools show them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pdserve.router.metrics.names import PARTS

TIMING_HEADER = b"server-timing"


def pull_s(headers: Iterable[tuple[bytes, bytes]]) -> float:
    """How long the worker waited for pages of the pool. 0: it does not say."""
    for name, value in headers:
        if name == TIMING_HEADER:
            pull_ms = parse_timing(value.decode("latin-1")).get("pull")
            if pull_ms is not None:
                return pull_ms / 1e3
    return 0.0


def finish(
    parts_s: dict[str, float], asked_s: float, pulled_s: float, started_s: float, now_s: float
) -> None:
    """Complete `parts_s` when the first token has come. `asked_s`: when the decode worker was asked.
    `started_s`: when the request arrived. No report of a worker makes a part negative.
    """
    waited_s = max(0.0, now_s - asked_s)
    if pulled_s > 0:
        pulled_s = parts_s["pull"] = min(pulled_s, waited_s)
    parts_s["decode"] = waited_s - pulled_s
    parts_s["router"] = max(0.0, now_s - started_s - sum(parts_s.values()))


def timing(parts_s: Mapping[str, float]) -> bytes:
    """The value of the header."""
    return ", ".join([f"{p};dur={1e3 * parts_s[p]:.1f}" for p in PARTS if p in parts_s]).encode()


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
