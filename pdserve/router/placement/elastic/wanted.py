"""How many workers a load needs for a service level. Pure.

Prefill: each worker is a queue with one server (M/G/1) that gets its share of the prompts. The mean wait in
such a queue is rate · E[S²] / (2 · (1 - rate · E[S])) for computing times S (Pollaczek and Khinchine). With N
workers each one has a rate / N. The mean wait is then at most W if

    N ≥ rate · E[S] + rate · E[S²] / (2 · W)

The router places by load, not by chance, so it waits less than this says.

Decode: a step of a worker takes `step_ms` + `step_ms_per_request` · requests, which bounds the requests at a
worker. As many workers are needed as hold the mean number of requests and once its root (the deviation of a
Poisson number).

Both at once: a worker that computes prompts for a part b of its time takes step / (1 - b) for a token, on
average. Some answers meet more prompts than the mean. So WAITS times the mean stall must be within the level.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from pdserve.router.config.slo import ServiceLevel
from pdserve.router.placement.elastic.demand import Load

UNKNOWN_BATCH: Final = 64
"""Requests of a worker that says no number, without a level for the time between tokens."""
WAITS: Final = 3.0
"""The wait that a prompt may have, or an answer, is this times the mean: about nine of ten are shorter."""
LEAST_WAIT_SHARE: Final = 0.1
"""Of the level: the wait that is planned for where prompts alone take longer than the level."""


class Wanted(msgspec.Struct, frozen=True):
    """Workers that the load needs, in parts of workers."""

    prefill: float = 0.0
    decode: float = 0.0

    @property
    def prefill_share(self) -> float | None:
        """Of all workers; None: no load."""
        both = self.prefill + self.decode
        return self.prefill / both if both > 0 else None

    def beyond(self, prefill: float, decode: float) -> Wanted:
        """What is left to do for others than so many workers of the two roles."""
        return Wanted(max(0.0, self.prefill - prefill), max(0.0, self.decode - decode))


def wanted(load: Load, level: ServiceLevel, max_running: int) -> Wanted:
    """The workers for `load`. `max_running`: requests that a worker computes at a time; 0: unknown."""
    return Wanted(_prefill(load, level), _decode(load, level, max_running))


def mixed_itl_ms(load: Load, level: ServiceLevel, workers: float) -> float:
    """The time between tokens that answers should expect, in ms, if `workers` compute this load's prompts
    beside its answers. Infinity: they cannot.
    """
    busy = load.prefill_ms_s / 1e3 / workers
    if busy >= 1:
        return math.inf
    step_ms = level.step_ms + level.step_ms_per_request * load.answering / workers
    return step_ms + WAITS * (step_ms / (1 - busy) - step_ms)


def batch_size(level: ServiceLevel, max_running: int) -> float:
    """Most requests that a worker should answer at a time, at least 1."""
    most = float(max_running or UNKNOWN_BATCH)
    if level.itl_ms and level.step_ms_per_request:
        within = (level.itl_ms - level.step_ms) / level.step_ms_per_request
        most = min(within, max_running) if max_running else within
    return max(1.0, most)


def _prefill(load: Load, level: ServiceLevel) -> float:
    busy = load.prefill_ms_s / 1e3
    if not level.ttft_ms:
        return busy
    spare_ms = max(level.ttft_ms - load.prompt_ms, LEAST_WAIT_SHARE * level.ttft_ms)
    return busy + load.prefill_ms2_s / (2 * spare_ms / WAITS) / 1e3


def _decode(load: Load, level: ServiceLevel, max_running: int) -> float:
    requests = load.answering
    if level.itl_ms:
        requests += math.sqrt(requests)
    return requests / batch_size(level, max_running)
