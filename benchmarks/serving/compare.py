"""The same loads against several servers. All are started, one after the other, and then take turns: in each
round every load goes to each of them, and every round begins with another. Rounds have texts of their own, so
their first turns find nothing cached. Those that are not asked take about 2 % of a core each meanwhile.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Final

from msgspec.structs import replace

from benchmarks.serving.figures import outcome_of
from benchmarks.serving.load.plan import Load, Shape, make_load
from benchmarks.serving.load.run import Say, Server, run_load
from benchmarks.serving.summary import Measured
from benchmarks.stores import BenchError

WARM_UP_SEED: Final = 1 << 40
SEEDS_OF_A_LOAD: Final = 1 << 32  # loads have texts of their own, as rounds have

Launch = Callable[[str, str], AbstractContextManager[str]]
"""(contender, size of the device's cache) to the URL of its cluster."""


def compare(
    contenders: Sequence[str],
    sizes: Sequence[str],
    rounds: int,
    loads: Mapping[str, Shape],
    seed: int,
    launch: Launch,
    keep: Callable[[Measured], None],
    say: Say,
    *,
    concurrency: int,
    silence_s: float,
    rate_s: float | None = None,
    limit_s: float = 0.0,
) -> list[str]:
    """Measure; `keep` gets each contender's run as it ends. Each size has its share of `limit_s` (0: no
    limit): after the first no round of a load begins that, as long as the one before, would end later. A
    contender that does not start, or no longer answers, is left out. `rate_s`: asks per second in the open
    loop; None is the closed one. Returns what went wrong, a line each.
    """
    began_s, problems = time.monotonic(), list[str]()
    for number, size in enumerate(sizes):
        end_s = began_s + limit_s * (number + 1) / len(sizes) if limit_s else math.inf
        turns = _Turns(loads, seed, keep, say, concurrency=concurrency, silence_s=silence_s, rate_s=rate_s)
        with ExitStack() as running:
            for name in contenders:
                say(f"{size} device cache: starting {name}")
                try:
                    turns.add(name, running.enter_context(launch(name, size)))
                except BenchError as error:
                    turns.problems.append(f"{name}, {size}: {error}")
                    say(f"left out: {error}")
            turns.run(size, rounds, end_s)
        problems += turns.problems
    return problems


class _Turns:
    """The contenders that run, taking turns."""

    def __init__(
        self,
        loads: Mapping[str, Shape],
        seed: int,
        keep: Callable[[Measured], None],
        say: Say,
        *,
        concurrency: int,
        silence_s: float,
        rate_s: float | None,
    ) -> None:
        self.problems: list[str] = []
        self._loads = loads
        self._seed = seed
        self._keep = keep
        self._say = say
        self._concurrency = concurrency
        self._silence_s = silence_s
        self._rate_s = rate_s
        self._servers: dict[str, Server] = {}

    def add(self, name: str, url: str) -> None:
        """One that has started. Raises BenchError where it cannot be asked."""
        server = Server(url, silence_s=self._silence_s)
        warm_up(server, max(self._loads.values(), key=lambda shape: make_load(shape, 0).longest_tokens))
        self._servers[name] = server

    def run(self, size: str, rounds: int, end_s: float) -> None:
        took_s = dict.fromkeys(self._loads, 0.0)
        for number in range(rounds):
            for place, (name, shape) in enumerate(self._loads.items()):
                began_s = time.monotonic()
                if number and began_s + took_s[name] > end_s:
                    self._say(f"{number} of {rounds} rounds of {name}: another would take too long")
                    continue
                seed = self._seed + place * SEEDS_OF_A_LOAD + number
                self._round(size, number, name, make_load(shape, seed, self._rate_s))
                took_s[name] = time.monotonic() - began_s

    def _round(self, size: str, number: int, name: str, load: Load) -> None:
        order = list(self._servers)
        first = number % max(1, len(order))
        for contender in (*order[first:], *order[:first]):
            self._say(f"{size} device cache, round {number + 1}: {contender}: {name}: {len(load.asks)} asks")
            try:
                server = self._servers[contender]
                lockstep = self._rate_s is None
                run = run_load(server, load, self._say, concurrency=self._concurrency, lockstep=lockstep)
            except BenchError as error:
                self._leave_out(contender, f"{name}, {size}, {contender}: {error}")
                continue
            outcome = outcome_of(run)
            self._keep(Measured(load=name, size=size, contender=contender, round=number, outcome=outcome))
            if outcome.all.failed:
                problem = (
                    f"{name}, {size}, {contender}: {outcome.all.failed} of {outcome.all.asks} asks failed"
                )
                self.problems.append(problem)
            if outcome.all.failed == outcome.all.asks:
                self._leave_out(contender, f"{contender} answers nothing")

    def _leave_out(self, contender: str, why: str) -> None:
        del self._servers[contender]
        self.problems.append(why)
        self._say(f"left out from here on: {why}")


def warm_up(server: Server, shape: Shape) -> None:
    """One conversation of two turns, of the load's lengths, so that a server's first work is not measured.
    Raises BenchError where it cannot be asked.
    """
    short = replace(shape, users=1, rounds=min(2, shape.rounds), output_tokens=min(8, shape.output_tokens))
    run_load(server, make_load(short, WARM_UP_SEED), lambda line: None, tag="warm-up")
