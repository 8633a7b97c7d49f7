"""What became of the requests of a simulation. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import msgspec

from benchmarks.simulate.size import Size
from pdserve.router.config.slo import ServiceLevel

PARTS: Final = 4
"""Parts of the load, by arrival, of which the share in time is told."""


class Served(msgspec.Struct, frozen=True, gc=False):
    """One request, in ms and tokens."""

    ttft_ms: float
    itl_ms: float
    """Mean time between its tokens; 0 for an answer of one token."""
    cached_tokens: int
    anywhere_tokens: int
    """What the worker would have found that had most of the prompt, or the pool."""
    prompt_tokens: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Of one size of the fleet."""

    size: Size
    requests: int
    wall_s: float
    """From the first arrival to the last token."""
    in_time: float
    """Share of the requests within the service level."""
    in_time_by_part: tuple[float, ...]
    """The same for each quarter of the requests, in the order of their arrival."""
    goodput_s: float
    """Requests within the service level, for each second of arrivals."""
    late: float
    """Share of the requests whose first token came too late."""
    slow: float
    """Share of the requests whose tokens came too slowly."""
    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]
    cached: float
    """Share of prompt tokens that were not computed."""
    computed_twice: float
    """Share of prompt tokens that were computed though another worker had them."""
    duty_changes: int
    busy: dict[str, float]
    """By role: share of the time in which its workers computed prompts."""


def judge(
    size: Size,
    served: Sequence[Served],
    level: ServiceLevel,
    *,
    arrivals_s: float,
    wall_s: float,
    duty_changes: int,
    busy: dict[str, float],
) -> Outcome:
    """The outcome of at least one request, in the order of arrival. `arrivals_s`: time of all arrivals."""
    kept = [level.kept(one.ttft_ms, one.itl_ms) for one in served]
    good = [word == "met" for word in kept]
    count = len(served)
    edges = [count * part // PARTS for part in range(PARTS + 1)]
    parts = tuple(_share(good[low:high]) for low, high in pairwise(edges) if high > low)
    prompt_tokens = sum(one.prompt_tokens for one in served)
    return Outcome(
        size=size,
        requests=count,
        wall_s=round(wall_s, 3),
        in_time=_share(good),
        in_time_by_part=parts,
        goodput_s=round(sum(good) / arrivals_s, 4) if arrivals_s > 0 else 0.0,
        late=_share([word in ("ttft", "both") for word in kept]),
        slow=_share([word in ("itl", "both") for word in kept]),
        ttft_ms=_percentiles([one.ttft_ms for one in served]),
        itl_ms=_percentiles([one.itl_ms for one in served if one.itl_ms]),
        cached=round(sum(one.cached_tokens for one in served) / prompt_tokens, 4),
        computed_twice=round(
            sum(one.anywhere_tokens - one.cached_tokens for one in served) / prompt_tokens, 4
        ),
        duty_changes=duty_changes,
        busy=busy,
    )


def _share(words: Sequence[bool]) -> float:
    return round(sum(words) / len(words), 4)


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {}
    return {
        f"p{percent}": round(ordered[min(len(ordered) - 1, len(ordered) * percent // 100)], 2)
        for percent in (50, 90, 99)
    }
