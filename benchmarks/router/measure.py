"""What routers cost, beside each other and beside no router at all.

Every router has one core, the same for all; mock workers and load have the rest. For each number of streams
there are rounds, in which the contenders take turns, in an order drawn from the seed. A turn has phases:

- *whole*: answers in one piece, one request after another on every connection: requests per second, and the
  processor time of each;
- *burst*: streams as fast as they come: chunks per second;
- *paced*: streams of 20 chunks a second each, as models give them: time to the first chunk, the time that a
  chunk takes from the worker to the client, and the processor time of each. A single stream is not paced, or
  there would be few.

At the end comes one round of many long paced streams, in which none begins or ends, and one of connections
that are kept open and idle, which take memory only. Times are percentiles of
all rounds together, rates are medians of the rounds. *Added* is a router's percentile less that of direct
access to the decode worker, so it holds the prefill stage, whose worker answers at once, too.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec
import psutil
import uvloop

from benchmarks.dice import Dice
from benchmarks.peers.redis import redis_server
from benchmarks.pool.own_node import certificates_in
from benchmarks.router.contenders import (
    OURS,
    OURS_ALL,
    OURS_REDIS,
    OURS_TLS,
    OURS_UNIX,
    Server,
    Workers,
    contender,
    mock_worker,
    on_cores,
)
from benchmarks.router.idle import how_many, idle_kb
from benchmarks.router.load import Load, Loaded, run_load
from benchmarks.router.native.instruments import Instruments, build
from benchmarks.stores import BenchError
from pdserve.open_files import raise_open_files

DIRECT: Final = "direct"
"""No router: the load goes to the decode worker."""
INTERVAL_US: Final = 50_000
BURST_CHUNKS: Final = 64
PACED_CHUNKS: Final = 8
LONG_WARM_UP_S: Final = 1.0
LONG_RAMP_S: Final = 0.002  # for each stream

Phase = Literal["whole", "burst", "paced"]
PHASES: Final[tuple[Phase, ...]] = ("whole", "burst", "paced")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure; `long_streams` 0: no round of long ones, and no idle connections."""

    streams: tuple[int, ...] = (1, 16, 64, 512)
    long_streams: int = 1000
    rounds: int = 3
    seconds: float = 1.0
    long_seconds: float = 5.0
    idle: int = 10_000
    """Connections."""
    prompt_bytes: int = 32
    seed: int = 1
    tls: bool = False
    """Measure our router a second time, with TLS to its workers."""
    unix: bool = False
    """Measure our router a second time, with Unix sockets to its workers."""
    redis: bool = False
    """Measure our router a second time, sharing sessions and limits with another one. Both times it has them.
    """

    def turns(self, peers: int) -> int:
        """Of all contenders: direct access, ours once or twice, and so many others."""
        contenders = 2 + self.tls + self.unix + self.redis + peers
        return contenders * (len(self.streams) * self.rounds + 2 * bool(self.long_streams))


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One contender with so many streams; None: not measured."""

    router: str
    streams: int
    added_ttft_ms_p50: float | None = None
    added_ttft_ms_p99: float | None = None
    rps: float | None = None
    chunks_per_s: float | None = None
    rss_mb: float | None = None
    added_whole_ms_p50: float | None = None
    """Of answers in one piece, to their first byte."""
    added_chunk_ms_p50: float | None = None
    added_chunk_ms_p99: float | None = None
    cpu_us_per_request: float | None = None
    cpu_us_per_chunk: float | None = None
    """Of paced streams, so an eighth of a request's is in it; that of the long streams is a chunk's alone."""
    idle_kb: float | None = None
    """Memory of a connection that is kept open and idle, in 10^3 bytes; in the row of the long streams."""
    rps_over: dict[str, float] = {}
    """Its requests per second over those of the others; ours alone."""
    load_busy: float = 0.0
    """The largest share of their cores that load and mock workers used for answers in one piece, or else for
    streams: near 1 they were the limit of `rps`.
    """
    load_busy_burst: float | None = None
    """The same for streams without pauses: near 1 they were the limit of `chunks_per_s`."""
    instruments: str = "Python"
    """What load and mock workers are written in: Python, or C."""
    errors: int = 0
    first_error: str = ""


class Turn(NamedTuple):
    """One phase of one contender in one round."""

    phase: Phase
    loaded: Loaded
    router_cpu_s: float = 0.0
    load_cpu_s: float = 0.0
    rss_mb: float | None = None

    @property
    def done(self) -> int:
        """Requests, or chunks of streams."""
        return self.loaded.requests if self.phase == "whole" else len(self.loaded.chunk_ms)


class Bench:
    """The contenders, running, and how they are loaded."""

    def __init__(
        self,
        contenders: Sequence[Server],
        workers: Sequence[Server],
        settings: Settings,
        instruments: Instruments | None = None,
    ) -> None:
        self.contenders = contenders
        self._workers = workers
        self._settings = settings
        self._instruments = instruments

    def rounds(self, streams: int, went_on: Callable[[], None]) -> dict[str, list[Turn]]:
        """The turns of each contender with so many streams."""
        settings = self._settings
        turns: dict[str, list[Turn]] = {one.name: [] for one in self.contenders}
        for number in range(settings.rounds):
            for one in Dice("turns", settings.seed, streams, number).shuffled(self.contenders):
                turns[one.name] += [
                    self._turn(one, phase, _load(phase, streams, settings)) for phase in PHASES
                ]
                went_on()
        return turns

    def long(self, went_on: Callable[[], None]) -> dict[str, list[Turn]]:
        """One turn of each contender with long streams."""
        turns = {}
        for one in self.contenders:
            turns[one.name] = [self._turn(one, "paced", _long_load(self._settings))]
            went_on()
        return turns

    def idle(self, connections: int, went_on: Callable[[], None]) -> dict[str, float | None]:
        """The memory of an idle connection at each contender."""
        found = {}
        for one in self.contenders:
            found[one.name] = idle_kb(one, connections)
            went_on()
        return found

    def _turn(self, one: Server, phase: Phase, load: Load) -> Turn:
        return take_turn(one, phase, load, self._workers, self._instruments)


def take_turn(
    one: Server, phase: Phase, load: Load, workers: Sequence[Server], instruments: Instruments | None
) -> Turn:
    """Put the load on one contender. `workers`: those behind it. Raises BenchError."""

    def look(loading: psutil.Process) -> tuple[float, float, float | None]:
        driving = [*workers, Server("load", 0, (loading,))]
        return one.cpu_s(), sum(server.cpu_s() for server in driving), one.rss_mb()

    if instruments is not None:
        loaded, before, after = instruments.run_load(load, one.port, look)
    else:
        here = psutil.Process()
        loaded, before, after = uvloop.run(run_load(load, one.port, lambda: look(here)))
    return Turn(phase, loaded, after[0] - before[0], after[1] - before[1], after[2])


def _load(phase: Phase, streams: int, settings: Settings) -> Load:
    interval_us = INTERVAL_US if phase == "paced" and streams > 1 else 0
    return Load(
        streams=streams,
        seconds=settings.seconds,
        chunks={"whole": 0, "burst": BURST_CHUNKS, "paced": PACED_CHUNKS}[phase],
        interval_us=interval_us,
        ramp_s=interval_us / 1e6,
        prompt_bytes=settings.prompt_bytes,
        seed=settings.seed,
    )


def _long_load(settings: Settings) -> Load:
    load = Load(
        streams=settings.long_streams,
        seconds=settings.long_seconds,
        interval_us=INTERVAL_US,
        prompt_bytes=settings.prompt_bytes,
        seed=settings.seed,
    )
    return lasting(load)


def lasting(load: Load) -> Load:
    """The same of streams that begin one by one before the window; the first ends a while after it."""
    ramp_s = load.streams * LONG_RAMP_S
    lasts_s = ramp_s + LONG_WARM_UP_S + load.seconds + 0.5
    chunks = math.ceil(lasts_s * 1e6 / load.interval_us)
    return msgspec.structs.replace(load, chunks=chunks, ramp_s=ramp_s, warm_up_s=LONG_WARM_UP_S)


def measure(
    peers: Sequence[str],
    settings: Settings,
    directory: Path,
    said: Callable[[str], None],
    went_on: Callable[[], None],
) -> Iterator[Row]:
    """Rows, number by number of streams, direct access first, then pdserve. `said` is told of a peer that
    does not start, `went_on` after each turn. Raises BenchError.
    """
    core, rest = split_cores(os.sched_getaffinity(0))
    connections = how_many(settings.idle, raise_open_files())
    with ExitStack() as stack:
        stack.enter_context(on_cores(rest))
        instruments = build(directory, said)
        compiled = None if settings.tls else instruments  # workers of one kind, with TLS and without
        mocks = [
            stack.enter_context(mock_worker(role, directory, instruments=compiled))
            for role in ("prefill", "decode")
        ]
        prefill, decode = mocks
        workers = Workers(prefill.port, decode.port, keeps_sessions=settings.redis)
        contenders = [Server(DIRECT, workers.decode)]
        before = dict.fromkeys((OURS, *peers), workers)
        if settings.tls:
            tls = certificates_in(directory / "ca")
            prefill, decode = [stack.enter_context(mock_worker(one.name, directory, tls)) for one in mocks]
            mocks += [prefill, decode]
            before[OURS_TLS] = Workers(prefill.port, decode.port, tls.ca)
        if settings.unix:
            if instruments is None:
                raise BenchError("--unix needs a C compiler: mock workers in Python have no Unix sockets")
            prefill, decode = [
                stack.enter_context(
                    mock_worker(role, directory, instruments=instruments, has_host_socket=True)
                )
                for role in ("prefill", "decode")
            ]
            mocks += [prefill, decode]
            before[OURS_UNIX] = Workers(prefill.port, decode.port)
        if settings.redis:
            path, _ = stack.enter_context(redis_server(directory))
            before[OURS_REDIS] = workers._replace(redis=path)
            stack.enter_context(contender(OURS_REDIS, before[OURS_REDIS], directory, rest))  # the other one
        contenders += started(before, directory, core, said, stack)
        bench = Bench(contenders, mocks, settings, instruments)
        language = "Python" if instruments is None else "C"
        for streams in settings.streams:
            yield from rows_of(streams, bench.rounds(streams, went_on), len(rest), language)
        if settings.long_streams:
            rows = rows_of(settings.long_streams, bench.long(went_on), len(rest), language)
            idle = bench.idle(connections, went_on)
            for row in rows:
                yield msgspec.structs.replace(row, idle_kb=idle[row.router])


def started(
    wanted: Mapping[str, Workers],
    directory: Path,
    cores: set[int],
    said: Callable[[str], None],
    stack: ExitStack,
) -> list[Server]:
    """Routers before their workers, running on these cores until the stack's end. `said` is told of a peer
    that does not start. Raises BenchError.
    """
    running = []
    for name, workers in wanted.items():
        try:
            running.append(stack.enter_context(contender(name, workers, directory, cores)))
        except BenchError as error:
            if name in OURS_ALL:
                raise
            said(f"left out: {error}")
    return running


def split_cores(cores: set[int]) -> tuple[set[int], set[int]]:
    """(the router's, those of load and mock workers); with one core they share it."""
    last = max(cores)
    return {last}, cores - {last} or cores


def rows_of(
    streams: int, turns: Mapping[str, Sequence[Turn]], load_cores: int, instruments: str = "Python"
) -> list[Row]:
    """The figures of all contenders, from their turns. Pure."""
    direct = turns[DIRECT]
    rps = {name: rate([turn for turn in mine if turn.phase == "whole"]) for name, mine in turns.items()}
    rows = []
    for name, mine in turns.items():
        by_phase: dict[Phase, list[Turn]] = {p: [t for t in mine if t.phase == p] for p in PHASES}
        own_rps = rps[name]
        memory = [turn.rss_mb for turn in mine if turn.rss_mb is not None]
        rows.append(
            Row(
                router=name,
                streams=streams,
                added_ttft_ms_p50=_added(mine, direct, "paced", "first_ms", 50),
                added_ttft_ms_p99=_added(mine, direct, "paced", "first_ms", 99),
                rps=own_rps,
                chunks_per_s=rate(by_phase["burst"] or by_phase["paced"]),
                rss_mb=round(max(memory), 1) if memory else None,
                added_whole_ms_p50=_added(mine, direct, "whole", "first_ms", 50),
                added_chunk_ms_p50=_added(mine, direct, "paced", "chunk_ms", 50),
                added_chunk_ms_p99=_added(mine, direct, "paced", "chunk_ms", 99),
                cpu_us_per_request=cpu_us(by_phase["whole"]) if memory else None,
                cpu_us_per_chunk=cpu_us(by_phase["paced"]) if memory else None,
                rps_over={
                    other: round(own_rps / theirs, 2)
                    for other, theirs in rps.items()
                    if name == OURS and other not in (OURS, DIRECT) and own_rps and theirs
                },
                load_busy=load_busy(by_phase["whole"] or mine, load_cores),
                load_busy_burst=load_busy(by_phase["burst"], load_cores) if by_phase["burst"] else None,
                instruments=instruments,
                errors=sum(turn.loaded.errors for turn in mine),
                first_error=next((t.loaded.first_error for t in mine if t.loaded.first_error), ""),
            )
        )
    return rows


def rate(turns: Sequence[Turn]) -> float | None:
    """Requests or chunks per second: the median of the rounds. None: nothing was measured."""
    rates = [turn.done / turn.loaded.seconds for turn in turns]
    return round(statistics.median(rates), 1) if rates else None


def load_busy(turns: Sequence[Turn], load_cores: int) -> float:
    """The largest share of their cores that load and mock workers used."""
    return round(max(turn.load_cpu_s / turn.loaded.seconds for turn in turns) / load_cores, 2)


def cpu_us(turns: Sequence[Turn]) -> float | None:
    """Processor time of each request or chunk, over all rounds: its clock ticks every 10 ms."""
    count = sum(turn.done for turn in turns)
    return round(sum(turn.router_cpu_s for turn in turns) / count * 1e6, 1) if count else None


def _added(
    mine: Sequence[Turn],
    direct: Sequence[Turn],
    phase: Phase,
    times: Literal["first_ms", "chunk_ms"],
    percent: int,
) -> float | None:
    """In percentiles of all rounds. None for direct access itself, and where nothing was measured."""
    own, other = _percentile(mine, phase, times, percent), _percentile(direct, phase, times, percent)
    return None if mine is direct or own is None or other is None else round(own - other, 3)


def _percentile(turns: Sequence[Turn], phase: Phase, times: str, percent: int) -> float | None:
    found: list[float] = sorted(
        ms for turn in turns if turn.phase == phase for ms in getattr(turn.loaded, times)
    )
    return found[len(found) * percent // 100] if found else None
