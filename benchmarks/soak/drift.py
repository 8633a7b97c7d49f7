"""How much a value grew over a run. Pure.

The first WARM_UP share of the samples is left out: memory fills, connections open. Of the rest, growth is the
larger of two views, each over what the value was at first: the last quarter's mean against the first
quarter's, which sees a step, and a straight line through all samples (least squares) from end to end, which
sees a slope that a noisy last quarter hides. Shrinking is no leak, and is reported as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

import msgspec
import numpy as np

WARM_UP: Final = 0.2
MIN_SAMPLES: Final = 8  # after the warm-up
GOAL: Final = 0.01  # R16


class Drift(msgspec.Struct, frozen=True):
    """`first`, `last`: means of the quarters. `share`: growth over `first`; 0.01 is 1 %."""

    first: float
    last: float
    share: float

    @property
    def passed(self) -> bool:
        return self.share <= GOAL


def drift(times_s: Sequence[float], values: Sequence[float]) -> Drift:
    """Raises ValueError: too few samples."""
    kept = slice(int(len(values) * WARM_UP), None)
    times, samples = np.asarray(times_s, float)[kept], np.asarray(values, float)[kept]
    if len(samples) < MIN_SAMPLES:
        raise ValueError(f"{len(samples)} samples after the warm-up, {MIN_SAMPLES} are needed: run longer")
    quarter = len(samples) // 4
    first, last = float(samples[:quarter].mean()), float(samples[-quarter:].mean())
    span_s = float(times[-1] - times[0])
    slope = float(np.polyfit(times - times[0], samples, 1)[0]) * span_s
    grown = max(last - first, slope)
    if abs(grown) < 1e-9:
        return Drift(first, last, 0.0)
    return Drift(first, last, grown / first if first else inf * grown)
