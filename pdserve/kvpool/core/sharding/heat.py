"""Heat: recent reads of each page, as a count that halves every `half_life_s`. Pure; 8 bytes per slot.

Forward decay (Cormode, Shkapenyuk, Srivastava, Xu: "Forward Decay: A Practical Time Decay Model for Streaming
Systems", ICDE 2009): older reads do not fade, newer reads count more. A read at time t adds the gain
g = 2^((t - t0) / half_life_s) to the slot's sum; the faded count is sum / g at any time. So a read costs one
addition and one comparison. When g becomes huge, one vectorised pass divides all sums by it (with a half-life
of 10 s, every 85 minutes).

A page with r reads per second has a faded count near r * half_life_s / ln 2.
"""

from __future__ import annotations

import math
from array import array
from typing import Final

import numpy as np

MAX_EXPONENT: Final = 512  # g up to 2^512: a sum of fewer than 2^500 such reads is a finite float64


class Heat:
    """Heat of `slots` slots. `hot` are slots whose rate has exceeded `hot_reads_s`; the user of `hot` removes
    those that have cooled.
    """

    def __init__(self, slots: int, half_life_s: float, hot_reads_s: float, now_s: float) -> None:
        self.hot: set[int] = set()
        self._sum = array("d", bytes(8 * slots))
        self._half_life_s = half_life_s
        self._per_rate = half_life_s / math.log(2)
        self._hot_reads_s = hot_reads_s
        self._since_s = now_s
        self._gain = 1.0
        self._hot_sum = hot_reads_s * self._per_rate

    def read(self, slot: int) -> None:
        """The page in the slot was read."""
        self._sum[slot] = heat = self._sum[slot] + self._gain
        if heat > self._hot_sum:
            self.hot.add(slot)

    def filled(self, slot: int) -> None:
        """A new page is in the slot."""
        self._sum[slot] = 0.0
        self.hot.discard(slot)

    def reads_s(self, slot: int) -> float:
        """Reads per second, as of the last `advance`."""
        return self._sum[slot] / self._gain / self._per_rate

    def advance(self, now_s: float) -> None:
        """Move to a later time, at least every few seconds: reads in between count as if they were now."""
        exponent = (now_s - self._since_s) / self._half_life_s
        if exponent > MAX_EXPONENT:
            sums = np.frombuffer(self._sum, np.float64)
            sums *= 2.0 ** -min(exponent, 1000.0)
            self._since_s, exponent = now_s, 0.0
        self._gain = 2.0**exponent
        self._hot_sum = self._hot_reads_s * self._per_rate * self._gain
