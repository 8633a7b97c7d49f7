"""What a request may expect of its workers, before it is sent there. Pure.

The time to the first token is the placement's own sum (`cost_ms`) at the worker that computes the prompt, and
the way of its KV where another one answers. The time between tokens is that of a decode step with the new
request.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pdserve.router.config.placement import PlacementSettings
from pdserve.router.config.slo import ServiceLevel
from pdserve.router.fleet.worker import Worker
from pdserve.router.placement.cost import cost_ms
from pdserve.router.placement.prefix_index import NOTHING, Cached, Places

Verdict = Literal["met", "late", "long"]


class Forecast(msgspec.Struct, frozen=True, gc=False):
    """What is expected of a request."""

    ttft_ms: float
    """Time to the first token."""
    alone_ms: float
    """The same if the workers had nothing else to do."""
    itl_ms: float
    """Time between tokens."""

    def verdict(self, level: ServiceLevel) -> Verdict:
        """met: within the level; late: others make it late; long: its prompt alone takes too long."""
        if level.ttft_ms and self.alone_ms > level.ttft_ms:
            return "long"
        is_late = level.ttft_ms and self.ttft_ms > level.ttft_ms
        return "late" if is_late or (level.itl_ms and self.itl_ms > level.itl_ms) else "met"


def forecast(
    weights: PlacementSettings,
    level: ServiceLevel,
    prompt_tokens: int,
    places: Places | None,
    decode: Worker,
    prefill: Worker | None,
) -> Forecast:
    """Of a prompt of `prompt_tokens` at these workers; no `prefill`: `decode` computes it."""
    computing = prefill or decode
    cached = NOTHING if places is None else places.cached(computing)
    hop_ms = weights.pool_ms_per_token * prompt_tokens if prefill is not None else 0.0
    return Forecast(
        ttft_ms=cost_ms(weights, computing, prompt_tokens, cached) + hop_ms,
        alone_ms=alone_ms(weights, prompt_tokens, cached) + hop_ms,
        itl_ms=step_ms(level, decode.load - decode.prefilling + 1),
    )


def alone_ms(weights: PlacementSettings, prompt_tokens: int, cached: Cached) -> float:
    """The cost of a prompt at a worker that has nothing else to do, in ms."""
    uncached = max(0.0, prompt_tokens - cached.total)
    moved = weights.host_ms_per_token * cached.host + weights.pool_ms_per_token * cached.pool
    return weights.prefill_ms_per_token * uncached + moved


def step_ms(level: ServiceLevel, requests: int) -> float:
    """A decode step for so many requests, in ms."""
    return level.step_ms + level.step_ms_per_request * requests
