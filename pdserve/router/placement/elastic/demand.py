"""What the requests of late have asked of the workers, as running means. Pure.

Each mean forgets with a time constant of `window_s`: what is `window_s` old counts 1/e. The means start at 0,
so they are divided by the weight of the time since the first event, at least LEAST_WEIGHT.

Arrivals are events, so only their mean says anything. The requests in the answer are a state, whose present
number is known: where it is above the mean, it counts. So a load that turns to long answers is seen at once.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

LEAST_WEIGHT: Final = 0.1
"""That of a tenth of the window: a mean over less says little."""


class Load(msgspec.Struct, frozen=True):
    """What one router's requests ask of the workers."""

    prefill_ms_s: float = 0.0
    """Time to compute prompts, in ms for each second: the sum over the arriving prompts."""
    prefill_ms2_s: float = 0.0
    """The sum of the squares of these times for each second, in ms²/s. Few long prompts make it large."""
    prompts_s: float = 0.0
    """Prompts a second."""
    answering: float = 0.0
    """Requests that are being answered: now, or on average if that is more."""

    def part(self, prefill: float, decode: float) -> Load:
        """These parts of it, from 0 to 1."""
        return Load(
            self.prefill_ms_s * prefill,
            self.prefill_ms2_s * prefill,
            self.prompts_s * prefill,
            self.answering * decode,
        )

    @property
    def prompt_ms(self) -> float:
        """Mean time to compute a prompt, in ms."""
        return self.prefill_ms_s / self.prompts_s if self.prompts_s else 0.0


class Demand:
    """The running means of one model's requests."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._prompt_at_s = self._answer_at_s = self._began_s = float("-inf")
        self._prompts_s = self._ms_s = self._ms2_s = 0.0
        self._answering = 0.0
        self._answering_now = 0

    def on_prompt(self, prefill_ms: float, now_s: float) -> None:
        """A prompt arrived that takes `prefill_ms` to compute."""
        self._fade_prompts(now_s)
        self._prompts_s += 1 / self._window_s
        self._ms_s += prefill_ms / self._window_s
        self._ms2_s += prefill_ms * prefill_ms / self._window_s

    def on_answering(self, requests: int, now_s: float) -> None:
        """So many requests are in the answer, and have been since the last call."""
        self._answering_now = requests
        if self._began_s == float("-inf"):
            self._began_s = now_s
        kept, self._answer_at_s = self._kept(self._answer_at_s, now_s), max(self._answer_at_s, now_s)
        self._answering = kept * self._answering + (1 - kept) * requests

    def load(self, now_s: float) -> Load:
        """The means now."""
        self._fade_prompts(now_s)
        weight = max(LEAST_WEIGHT, 1 - self._kept(self._began_s, max(now_s, self._answer_at_s)))
        answering = max(self._answering_now, self._answering / weight)
        return Load(self._ms_s / weight, self._ms2_s / weight, self._prompts_s / weight, answering)

    def _fade_prompts(self, now_s: float) -> None:
        kept, self._prompt_at_s = self._kept(self._prompt_at_s, now_s), max(self._prompt_at_s, now_s)
        self._prompts_s *= kept
        self._ms_s *= kept
        self._ms2_s *= kept

    def _kept(self, before_s: float, now_s: float) -> float:
        """The share of a mean that stays from `before_s` until now. All of it at the first event."""
        if before_s == float("-inf"):
            return 1.0
        return math.exp(min(0.0, before_s - now_s) / self._window_s)
