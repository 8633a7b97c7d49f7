"""R7: how a quiet namespace fares beside a loud one.

One node. The quiet namespace's client gets one page at a time, at a steady rate; a get takes from the moment
at which it is due. The loud namespace has a limit in bytes per second. A process asks for ten times that,
whether it is answered or not (asker.py), for pages that are nowhere: they wait for the rate as others do, and
a miss then costs nothing of it. So all that the namespace may have goes to clients that read and write over
the data path, who, as clients do, wait for their answers. All of them have the lowest priority: they would be
on other machines, and what is measured is what the node does, not how one machine's processors are shared.
Phases alone and phases beside the neighbour take turns, so whatever else the machine does hits both alike.
The figure is the median of the phases' p99. It is none where less was asked for than was meant.
"""

from __future__ import annotations

import statistics
import time
from contextlib import closing
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from pdserve.bench.asker import AskerConfig
from pdserve.bench.cluster import NodeProcess, pool_of
from pdserve.bench.driver import CONNECT_TIMEOUT_S, Board, DriverConfig, driving, fill, make_keys
from pdserve.bench.stores import BenchError
from pdserve.kvpool.client import PoolClient
from pdserve.kvpool.client_config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.cluster_messages import NamespaceSettings, PutNamespace
from pdserve.kvpool.commands.asking import NodeClient
from pdserve.kvpool.messages import DataPathChoice, Done

GOAL: Final = 1.3
OVERLOAD: Final = 10.0
ENOUGH: Final = 0.95  # of what the neighbour is to ask for
QUIET_PAGE_BYTES: Final = 64 * 1024
QUIET_PAGES: Final = 512
QUIET_S: Final = 200.0  # gets a second
LOUD_PAGE_BYTES: Final = 256 * 1024
LOUD_PAGES: Final = 512
LOUD_BATCH: Final = 8
LOUD_PROCESSES: Final = 2
LOUD_THREADS: Final = 4
LOUD_NICE: Final = 19
SETTLE_S: Final = 0.5  # at the start of a phase, not measured
GEOMETRY: Final = {"quiet": "1"}


class Phase(msgspec.Struct, frozen=True):
    """One stretch of the quiet client's gets, in µs; the neighbour's bytes per second, asked for and had."""

    loud: bool
    gets: int
    missed: int
    p50_us: float
    p99_us: float
    asked_bytes_s: float
    loud_bytes_s: float


class Quiet(msgspec.Struct, frozen=True):
    """What was seen. p99 are medians over phases; `ratio` is beside over alone."""

    path: str
    limit_bytes_s: float
    alone_p99_us: float
    beside_p99_us: float
    ratio: float
    phases: list[Phase]

    @property
    def loud_enough(self) -> bool:
        """Whether the neighbour asked for what it should."""
        enough_bytes_s = ENOUGH * OVERLOAD * self.limit_bytes_s
        return all(phase.asked_bytes_s >= enough_bytes_s for phase in self.phases if phase.loud)

    @property
    def passed(self) -> bool:
        return self.ratio <= GOAL and self.loud_enough and not any(phase.missed for phase in self.phases)


def quiet(path: DataPathChoice, limit_bytes_s: float, phases: int, phase_s: float, directory: Path) -> Quiet:
    """Run it in `directory`. Raises BenchError."""
    settings = {"capacity_bytes": 512 << 20, "slab_bytes": 4 << 20, "keep": False}
    with pool_of(1, directory, settings) as (node,):
        _limit(node, limit_bytes_s)
        refs = [PoolNodeRef(node=node.name, address=node.address)]
        config = PoolClientConfig(nodes=refs, data_path=path, connect_timeout_s=CONNECT_TIMEOUT_S)
        rows = LOUD_PROCESSES * LOUD_THREADS
        board = Board(directory / "board", rows + 1)
        keys = make_keys("quiet", QUIET_PAGES)
        operations_s = limit_bytes_s * OVERLOAD / (LOUD_PAGE_BYTES * LOUD_BATCH)
        asker = AskerConfig(
            name="asker",
            address=node.address,
            namespace="loud",
            geometry=GEOMETRY,
            board=board.path,
            row=1 + rows,
            keys=make_keys("nowhere", LOUD_PAGES),
            page_bytes=LOUD_PAGE_BYTES,
            batch=LOUD_BATCH,
            operations_s=operations_s,
        )
        loud = [
            DriverConfig(
                name=f"loud{index}",
                client=config,
                namespace="loud",
                geometry=GEOMETRY,
                board=board.path,
                row=1 + index * LOUD_THREADS,
                threads=LOUD_THREADS,
                keys=make_keys("loud", LOUD_PAGES),
                page_bytes=LOUD_PAGE_BYTES,
                batch=LOUD_BATCH,
                put_share=0.3,
                operations_s=operations_s / rows,
                nice=LOUD_NICE,
            )
            for index in range(LOUD_PROCESSES)
        ]
        with (
            closing(PoolClient(config, "quiet", GEOMETRY, name="quiet")) as client,
            driving(loud, directory),
            driving([asker], directory, "pdserve.bench.asker"),
        ):
            fill(client, keys, QUIET_PAGE_BYTES)
            found = [_phase(client, keys, board, phase_s, loud=index % 2 == 1) for index in range(2 * phases)]
            board.go(False)
    alone, beside = (
        statistics.median(phase.p99_us for phase in found if phase.loud == loud) for loud in (False, True)
    )
    return Quiet(path, limit_bytes_s, alone, beside, round(beside / alone, 3), found)


def _limit(node: NodeProcess, limit_bytes_s: float) -> None:
    asked = NodeClient(node.address)
    try:
        settings = NamespaceSettings(bytes_s=limit_bytes_s)
        asked.ask(lambda request_id: PutNamespace(request_id, "loud", settings), Done)
    finally:
        asked.close()


def _phase(client: PoolClient, keys: list[bytes], board: Board, phase_s: float, *, loud: bool) -> Phase:
    board.go(loud)
    time.sleep(SETTLE_S)
    before, began = board.totals(), time.monotonic()
    page = np.empty(QUIET_PAGE_BYTES, np.uint8)
    times_s: list[float] = []
    missed = turn = 0
    next_s = began
    while next_s < began + phase_s:
        next_s += 1 / QUIET_S
        time.sleep(max(0.0, next_s - time.monotonic()))
        (ok,) = client.get([keys[turn % len(keys)]], [(page,)])
        times_s.append(time.monotonic() - next_s)
        missed += not ok
        turn += 1
    if not times_s:
        raise BenchError("a phase was too short for one get")
    took_s = time.monotonic() - began
    after = board.totals()
    moved, asked = after["pages"] - before["pages"], after["operations"] - before["operations"]
    p50, p99 = (round(float(np.percentile(times_s, share)) * 1e6, 1) for share in (50, 99))
    asked_bytes_s, had_bytes_s = (
        round(count * LOUD_PAGE_BYTES / took_s) for count in (asked * LOUD_BATCH, moved)
    )
    return Phase(loud, len(times_s), missed, p50, p99, asked_bytes_s, had_bytes_s)
