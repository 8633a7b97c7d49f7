"""The smallest fleets that keep a service level, and what more workers and more pool bring. Pure.

A fleet is large enough if so many of the requests are within the level (`goal`). The share is taken to grow
with the number of workers, so the smallest number is found by doubling and halving. For fixed roles the
formulas of the router (`wanted`) say the split, and its neighbours are tried too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal

import msgspec

from benchmarks.simulate.model import BLOCK_TOKENS, Request, Setting, Size
from benchmarks.simulate.simulate import Outcome, simulate
from pdserve.router.placement.elastic import Load, wanted

Kind = Literal["disagg", "elastic", "agg"]
KINDS: Final[tuple[Kind, ...]] = ("disagg", "elastic", "agg")
POOL_PARTS: Final = (0.0, 0.125, 0.25, 0.5, 1.0)
"""Of all blocks of the load: sizes of the pool that are tried."""


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """For one kind of fleet."""

    kind: Kind
    reached: bool
    """Some number of workers up to the largest keeps the level."""
    steps: tuple[Outcome, ...]
    """Around the smallest number that does, each step with one worker more. The last ones if none does."""
    chosen: Outcome
    """The smallest that reaches the goal, else the best one."""


class Adviser:
    """Sizes of fleets for one load. Outcomes are kept, so that none is simulated twice."""

    def __init__(
        self, load: Sequence[Request], setting: Setting, told: Callable[[Outcome], None] = lambda _: None
    ) -> None:
        """`load` is in the order of arrival and not empty; `told` gets each new outcome."""
        self.load = load
        self.setting = setting
        self._told = told
        self._done: dict[Size, Outcome] = {}
        self._share = prefill_share(load, setting)

    def advise(self, kind: Kind, goal: float, max_workers: int) -> Advice:
        """The smallest fleet of the kind with `goal` of the requests in time; at most `max_workers`."""
        least = 2 if kind == "disagg" else 1
        low, high = least - 1, least
        while high < max_workers and self.best(kind, high).in_time < goal:
            low, high = high, min(max_workers, 2 * high)
        reached = self.best(kind, high).in_time >= goal
        while reached and high - low > 1:
            middle = (low + high) // 2
            if self.best(kind, middle).in_time >= goal:
                high = middle
            else:
                low = middle
        first, last = max(least, high - 2), high + 2 if reached else high
        steps = tuple(self.best(kind, count) for count in range(first, min(last, max_workers) + 1))
        tried = [one for one in self._done.values() if _kind(one.size) == kind]
        chosen = (
            self.best(kind, high) if reached else max(tried, key=lambda one: (one.in_time, -one.size.total))
        )
        return Advice(kind=kind, reached=reached, steps=steps, chosen=chosen)

    def best(self, kind: Kind, count: int) -> Outcome:
        """The best outcome of so many workers of this kind: of the sizes that are tried."""
        return max((self.outcome(size) for size in self._sizes(kind, count)), key=lambda one: one.in_time)

    def outcome(self, size: Size) -> Outcome:
        """Of this size."""
        found = self._done.get(size)
        if found is None:
            found = self._done[size] = simulate(self.load, size, self.setting)
            self._told(found)
        return found

    def compared(self, count: int) -> list[Outcome]:
        """The same number of workers, at least 2: half prefill and half decode, elastic, aggregated."""
        prefill = count // 2
        sizes = (Size(prefill=prefill, decode=count - prefill), Size(elastic=count), Size(agg=count))
        return [self.outcome(size) for size in sizes]

    def pools(self, size: Size) -> Iterator[tuple[int, Outcome]]:
        """(blocks of the pool, outcome), from no pool to one that holds the whole load."""
        blocks = len({block for request in self.load for block in request.blocks})
        for part in POOL_PARTS:
            of_pool = round(part * blocks)
            setting = msgspec.structs.replace(self.setting, pool_blocks=of_pool)
            yield of_pool, simulate(self.load, size, setting)

    def _sizes(self, kind: Kind, count: int) -> Iterator[Size]:
        if kind == "elastic":
            yield Size(elastic=count)
        elif kind == "agg":
            yield Size(agg=count)
        else:
            middle = round(count * self._share)
            for prefill in sorted({min(max(one, 1), count - 1) for one in range(middle - 1, middle + 2)}):
                yield Size(prefill=prefill, decode=count - prefill)


def prefill_share(load: Sequence[Request], setting: Setting) -> float:
    """The share of workers that should prefill, by the router's formulas for the mean of the load."""
    rates, seconds = setting.rates, max(1e-3, load[-1].at_s - load[0].at_s)
    seen: set[int] = set()
    times_ms = []
    for request in load:
        new = sum(block not in seen for block in request.blocks) or 1
        seen.update(request.blocks)
        times_ms.append(rates.prefill_ms_per_token * min(request.prompt_tokens, new * BLOCK_TOKENS))
    step_ms = rates.step_ms + rates.step_ms_per_request
    answering = sum(request.output_tokens for request in load) * step_ms / 1e3 / seconds
    mean = Load(
        sum(times_ms) / seconds, sum(ms * ms for ms in times_ms) / seconds, len(load) / seconds, answering
    )
    level = setting.router(Size(agg=1)).slo
    return wanted(mean, level, setting.max_running).prefill_share or 0.5


def _kind(size: Size) -> Kind:
    return "elastic" if size.elastic else "agg" if size.agg else "disagg"
