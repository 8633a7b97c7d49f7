"""Pool nodes and a router beside many hostile connections: p99 of honest clients, memory, and crashes.

Each part asks for tokens or keys. An attack is one who at one port: strangers, and holders of a token or key
that is right. Honest clients ask beside it, at a steady rate. Phases without and with each attack of a part
take turns. Results are medians over phases.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from benchmarks.hostile.attacker import REST, AttackerConfig
from benchmarks.hostile.attacks import ATTACKS, Attack
from benchmarks.hostile.honest import Done
from benchmarks.hostile.parts import HOSTILE, PARTS, Part, check_alone
from benchmarks.processes import client
from benchmarks.stores import BenchError

P99_GOAL: Final = 1.5
MEMORY_GOAL: Final = 1.2
SETTLE_S: Final = 0.5
NOBODY: Final = "nobody"


class HostileFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of honest requests beside one attack. Medians over phases; ratios are over those in which
    nobody attacked the same part.
    """

    port: str
    """The attacked one; of `NOBODY` all of the part."""
    who: str
    honest: str
    """get, put or chat."""
    connections: int
    phases: int
    requests: int
    missed: int
    p50_us: float
    p99_us: float
    p99_over_alone: float
    memory_mb: float
    """The process' own, in 10^6 bytes, without what it shares with others."""
    memory_over_alone: float
    crashes: int

    @property
    def passed(self) -> bool:
        good = self.p99_over_alone <= P99_GOAL and self.memory_over_alone <= MEMORY_GOAL
        return good and not self.missed and not self.crashes


class _Seen(msgspec.Struct):
    """Of one attack."""

    phases: list[dict[str, Done]] = []
    memory_bytes: list[int] = []
    crashes: int = 0


def hostile(connections: int, phases: int, phase_s: float, directory: Path) -> Iterator[HostileFigures]:
    """Run it in `directory`. Raises BenchError."""
    for number, part_of in enumerate(PARTS):
        place = directory / f"part{number}"
        place.mkdir()
        with part_of(place) as part, _attacker(connections, place) as attacker:
            attacks = [attack for attack in ATTACKS if attack.port in part.ports]
            seen = _turns(part, attacks, attacker, phases, phase_s)
        alone = seen[NOBODY]
        for what, done in _by_kind(alone).items():
            check_alone(sum(one.missed for one in done), what)
        yield from _rows(NOBODY, ", ".join(part.ports), 0, alone, alone)
        for attack in attacks:
            yield from _rows(attack.who, attack.port, connections, seen[attack.name], alone)


def _turns(
    part: Part, attacks: list[Attack], attacker: _Ask, phases: int, phase_s: float
) -> dict[str, _Seen]:
    """What was seen beside each attack, until the part has ended."""
    seen = {NOBODY: _Seen(), **{attack.name: _Seen() for attack in attacks}}
    for _ in range(phases):
        for name, found in seen.items():
            attack = next((one for one in attacks if one.name == name), None)
            attacker.rest() if attack is None else attacker.attack(attack, part.ports[attack.port])
            time.sleep(SETTLE_S)
            found.phases.append(part.phase(phase_s))
            found.memory_bytes.append(part.memory_bytes())
            if not part.runs():
                found.crashes += 1
                return seen
    return seen


def _by_kind(seen: _Seen) -> dict[str, list[Done]]:
    kinds = {what for phase in seen.phases for what in phase}
    return {what: [phase[what] for phase in seen.phases if what in phase] for what in sorted(kinds)}


def _rows(who: str, port: str, connections: int, seen: _Seen, alone: _Seen) -> Iterator[HostileFigures]:
    before, memory_before = _by_kind(alone), statistics.median(alone.memory_bytes)
    for what, done in _by_kind(seen).items():
        memory = statistics.median(seen.memory_bytes)
        p50, p99 = (_percentile(done, share) for share in (50, 99))
        yield HostileFigures(
            port=port,
            who=who,
            honest=what,
            connections=connections,
            phases=len(done),
            requests=sum(len(one.times_s) for one in done),
            missed=sum(one.missed for one in done),
            p50_us=round(p50 * 1e6, 1),
            p99_us=round(p99 * 1e6, 1),
            p99_over_alone=round(p99 / _percentile(before[what], 99), 3),
            memory_mb=round(memory / 1e6, 1),
            memory_over_alone=round(memory / memory_before, 3),
            crashes=seen.crashes,
        )


def _percentile(phases: list[Done], share: int) -> float:
    return statistics.median(float(np.percentile(one.times_s, share)) for one in phases)


@contextmanager
def _attacker(connections: int, directory: Path) -> Iterator[_Ask]:
    config = AttackerConfig("attacker", connections, HOSTILE)
    command = client(config, directory, "benchmarks.hostile.attacker").command
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield _Ask(process)
    finally:
        process.kill()
        process.communicate()


class _Ask:
    """Tells the attacker what to do, and waits until it has begun."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def rest(self) -> None:
        self._say(REST)

    def attack(self, attack: Attack, port: int) -> None:
        if not self._say(f"{port} {attack.name}"):
            raise BenchError(f"{attack.name}: no connection was taken, so nothing would be measured")

    def _say(self, line: str) -> int:
        """How many connections are open."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        said = self._process.stdout.readline()
        if not said:
            raise BenchError("the process with the hostile connections ended")
        return int(said)
