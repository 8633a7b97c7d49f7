"""Ranks of one worker that move their pages at the same time, through one pool node.

Each rank is a process with a page mover of its own, as a scheduler of SGLang has. A round measures in turn a
NumPy copy (memcpy), a put and a get of all pages, done by all ranks at once. The rate in sum is all bytes
over the time from the first start to the last end. Figures are medians over rounds, after one round that
does not count.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.boards import Rows, new_rows
from benchmarks.pool.ranks import rank_process as r
from benchmarks.pool.speed import Workload
from benchmarks.processes import Child, clients
from benchmarks.stores import BenchError
from pdserve.kvpool.client.client import PoolClient

WITHIN_S: Final = 120.0
POLL_S: Final = 0.001
WARM_UP_ROUNDS: Final = 1


class RanksFigures(msgspec.Struct, frozen=True, kw_only=True):
    """So many ranks at once. Rates in 10^9 bytes per second, in sum over the ranks."""

    path: str
    checksum: bool
    page_bytes: int
    batch_pages: int
    total_bytes: int
    ranks: int
    rounds: int
    memcpy_gbps: float
    get_gbps: float
    put_gbps: float
    get_over_memcpy: float
    put_over_memcpy: float


def measure_ranks(
    client: PoolClient, workload: Workload, ranks: int, total_bytes: int, rounds: int
) -> RanksFigures:
    """`total_bytes`: pages of all ranks together. Raises BenchError, also where a page was not moved."""
    pages = total_bytes // workload.page_bytes // ranks // workload.batch_pages * workload.batch_pages
    if not pages:
        raise BenchError(
            f"{ranks} ranks have no batch of {workload.batch_pages} pages each in {total_bytes} bytes"
        )
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as place:
        directory = Path(place)
        board = new_rows(directory / "board", 1 + ranks, r.COLUMNS)
        configs = [
            r.RankConfig(
                name=f"rank{rank}",
                client=client.config,
                board=str(directory / "board"),
                row=1 + rank,
                page_bytes=workload.page_bytes,
                batch_pages=workload.batch_pages,
                pages=pages,
            )
            for rank in range(ranks)
        ]
        with clients(configs, directory, r.__name__) as running:
            times_s = _rounds(client, board, running, rounds)
    moved = pages * ranks * workload.page_bytes
    copy, put, get = (moved / statistics.median(times_s[what]) / 1e9 for what in r.WORKS)
    return RanksFigures(
        path=workload.path,
        checksum=workload.checksum,
        page_bytes=workload.page_bytes,
        batch_pages=workload.batch_pages,
        total_bytes=moved,
        ranks=ranks,
        rounds=rounds,
        memcpy_gbps=round(copy, 3),
        get_gbps=round(get, 3),
        put_gbps=round(put, 3),
        get_over_memcpy=round(get / copy, 3),
        put_over_memcpy=round(put / copy, 3),
    )


def _rounds(
    client: PoolClient, board: Rows, running: dict[str, Child], rounds: int
) -> dict[r.Work, list[float]]:
    """How long each work took in each round."""
    times_s: dict[r.Work, list[float]] = {what: [] for what in r.WORKS}
    _await(board, running, 1)  # they are ready
    number = 1
    for turn in range(WARM_UP_ROUNDS + rounds):
        client.clear()
        for place, what in enumerate(r.WORKS):
            number += 1
            board[0, r.WORK] = place
            board[0, r.NUMBER] = number
            _await(board, running, number)
            if missed := int(board[1:, r.MISSED].sum()):
                raise BenchError(
                    f"{what}: {missed} pages were not moved; the pool's capacity may be too small"
                )
            if turn >= WARM_UP_ROUNDS:
                began_ns, ended_ns = board[1:, r.BEGAN_NS].min(), board[1:, r.ENDED_NS].max()
                times_s[what].append(float(ended_ns - began_ns) / 1e9)
    return times_s


def _await(board: Rows, running: dict[str, Child], number: int) -> None:
    """Wait until all ranks have done the work of this number."""
    deadline = time.monotonic() + WITHIN_S
    while (board[1:, r.NUMBER] < number).any():
        for name, child in running.items():
            if not child.runs:
                last = child.log().strip().splitlines()[-1:] or ["it said nothing"]
                raise BenchError(f"{name} died: {last[0]}")
        if time.monotonic() > deadline:
            raise BenchError(f"the ranks did not move their pages within {WITHIN_S:.0f} s")
        time.sleep(POLL_S)
