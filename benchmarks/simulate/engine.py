"""A simulated worker. Pure.

It does as SGLang's scheduler does by default: prompts are computed first, one after the other, and answers
stand still meanwhile. Otherwise each step gives every running answer one token, and takes `step_ms` and
`step_ms_per_request` for each. At most `max_running` requests are computed or answered at a time.

What it leaves out: KV memory that is full, chunks of long prompts that are mixed with answers, graphs of
steps.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from typing import Generic, TypeVar

from benchmarks.simulate.model import Rates

T = TypeVar("T")


class Engine(Generic[T]):
    """Computes prompts and answers jobs. Time only goes on by `advance`."""

    def __init__(self, rates: Rates, max_running: int) -> None:
        self._rates = rates
        self._max_running = max_running
        self._now_s = 0.0
        self._queue: deque[tuple[T, float, int]] = deque()
        """(job, time to compute its prompt in s, tokens that follow the first one here)."""
        self._computing: tuple[T, float, int] | None = None
        self._computed_at_s = 0.0
        self._served = 0.0
        """Tokens that a request would have got which has been running all the time."""
        self._running: list[tuple[float, int, T]] = []
        """Heap by `_served` at the end."""
        self._number = 0
        self.busy_s = 0.0
        """Time in which it computed prompts."""

    @property
    def step_s(self) -> float:
        """A step for the present answers, in s."""
        rates = self._rates
        return (rates.step_ms + rates.step_ms_per_request * len(self._running)) / 1e3

    def submit(self, job: T, compute_s: float, more_tokens: int) -> None:
        """A prompt that takes `compute_s` arrives. `more_tokens`: of its answer here, after the first one;
        -1: another worker answers. The engine must be advanced until now.
        """
        self._queue.append((job, compute_s, more_tokens))
        self._begin()

    def next_s(self) -> float:
        """When a prompt will be computed or an answer complete; infinity: never."""
        if self._computing is not None:
            return self._computed_at_s
        if not self._running:
            return float("inf")
        return self._now_s + max(0.0, self._running[0][0] - self._served) * self.step_s

    def advance(self, now_s: float) -> tuple[list[T], list[T]]:
        """(jobs whose prompts are computed by now, jobs that are answered). `now_s` is at most `next_s`."""
        if self._computing is None and self._running:
            self._served += (now_s - self._now_s) / self.step_s
        self._now_s = max(self._now_s, now_s)
        computed, answered = [], []
        if self._computing is not None and self._computed_at_s <= now_s:
            job, compute_s, more_tokens = self._computing
            self.busy_s += compute_s
            self._computing = None
            computed.append(job)
            if more_tokens > 0:
                self._number += 1
                heapq.heappush(self._running, (self._served + more_tokens, self._number, job))
            elif more_tokens == 0:
                answered.append(job)
        elif self._computing is None:
            while self._running and self._running[0][0] <= self._served + 1e-6:
                answered.append(heapq.heappop(self._running)[2])
        self._begin()
        return computed, answered

    def _begin(self) -> None:
        if self._computing is None and self._queue and len(self._running) < self._max_running:
            self._computing = self._queue.popleft()
            self._computed_at_s = self._now_s + self._computing[1]


class BlockCache:
    """A least recently used cache of prompts' blocks. `capacity`: of blocks; None: no bound."""

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def found(self, blocks: tuple[int, ...]) -> int:
        """How many of the first blocks it has, one after the other."""
        for number, block in enumerate(blocks):
            if block not in self._blocks:
                return number
        return len(blocks)

    def add(self, blocks: tuple[int, ...]) -> None:
        """They are used now. The first ones are dropped last."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        if self._capacity is not None:
            while len(self._blocks) > self._capacity:
                self._blocks.popitem(last=False)
