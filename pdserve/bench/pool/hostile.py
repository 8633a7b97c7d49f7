"""A pool node beside many hostile connections: p99 of an honest client's gets, and the node's memory.

The node asks for tokens. Strangers hold connections to its control port: silent ones, ones with half a frame,
with noise, and ones that were greeted without a token. The honest client gets one page at a time, at a steady
rate; the time of a get counts from its planned moment, and every fourth get opens a new connection. Phases
without and with each kind take turns. Results are medians over phases.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import psutil

from pdserve.bench.node_processes import client_of, pool_of
from pdserve.bench.pool.hostile_process import KINDS
from pdserve.bench.pool.load_process import fill, make_keys
from pdserve.bench.processes import free_ports
from pdserve.bench.stores import BenchError
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.tokens import Secret

P99_GOAL: Final = 1.5
MEMORY_GOAL: Final = 1.2
PAGE_BYTES: Final = 64 * 1024
PAGES: Final = 256
GETS_S: Final = 200.0
NEW_EVERY: Final = 4
SETTLE_S: Final = 0.5
TOKEN: Final = "the-token-of-the-honest-client"
GEOMETRY: Final = {"hostile": "1"}
NODE: Final = {
    "capacity_bytes": 256 << 20,
    "slab_bytes": 4 << 20,
    "keep": False,
    "admin_token": "the-token-of-the-operator",
    "namespace_defaults": {"read_token": TOKEN},
}


class HostileFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of connections. Medians over phases; ratios are over phases without any."""

    kind: str
    connections: int
    phases: int
    gets: int
    missed: int
    p50_us: float
    p99_us: float
    p99_over_alone: float
    memory_over_alone: float

    @property
    def passed(self) -> bool:
        return not self.missed and self.p99_over_alone <= P99_GOAL and self.memory_over_alone <= MEMORY_GOAL


class _Phase(msgspec.Struct):
    times_s: list[float]
    missed: int
    memory_bytes: int


def hostile(connections: int, phases: int, phase_s: float, directory: Path) -> Iterator[HostileFigures]:
    """Run it in `directory`. Raises BenchError."""
    (port,) = free_ports(1)
    with pool_of(1, directory, NODE, [port]) as (node,):
        config = msgspec.structs.replace(client_of([node], "shm"), token=Secret(TOKEN))
        keys = make_keys("hostile", PAGES)
        with closing(_client(config)) as client:
            fill(client, keys, PAGE_BYTES)
        kinds = ["none", *KINDS]
        seen: dict[str, list[_Phase]] = {kind: [] for kind in kinds}
        process = psutil.Process(node.pid)
        with _attacker(port, connections) as attack:
            for _ in range(phases):
                for kind in kinds:
                    attack("rest" if kind == "none" else kind)
                    time.sleep(SETTLE_S)
                    seen[kind].append(_phase(config, keys, phase_s, process))
    alone = seen["none"]
    for kind in kinds:
        yield _figures(kind, connections, seen[kind], alone)


def _figures(kind: str, connections: int, found: list[_Phase], alone: list[_Phase]) -> HostileFigures:
    def median(phases: list[_Phase], share: int) -> float:
        return statistics.median(float(np.percentile(phase.times_s, share)) for phase in phases)

    def memory(phases: list[_Phase]) -> float:
        return statistics.median(phase.memory_bytes for phase in phases)

    return HostileFigures(
        kind=kind,
        connections=connections if kind != "none" else 0,
        phases=len(found),
        gets=sum(len(phase.times_s) for phase in found),
        missed=sum(phase.missed for phase in found),
        p50_us=round(median(found, 50) * 1e6, 1),
        p99_us=round(median(found, 99) * 1e6, 1),
        p99_over_alone=round(median(found, 99) / median(alone, 99), 3),
        memory_over_alone=round(memory(found) / memory(alone), 3),
    )


def _client(config: PoolClientConfig) -> PoolClient:
    return PoolClient(config, "honest", GEOMETRY, name="honest")


def _phase(config: PoolClientConfig, keys: list[bytes], phase_s: float, node: psutil.Process) -> _Phase:
    page = np.empty(PAGE_BYTES, np.uint8)
    times_s: list[float] = []
    missed = 0
    with closing(_client(config)) as lasting:
        lasting.get(keys[:1], [(page,)])
        next_s = began_s = time.monotonic()
        while next_s < began_s + phase_s:
            next_s += 1 / GETS_S
            time.sleep(max(0.0, next_s - time.monotonic()))
            turn = len(times_s)
            fresh = _client(config) if turn % NEW_EVERY == 0 else None
            (ok,) = (fresh or lasting).get([keys[turn % len(keys)]], [(page,)])
            times_s.append(time.monotonic() - next_s)
            missed += not ok
            if fresh is not None:
                fresh.close()
    if not times_s:
        raise BenchError("a phase was too short for one get")
    return _Phase(times_s, missed, node.memory_info().rss)


@contextmanager
def _attacker(port: int, connections: int) -> Iterator[_Ask]:
    command = [sys.executable, "-m", "pdserve.bench.pool.hostile_process", "127.0.0.1", str(port)]
    process = subprocess.Popen(
        [*command, str(connections)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield _Ask(process)
    finally:
        process.kill()
        process.communicate()


class _Ask:
    """Tells the attacker what to do, and waits until it has begun."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __call__(self, kind: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(kind + "\n")
        self._process.stdin.flush()
        said = self._process.stdout.readline().rpartition(" ")
        if not said[0]:
            raise BenchError("the process with the hostile connections ended")
        if kind != "rest" and said[2].strip() == "0":
            raise BenchError("no hostile connection was taken: nothing would be measured")
