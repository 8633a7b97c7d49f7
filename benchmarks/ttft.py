"""Where the time to the first token goes when prefill and decode are two workers, one request at a time.

The router says its parts in the answer's `server-timing`; they follow each other: queue, settle, prefill,
publish, pull, decode, and what is left, router. The workers count theirs at `/metrics`: the time in SGLang's
queue, waiting for the pool's pages, computing. Figures are medians over the conversations. Fails when any
request did.
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import httpx
import msgspec
import typer
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.compare import warm_up
from benchmarks.lib.cluster import (
    DEMO_MODEL,
    ExtraArgs,
    ModelOption,
    PoolCapacityOption,
    Settings,
    launched,
    settings_of,
)
from benchmarks.lib.load import Record, Shape, make_load
from benchmarks.lib.report import (
    FormatOption,
    OutOption,
    Output,
    Seed,
    Silence,
    Table,
    fail_with,
    say,
    script,
)
from benchmarks.lib.run import Server, run_load
from pdserve.router.metrics.names import PARTS as ROUTER_PARTS
from pdserve.router.request.reports import parse_timing
from tests.support.processes import HarnessError

ROLES: Final = ("prefill", "decode")
WORKER_PARTS: Final = ("queue", "pull", "compute")
SETTLE_S: Final = 1.0  # after each request: its pages are written back, and its parts are counted


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request, in milliseconds. `router`, `prefill`, `decode`: parts as they say."""

    turn: int
    prompt_tokens: int
    cached_tokens: int
    first_token_ms: float
    router: dict[str, float]
    prefill: dict[str, float]
    decode: dict[str, float]


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of a turn's samples, in milliseconds. `parts` add up to the whole of a typical request;
    `client` is what the router did not see.
    """

    turn: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    first_token: float
    parts: dict[str, float]
    in_prefill: dict[str, float]
    in_decode: dict[str, float]


def main(
    tokens: Annotated[int, typer.Option(min=1, help="New tokens of each turn.")] = 2048,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each conversation.")] = 2,
    repeat: Annotated[int, typer.Option(min=1, help="Conversations; results are medians over them.")] = 5,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of every answer.")] = 32,
    pull_step: Annotated[
        int | None,
        typer.Option(
            min=1, help="Pull prompts of twice as many tokens in such steps while they are computed."
        ),
    ] = None,
    device_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens in the device KV cache of each worker.")
    ] = 16384,
    model: ModelOption = DEMO_MODEL,
    pool_capacity: PoolCapacityOption = "2GiB",
    seed: Seed = 1,
    silence: Silence = 300.0,
    out: OutOption = None,
    format: FormatOption = "text",
    extra: ExtraArgs = None,
) -> None:
    title = f"{repeat} conversations of {rounds} turns of {tokens:,} new tokens, one at a time, {model.name}"
    shape = Shape(users=repeat, rounds=rounds, turn_tokens=tokens, output_tokens=output_tokens)
    output = Output(format, load=title, seed=seed)
    # a head that is sent early does not say where the time went
    tables: dict[str, Any] = {"router": {"deadlines": {"early_head_s": 3600.0}}}
    if pull_step is not None:
        tables["worker"] = {"pull_step_tokens": pull_step}
        tables["router"]["pull_ahead_tokens"] = 2 * pull_step
    with settings_of(
        model, device_tokens, extra, out, pool_capacity=pool_capacity, tables=tables
    ) as settings:
        samples, problems = measure(shape, seed, settings, silence)
    turns = sorted({one.turn for one in samples})
    found = [parts_of([one for one in samples if one.turn == turn]) for turn in turns]
    for line in [*samples, *found]:
        output.row(line)
    output.show(*(parts_table(of_turn) for of_turn in found))
    fail_with(problems)


def measure(shape: Shape, seed: int, settings: Settings, silence_s: float) -> tuple[list[Sample], list[str]]:
    """A sample for each request that was answered, and what went wrong with others. Raises HarnessError."""
    with launched("disagg", settings) as cluster:
        server = Server(cluster.url, silence_s=silence_s)
        warm_up(server, shape)
        workers = _Workers(settings.directory / "disagg")
        run = run_load(server, make_load(shape, seed), say, concurrency=1, lockstep=True, watch=workers.note)
        workers.close()
    samples = [
        Sample(
            turn=record.turn,
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached.total,
            first_token_ms=round(1e3 * record.first_token_s, 3),
            router=parse_timing(record.server_timing),
            **workers.parts[record.session, record.turn],
        )
        for record in run.records
        if record.first_token_s is not None
    ]
    return samples, [f"{one.error} {one.detail}".strip() for one in run.records if one.error]


class _Workers:
    """Reads what the workers of a cluster count, after each request. `parts`: milliseconds by (session,
    turn), role, part.
    """

    def __init__(self, directory: Path) -> None:
        self.parts: dict[tuple[int, int], dict[str, dict[str, float]]] = {}
        self._http = httpx.Client(trust_env=False, timeout=30.0)
        self._urls = {role: _worker_url(directory / f"{role}0.toml") for role in ROLES}
        self._before = {role: self._read(role) for role in ROLES}

    def note(self, record: Record) -> None:
        """A request was answered: what has been counted since the last one is its."""
        time.sleep(SETTLE_S)  # nothing else runs in this client
        before, self._before = self._before, {role: self._read(role) for role in ROLES}
        self.parts[record.session, record.turn] = {
            role: {
                part: round(1e3 * (self._before[role].get(part, 0.0) - before[role].get(part, 0.0)), 3)
                for part in WORKER_PARTS
            }
            for role in ROLES
        }

    def close(self) -> None:
        self._http.close()

    def _read(self, role: str) -> dict[str, float]:
        try:
            answer = self._http.get(f"{self._urls[role]}/metrics")
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise HarnessError(f"the {role} worker's /metrics cannot be read: {error}") from error
        return part_sums(answer.text)


def _worker_url(config: Path) -> str:
    engine = tomllib.loads(config.read_text())["engine"]
    return f"http://{engine['host']}:{engine['port']}"


def part_sums(metrics: str) -> dict[str, float]:
    """Seconds by part of `pdserve_worker_first_token_seconds` in a worker's `/metrics`."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == "pdserve_worker_first_token_seconds_sum":
                part = sample.labels["part"]
                found[part] = found.get(part, 0.0) + sample.value
    return found


def parts_of(samples: Sequence[Sample]) -> Parts:
    """The medians of samples of one turn, at least one."""
    parts = _medians([sample.router for sample in samples], ROUTER_PARTS)
    parts["client"] = max(0.0, median(one.first_token_ms - sum(one.router.values()) for one in samples))
    return Parts(
        turn=samples[0].turn,
        requests=len(samples),
        prompt_tokens=round(median(sample.prompt_tokens for sample in samples)),
        cached_tokens=round(median(sample.cached_tokens for sample in samples)),
        first_token=median(sample.first_token_ms for sample in samples),
        parts=parts,
        in_prefill=_medians([sample.prefill for sample in samples], WORKER_PARTS),
        in_decode=_medians([sample.decode for sample in samples], ("queue", "compute")),
    )


def _medians(parts: Sequence[Mapping[str, float]], names: Sequence[str]) -> dict[str, float]:
    """By name, in order; one that no sample has is left out, one that some have is 0 in the others."""
    there = [name for name in names if any(name in part for part in parts)]
    return {name: round(median(part.get(name, 0.0) for part in parts), 2) for name in there}


def parts_table(one: Parts) -> Table:
    title = (
        f"Turn {one.turn}: first token after {one.first_token:,.1f} ms; medians of {one.requests} requests "
        f"of {one.prompt_tokens:,} tokens, {one.cached_tokens:,} cached"
    )

    def rows() -> Iterator[tuple[str, str, str]]:
        for name, spent in one.parts.items():
            yield _row(name, spent, one.first_token)
            inside = {"prefill": one.in_prefill, "decode": one.in_decode}.get(name, {})
            for part, part_ms in inside.items():
                yield _row(f"- {part}", part_ms, one.first_token)

    return Table(title, ("part", "ms", "share"), list(rows()), left=("part",))


def _row(name: str, spent: float, whole: float) -> tuple[str, str, str]:
    return name, f"{spent:,.1f}", f"{spent / whole:.1%}" if whole else "-"


if __name__ == "__main__":
    script(main, __doc__)
