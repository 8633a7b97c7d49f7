"""A load served by real workers on this machine, two of each kind, beside what the simulation says of it.

Each round has texts and times of its own, and its kinds take turns. The workers' rates are measured first,
with two aggregated workers; router and simulation are told the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from statistics import fmean
from typing import Any, Final

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.serving.load.plan import Load, replay_load
from benchmarks.serving.load.records import Record
from benchmarks.serving.load.run import Say, Server, run_load
from benchmarks.simulate.calibrate import Send, measure_hop, measure_rates
from benchmarks.simulate.load import Request, scaled
from benchmarks.simulate.outcome import Outcome, Served, judge
from benchmarks.simulate.rates import Rates
from benchmarks.simulate.simulate import simulate
from benchmarks.simulate.size import POLICY, Setting, Size
from benchmarks.stores import BenchError
from pdserve.router.config.slo import ServiceLevel

KINDS: Final[Mapping[str, Size]] = {
    "disagg": Size(prefill=1, decode=1),
    "elastic": Size(elastic=2),
    "agg-two": Size(agg=2),
}
"""Contenders of `python -m benchmarks compare`, and the same for the simulation."""
WORKERS: Final = 2
TOGETHER: Final = 3
"""Requests of a worker that its steps are measured with."""

NEVER_MS: Final = 1e9
"""Stands for infinity, which JSON does not know."""

Launch = Callable[[str, Mapping[str, Any]], AbstractContextManager[str]]
"""(kind, options of the router) to the URL of its cluster."""


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One round of one kind."""

    kind: str
    round: int
    failed: int
    measured: Outcome
    simulated: Outcome


class Trial:
    """One load, by its seed; lengths times `scale`."""

    def __init__(
        self,
        make: Callable[[int], Sequence[Request]],
        scale: float,
        level: ServiceLevel,
        min_prefill_tokens: int,
        say: Say,
        *,
        silence_s: float,
    ) -> None:
        """`min_prefill_tokens`: shorter prompts have no prefill stage, as the router's option says."""
        self._make = make
        self._scale = scale
        self._level = level
        self._min_prefill_tokens = min_prefill_tokens
        self._say = say
        self._silence_s = silence_s

    def rates(self, launch: Launch, prompt_tokens: int) -> Rates:
        """The rates of a worker here. Raises BenchError."""
        with launch("agg-two", {}) as url:
            return measure_rates(self._sender(url), WORKERS, prompt_tokens, TOGETHER)

    def router(self, rates: Rates) -> dict[str, Any]:
        """The options that the simulation's router has, too."""
        level = {name: value for name in ("ttft_ms", "itl_ms") if (value := getattr(self._level, name))}
        return {
            "slo": level,
            "placement": {"prefill_ms_per_token": rates.prefill_ms_per_token},
            "prefill_policy": POLICY,
            "decode_policy": POLICY,
            "min_prefill_tokens": self._min_prefill_tokens,
        }

    def run(
        self, launch: Launch, rates: Rates, prompt_tokens: tuple[int, int], rounds: int, seed: int
    ) -> Iterator[Rates | Compared]:
        """The rates with those of the hand-over, then each round of each kind. `prompt_tokens`: of prompts
        that the hand-over is measured with. Raises BenchError where a kind does not start or answer.
        """
        with ExitStack() as running:
            urls = {kind: running.enter_context(launch(kind, self.router(rates))) for kind in KINDS}
            hop_ms, pool_ms = measure_hop(self._sender(urls["disagg"]), rates, prompt_tokens)
            rates = msgspec.structs.replace(rates, hop_ms=hop_ms, pool_ms_per_token=pool_ms)
            yield rates
            for number in range(rounds):
                kinds = [*urls][number % len(urls) :] + [*urls][: number % len(urls)]
                for kind in kinds:
                    self._say(f"round {number + 1}: {kind}")
                    yield self._serve(kind, urls[kind], rates, number, seed + number)

    def _serve(self, kind: str, url: str, rates: Rates, number: int, seed: int) -> Compared:
        whole = self._make(seed)
        load = replay_load(
            ((one.at_s, one.prompt_tokens, one.output_tokens, one.blocks) for one in whole),
            scale=self._scale,
            speed=1.0,
            seed=seed,
        )
        before = duty_changes(url)
        run = run_load(self._server(url), load, self._say, tag=f"trial-{seed}")
        records = sorted(run.records, key=lambda record: record.planned_s)
        measured = judge(
            KINDS[kind],
            [served(record) for record in records],
            self._level,
            arrivals_s=whole[-1].at_s - whole[0].at_s,
            wall_s=run.wall_s,
            duty_changes=duty_changes(url) - before,
            busy={},
        )
        setting = Setting(
            rates=rates, level=self._level, min_prefill_tokens=self._min_prefill_tokens, seed=seed
        )
        return Compared(
            kind=kind,
            round=number,
            failed=sum(bool(record.error) for record in records),
            measured=measured,
            simulated=simulate(scaled(whole, self._scale), KINDS[kind], setting),
        )

    def _server(self, url: str) -> Server:
        return Server(url, silence_s=self._silence_s)

    def _sender(self, url: str) -> Send:
        def send(load: Load, concurrency: int) -> Sequence[Record]:
            run = run_load(self._server(url), load, lambda line: None, concurrency=concurrency, tag="rates")
            return run.records

        return send


def served(record: Record) -> Served:
    """A record as the simulation tells of a request. A failed one is late for any level."""
    first_s = record.first_token_s
    more = record.output_tokens - 1
    return Served(
        ttft_ms=NEVER_MS if first_s is None else 1e3 * first_s,
        itl_ms=1e3 * (record.done_s - record.first_s) / more
        if more > 0 and record.first_s is not None
        else 0.0,
        cached_tokens=record.cached.total,
        anywhere_tokens=record.cached.total,
        prompt_tokens=record.prompt_tokens,
    )


def duty_changes(url: str) -> int:
    """Changes of duty that a router has made since its start. Raises BenchError where it does not answer."""
    try:
        text = httpx.get(f"{url}/metrics", timeout=10.0, trust_env=False).raise_for_status().text
    except httpx.HTTPError as error:
        raise BenchError(f"{url}/metrics: {error}") from error
    families = text_string_to_metric_families(text)
    return int(
        sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == "pdserve_router_duty_changes_total"
        )
    )


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """All rounds of a kind: means of shares, measured and simulated."""

    kind: str
    rounds: int
    failed: int
    in_time: float
    in_time_by_part: tuple[float, ...]
    late: float
    slow: float
    duty_changes: float
    simulated: float
    simulated_by_part: tuple[float, ...]


def rows(found: Sequence[Compared]) -> list[Row]:
    """A row for each kind."""
    by_kind: dict[str, list[Compared]] = {}
    for one in found:
        by_kind.setdefault(one.kind, []).append(one)
    return [_row(kind, by_kind[kind]) for kind in KINDS if kind in by_kind]


def _row(kind: str, found: Sequence[Compared]) -> Row:
    measured, simulated = [one.measured for one in found], [one.simulated for one in found]
    return Row(
        kind=kind,
        rounds=len(found),
        failed=sum(one.failed for one in found),
        in_time=round(fmean(one.in_time for one in measured), 4),
        in_time_by_part=_by_part(measured),
        late=round(fmean(one.late for one in measured), 4),
        slow=round(fmean(one.slow for one in measured), 4),
        duty_changes=round(fmean(one.duty_changes for one in measured), 1),
        simulated=round(fmean(one.in_time for one in simulated), 4),
        simulated_by_part=_by_part(simulated),
    )


def _by_part(outcomes: Sequence[Outcome]) -> tuple[float, ...]:
    parts = zip(*(one.in_time_by_part for one in outcomes), strict=True)
    return tuple(round(fmean(part), 4) for part in parts)
