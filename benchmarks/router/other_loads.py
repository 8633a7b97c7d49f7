"""Other loads than those of `measure`: long bodies, pipelined requests, two processes, and memory.

Memory comes first: that of a router with nothing to do, of connections that are kept open and idle, and of
these with streams of a chunk a second each beside them. Then come rounds of answers in one piece, in which
loads and routers take turns; rates are medians of the rounds. A router of two processes has all cores, and
so it has those of the load, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.dice import Dice
from benchmarks.router.contenders import (
    OURS,
    OURS_TWO,
    Server,
    Workers,
    mock_worker,
    on_cores,
)
from benchmarks.router.idle import how_many, idle_connections
from benchmarks.router.load import Load
from benchmarks.router.measure import (
    Turn,
    cpu_us,
    lasting,
    load_busy,
    rate,
    split_cores,
    started,
    take_turn,
)
from benchmarks.router.native.instruments import Instruments, build
from pdserve.open_files import raise_open_files

LONG_BODY_BYTES: Final = 128 * 1024
PIPELINED: Final = 8
INTERVAL_US: Final = 1_000_000
CLOSED: Final = "the router closed idle connections"


class OtherSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure."""

    connections: int = 16
    rounds: int = 3
    seconds: float = 1.0
    long_streams: int = 5000
    long_seconds: float = 5.0
    idle: int = 10_000
    """Connections."""
    seed: int = 1

    @property
    def loads(self) -> dict[str, Load]:
        """Those of whole answers, by their names."""
        plain = Load(streams=self.connections, seconds=self.seconds, seed=self.seed)
        change = msgspec.structs.replace
        return {
            "plain": plain,
            "bodies of 128 KiB": change(plain, prompt_bytes=LONG_BODY_BYTES),
            f"{PIPELINED} requests pipelined": change(plain, pipelined=PIPELINED),
        }

    def turns(self, peers: int) -> int:
        """Of all routers together."""
        return self.rounds * (1 + len(self.loads) * (1 + peers)) + 1 + peers


class OtherRow(msgspec.Struct, frozen=True, kw_only=True):
    """One router under one load; None: not measured."""

    load: str
    router: str
    connections: int
    """Of clients at the same time."""
    rps: float | None = None
    cpu_us_per_request: float | None = None
    cpu_us_per_chunk: float | None = None
    rss_mb: float | None = None
    load_busy: float = 0.0
    """As `measure.Row.load_busy`."""
    instruments: str
    errors: int = 0
    first_error: str = ""


def measure_others(
    peers: Sequence[str],
    settings: OtherSettings,
    directory: Path,
    said: Callable[[str], None],
    went_on: Callable[[], None],
) -> Iterator[OtherRow]:
    """Rows, load by load. `said` and `went_on` as `measure.measure`. Raises BenchError."""
    core, rest = split_cores(os.sched_getaffinity(0))
    most_files = raise_open_files()
    with ExitStack() as stack:
        stack.enter_context(on_cores(rest))
        instruments = build(directory, said)
        mocks = [
            stack.enter_context(mock_worker(role, directory, instruments=instruments))
            for role in ("prefill", "decode")
        ]
        workers = Workers(mocks[0].port, mocks[1].port)
        routers = started(dict.fromkeys((OURS, *peers), workers), directory, core, said, stack)
        bench = _Bench(settings, mocks, instruments, len(rest))
        # the streams' clients and workers take files too
        idle = max(0, how_many(settings.idle + settings.long_streams, most_files) - settings.long_streams)
        for one in routers:
            yield from bench.held(one, idle)
            went_on()
        two = started({OURS_TWO: workers._replace(processes=2)}, directory, core | rest, said, stack)
        yield from bench.whole(routers, two, went_on)


class _Bench:
    """How the routers are loaded."""

    def __init__(
        self,
        settings: OtherSettings,
        workers: Sequence[Server],
        instruments: Instruments | None,
        load_cores: int,
    ) -> None:
        self._settings = settings
        self._workers = workers
        self._instruments = instruments
        self._language = "Python" if instruments is None else "C"
        self._load_cores = load_cores

    def whole(
        self, routers: Sequence[Server], two: Sequence[Server], went_on: Callable[[], None]
    ) -> Iterator[OtherRow]:
        """Rows of answers in one piece."""
        settings = self._settings
        pairs = [(name, one) for name in settings.loads for one in routers]
        pairs += [("plain", one) for one in two]
        turns: dict[tuple[str, str], list[Turn]] = {(name, one.name): [] for name, one in pairs}
        for number in range(settings.rounds):
            for name, one in Dice("turns", settings.seed, number).shuffled(pairs):
                load = settings.loads[name]
                turns[name, one.name].append(take_turn(one, "whole", load, self._workers, self._instruments))
                went_on()
        for (name, router), mine in turns.items():
            yield self._row(name, router, settings.connections, mine)

    def held(self, one: Server, idle: int) -> Iterator[OtherRow]:
        """The rows of its memory: with idle connections, and with streams beside them."""
        settings = self._settings
        yield self._of_memory("nothing", one, 0)
        load = Load(
            streams=settings.long_streams,
            seconds=settings.long_seconds,
            interval_us=INTERVAL_US,
            seed=settings.seed,
        )
        with idle_connections(one, idle) as are_open:
            row = self._of_memory("idle", one, idle)
            yield row if are_open else msgspec.structs.replace(row, errors=1, first_error=CLOSED)
            if not settings.long_streams:
                return
            turn = take_turn(one, "paced", lasting(load), self._workers, self._instruments)
            yield self._row("idle and streams", one.name, idle + settings.long_streams, [turn])

    def _of_memory(self, name: str, one: Server, connections: int) -> OtherRow:
        return OtherRow(
            load=name,
            router=one.name,
            connections=connections,
            rss_mb=_rounded(one.rss_mb()),
            instruments=self._language,
        )

    def _row(self, name: str, router: str, connections: int, turns: Sequence[Turn]) -> OtherRow:
        whole = turns[0].phase == "whole"
        cpu = cpu_us(turns)
        return OtherRow(
            load=name,
            router=router,
            connections=connections,
            rps=rate(turns) if whole else None,
            cpu_us_per_request=cpu if whole else None,
            cpu_us_per_chunk=None if whole else cpu,
            rss_mb=_rounded(max(turn.rss_mb or 0.0 for turn in turns)),
            load_busy=load_busy(turns, self._load_cores),
            instruments=self._language,
            errors=sum(turn.loaded.errors for turn in turns),
            first_error=next((t.loaded.first_error for t in turns if t.loaded.first_error), ""),
        )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
