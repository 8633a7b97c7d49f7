"""Where the time to one disaggregated request's first token goes. Pure.

The router says its parts in the answer's `server-timing`; they follow each other: queue, settle, prefill,
publish, pull, decode, and what is left, router. The workers count theirs at `/metrics`: of `prefill` and of
`decode` the time in SGLang's queue, waiting for the pool's pages, computing. When pages moved is traced in
both workers (kvpool/hicache/page_trace.py), by the clock that all processes of a host share.

Publishing overlaps with computing as far as pages are put before `prefill` is over, and with the pull as far
as they are got while others are still put.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Final

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from pdserve.router.metrics.names import PARTS as ROUTER_PARTS

WORKER_PARTS: Final = ("queue", "pull", "compute")

Interval = tuple[float, float]


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request; milliseconds, intervals since it was sent. `router`, `prefill`, `decode`: parts as they
    say. `puts`: of the prefill worker; `gets`: of the decode worker; up to the first token.
    """

    turn: int
    prompt_tokens: int
    cached_tokens: int
    first_token_ms: float
    router: dict[str, float]
    prefill: dict[str, float]
    decode: dict[str, float]
    puts: list[Interval] = []
    gets: list[Interval] = []


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of a turn's samples, in milliseconds. `parts` add up to the whole of a typical one: `client`
    is what the router did not see; it tells the decode worker's pull apart from `decode`. `put`, `get`: time
    in which pages moved; `put_hidden`: of which before the end of `prefill`; `get_beside_put`: of which pages
    of the same request were still put.
    """

    turn: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    first_token: float
    parts: dict[str, float]
    in_prefill: dict[str, float]
    in_decode: dict[str, float]
    put: float
    put_hidden: float
    get: float
    get_beside_put: float


class Bar(msgspec.Struct, frozen=True):
    """A piece of the picture: in row `row`, from `start` to `end` ms."""

    row: str
    name: str
    start: float
    end: float


def part_sums(metrics: str) -> dict[str, float]:
    """Seconds by part of `pdserve_worker_first_token_seconds` in a worker's `/metrics`."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == "pdserve_worker_first_token_seconds_sum":
                part = sample.labels["part"]
                found[part] = found.get(part, 0.0) + sample.value
    return found


def covered_ms(intervals: Iterable[Interval]) -> float:
    """How long at least one of them is open."""
    total, last = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total


def shared_ms(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """How long one of each is open at the same time."""
    return covered_ms(one) + covered_ms(other) - covered_ms([*one, *other])


def weigh(samples: Sequence[Sample]) -> Weights:
    """The medians of samples of one turn, at least one."""
    first = median(sample.first_token_ms for sample in samples)
    parts = _medians([sample.router for sample in samples], ROUTER_PARTS)
    parts["client"] = max(0.0, median(one.first_token_ms - sum(one.router.values()) for one in samples))
    return Weights(
        turn=samples[0].turn,
        requests=len(samples),
        prompt_tokens=round(median(sample.prompt_tokens for sample in samples)),
        cached_tokens=round(median(sample.cached_tokens for sample in samples)),
        first_token=first,
        parts=parts,
        in_prefill=_medians([sample.prefill for sample in samples], WORKER_PARTS),
        in_decode=_medians([sample.decode for sample in samples], ("queue", "compute")),
        put=median(covered_ms(sample.puts) for sample in samples),
        put_hidden=median(shared_ms(sample.puts, [_prefill_of(sample)]) for sample in samples),
        get=median(covered_ms(sample.gets) for sample in samples),
        get_beside_put=median(shared_ms(sample.gets, sample.puts) for sample in samples),
    )


def bars(sample: Sample) -> list[Bar]:
    """One request as a picture, outermost row first. Where within its stage a worker's part lies is not
    known but for its order: what is left comes before.
    """
    found = [Bar("first token", "", 0.0, sample.first_token_ms)]
    at = 0.0
    stages: dict[str, Interval] = {}
    for name in ROUTER_PARTS:
        if name in sample.router:
            stages[name] = (at, at + sample.router[name])
            found.append(Bar("router", name, *stages[name]))
            at = stages[name][1]
    begin = stages.get("prefill", (0.0, 0.0))[1]
    found += _ending_at(begin, "prefill worker", sample.prefill)
    begin = stages.get("decode", (0.0, sample.first_token_ms))[1]
    found += _ending_at(begin, "decode worker", sample.decode)
    found += [Bar("pages put", "put", *span) for span in sample.puts]
    found += [Bar("pages got", "get", *span) for span in sample.gets]
    return found


def _ending_at(end: float, row: str, parts: Mapping[str, float]) -> list[Bar]:
    found = []
    for name in reversed(WORKER_PARTS):
        length = parts.get(name, 0.0)
        found.append(Bar(row, name, end - length, end))
        end -= length
    return found[::-1]


def _prefill_of(sample: Sample) -> Interval:
    begin = sum(sample.router.get(name, 0.0) for name in ("queue", "settle"))
    return begin, begin + sample.router.get("prefill", 0.0)


def _medians(parts: Sequence[Mapping[str, float]], names: Sequence[str]) -> dict[str, float]:
    """By name, in order; one that no sample has is left out, one that some have is 0 in the others."""
    there = [name for name in names if any(name in part for part in parts)]
    return {name: round(median(part.get(name, 0.0) for part in parts), 2) for name in there}
