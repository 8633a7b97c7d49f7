"""A load, served by simulated workers that the router's own placement chooses. Pure: no clock, no chance but
the seed's.

The fleet, the placer with its policies and its beliefs, and the counts of load are those of the
router. What workers have cached is the simulation's own, so the router can be wrong about it. Answers' tokens
are in no block of a trace, so a next turn computes them again.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import msgspec
import numpy as np

from benchmarks.simulate.engine import BlockCache, Engine
from benchmarks.simulate.model import BLOCK_TOKENS, Request, Setting, Size
from pdserve.router.api.endpoints import ENDPOINTS
from pdserve.router.config.limits import ServiceLevel
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import Worker, WorkerInfo, WorkerLoad
from pdserve.router.placement.elastic import Load, wanted
from pdserve.router.placement.placer import Placer
from pdserve.router.placement.planner import Plan, RequestFacts
from pdserve.router.placement.prefix_index import Cached
from pdserve.router.sessions.table import SessionEntry

PARTS: Final = 4
"""Parts of the load, by arrival, of which the share in time is told."""
MODEL: Final = "simulated"
TAIL_TOKENS: Final = 32
"""Tokens of a handed-over prompt that the answering worker computes: half a page."""


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
    if not values:
        return {}
    return {f"p{at}": round(float(np.percentile(values, at)), 2) for at in (50, 90, 99)}


class Job(msgspec.Struct):
    """One request on its way."""

    number: int
    request: Request
    facts: RequestFacts
    plan: Plan
    queued_tokens: int = 0
    """Of its prompt, those that wait at the answering worker."""
    cached_tokens: int = 0
    own_tokens: int = 0
    """Of these, those that the computing worker had itself."""
    anywhere_tokens: int = 0
    """What the worker would have found that had most, or the pool."""
    first_s: float = 0.0
    turn: SessionEntry | None = None


class _Site(msgspec.Struct):
    """A worker, its engine and its own cache."""

    worker: Worker
    engine: Engine[Job]
    cache: BlockCache
    look_s: float = float("inf")
    """When it is looked at next. Other events for it are out of date."""


class Simulation:
    """One run."""

    def __init__(self, load: Sequence[Request], size: Size, setting: Setting) -> None:
        config = setting.router(size)
        self._load, self._size, self._setting = load, size, setting
        self._config = config
        self._fleet = Fleet.from_config(config)
        has_pool = setting.pool_blocks != 0
        for worker in self._fleet.workers:
            self._fleet.on_info(worker, WorkerInfo(worker.role, MODEL))
            self._fleet.on_load(
                worker, WorkerLoad(max_running_requests=setting.max_running), pool_up=has_pool
            )
            self._fleet.on_probe_ready(worker)
        self._placer = Placer(config, self._fleet)
        self._sites = {
            worker.id: _Site(
                worker, Engine(setting.rates, setting.max_running), BlockCache(setting.worker_blocks)
            )
            for worker in self._fleet.workers
        }
        self._pool = BlockCache(setting.pool_blocks)
        self._arriving = load[0]
        self._draw = random.Random(setting.seed)
        self._events: list[tuple[float, int, str, Job | _Site | int]] = []
        self._numbers = itertools.count()
        self._served: dict[int, Served] = {}
        self._now_s = 0.0

    def run(self) -> Outcome:
        """Serve the whole load, which is in the order of arrival and not empty."""
        for number, request in enumerate(self._load):
            self._at(request.at_s, "arrive", number)
        while self._events:
            self._now_s, _, what, of = heapq.heappop(self._events)
            if what == "arrive":
                assert isinstance(of, int)
                self._arrive(of)
            elif what == "hand-over":
                assert isinstance(of, Job)
                self._answer(of, TAIL_TOKENS)
            elif what == "read":
                assert isinstance(of, Job)
                self._compute(of)
            else:
                assert isinstance(of, _Site)
                if of.look_s == self._now_s:
                    of.look_s = float("inf")
                    self._look(of)
        arrivals_s = self._load[-1].at_s - self._load[0].at_s
        wall_s = self._now_s - self._load[0].at_s
        return judge(
            self._size,
            [self._served[number] for number in range(len(self._load))],
            self._config.slo,
            arrivals_s=arrivals_s,
            wall_s=wall_s,
            duty_changes=sum(self._placer.elastic.changes().values()),
            busy=self._busy(wall_s),
        )

    # --- a request's way

    def _arrive(self, number: int) -> None:
        request, now_s = self._load[number], self._now_s
        self._arriving = request
        facts = RequestFacts(
            ENDPOINTS["/v1/completions"],
            prompt_tokens_estimate=request.prompt_tokens,
            turn=number,
            draw=self._draw.getrandbits(32),
            prefix=request.prefix,
        )
        plan = self._placer.plan(facts, self._fleet.snapshot(MODEL, now_s), None, now_s)
        job = Job(number, request, facts, plan, 0 if plan.prefill else plan.uncached_tokens)
        self._fleet.on_selected(plan.decode, now_s, job.queued_tokens)
        if plan.prefill is not None:
            self._fleet.on_selected(plan.prefill, now_s, plan.uncached_tokens, 1)
        found = self._cached(plan.prefill or plan.decode)
        job.own_tokens, job.cached_tokens = int(found.device), int(found.total)
        job.anywhere_tokens = max(int(self._cached(worker).total) for worker in self._fleet.workers)
        self._at(now_s + found.pool * self._setting.rates.pool_ms_per_token / 1e3, "read", job)

    def _compute(self, job: Job) -> None:
        """What the pool has of the prompt is read: the rest is computed."""
        uncached = max(1, job.request.prompt_tokens - job.cached_tokens)
        if job.plan.prefill is None:
            self._answer(job, uncached)
            return
        site = self._sites[job.plan.prefill.id]
        self._look(site)
        site.engine.submit(job, self._compute_s(uncached), -1)
        self._await(site)

    def _answer(self, job: Job, tokens: int) -> None:
        """The answering worker computes `tokens` of the prompt, then the answer."""
        site = self._sites[job.plan.decode.id]
        self._look(site)
        site.engine.submit(job, self._compute_s(tokens), job.request.output_tokens - 1)
        self._await(site)

    def _look(self, site: _Site) -> None:
        """Bring a worker to the present."""
        computed, answered = site.engine.advance(self._now_s)
        for job in computed:
            self._on_computed(job, site)
        for job in answered:
            self._on_answered(job, site)
        self._await(site)

    def _on_computed(self, job: Job, site: _Site) -> None:
        request, now_s, rates = job.request, self._now_s, self._setting.rates
        site.cache.add(request.blocks)
        self._pool.add(request.blocks)
        if site.worker is not job.plan.prefill:
            self._fleet.on_queued(site.worker, -job.queued_tokens)
            job.queued_tokens = 0
            job.first_s = now_s
            job.turn = self._placer.on_answering(job.facts, job.plan, site.worker, str(job.number), now_s)
            return
        self._fleet.on_released(site.worker, job.plan.uncached_tokens, 1)
        self._placer.on_prefilled(job.facts, site.worker, 1, 0, now_s)
        there = self._sites[job.plan.decode.id].cache.found(request.blocks) * BLOCK_TOKENS
        moved_ms = max(0, request.prompt_tokens - there) * rates.pool_ms_per_token
        self._at(now_s + (rates.hop_ms + moved_ms) / 1e3, "hand-over", job)

    def _on_answered(self, job: Job, site: _Site) -> None:
        request, now_s = job.request, self._now_s
        self._fleet.on_released(site.worker)
        self._placer.on_answered(job.facts, job.turn, request.output_tokens, now_s)
        more = request.output_tokens - 1
        self._served[job.number] = Served(
            ttft_ms=1e3 * (job.first_s - request.at_s),
            itl_ms=1e3 * (now_s - job.first_s) / more if more else 0.0,
            cached_tokens=job.cached_tokens,
            anywhere_tokens=job.anywhere_tokens,
            prompt_tokens=request.prompt_tokens,
        )

    # --- the rest

    def _cached(self, worker: Worker) -> Cached:
        """What a worker finds of the prompt that arrives. It computes one token at least."""
        blocks, most = self._arriving.blocks, self._arriving.prompt_tokens - 1
        own = min(most, self._sites[worker.id].cache.found(blocks) * BLOCK_TOKENS)
        pool = min(most, self._pool.found(blocks) * BLOCK_TOKENS)
        return Cached(device=own, pool=max(0, pool - own))

    def _compute_s(self, tokens: int) -> float:
        return tokens * self._setting.rates.prefill_ms_per_token / 1e3

    def _at(self, when_s: float, what: str, of: Job | _Site | int) -> None:
        heapq.heappush(self._events, (when_s, next(self._numbers), what, of))

    def _await(self, site: _Site) -> None:
        look_s = max(site.engine.next_s(), self._now_s)
        if look_s not in (site.look_s, float("inf")):
            site.look_s = look_s
            self._at(look_s, "look", site)

    def _busy(self, wall_s: float) -> dict[str, float]:
        """Share of the time in which workers computed prompts, by role."""
        found: dict[str, list[float]] = {}
        for site in self._sites.values():
            found.setdefault(site.worker.role, []).append(site.engine.busy_s)
        return {
            role: round(sum(busy) / len(busy) / wall_s, 4) if wall_s else 0.0 for role, busy in found.items()
        }


def simulate(load: Sequence[Request], size: Size, setting: Setting) -> Outcome:
    """What workers of this `size` make of a load. The same arguments give the same outcome."""
    return Simulation(load, size, setting).run()


def outcomes(load: Sequence[Request], count: int, setting: Setting) -> Iterator[Outcome]:
    """Of so many workers: split as the router's formulas or their neighbours say, elastic, aggregated."""
    if count > 1:
        middle = round(count * prefill_share(load, setting))
        splits = {min(max(one, 1), count - 1) for one in range(middle - 1, middle + 2)}
        apart = (simulate(load, Size(prefill=one, decode=count - one), setting) for one in sorted(splits))
        yield max(apart, key=lambda one: one.in_time)
    yield simulate(load, Size(elastic=count), setting)
    yield simulate(load, Size(agg=count), setting)


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
