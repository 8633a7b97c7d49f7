"""A cluster over several hosts under one fault after the other, and what its clients saw."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.hosts.cluster import cluster
from benchmarks.hosts.faults import Fault, carry_out
from benchmarks.hosts.figures import HostsFigures, figures_of
from benchmarks.hosts.talk import Turn
from benchmarks.hosts.worker import WRONG
from benchmarks.stores import BenchError

WARM_UP_S: Final = 15.0


def run(
    faults: list[Fault],
    clients: int,
    fault_s: float,
    pause_s: float,
    directory: Path,
    say: Callable[[str], None],
    *,
    ucx: bool,
) -> Iterator[HostsFigures]:
    """Each fault for `fault_s`, with a pause after it. Raises BenchError: something that nothing explains
    ended, or a page was wrong.
    """
    spans: list[tuple[Fault, tuple[float, float], float]] = []
    with cluster(directory, clients, ucx=ucx) as made:
        time.sleep(WARM_UP_S)
        for fault in faults:
            say(f"{fault.name}: {fault.what}")
            span = carry_out(fault, made, fault_s)
            time.sleep(pause_s)
            spans.append((fault, span, time.monotonic()))
        made.stop()
        log = made.log()
    turns = msgspec.json.Decoder(Turn).decode_lines(made.turns_path.read_bytes())
    if WRONG in log:
        raise BenchError(f"a worker was given a wrong page: see {directory}/supervisor.log")
    for fault, span, until_s in spans:
        path = "ucx" if ucx else "tcp"
        yield figures_of(turns, fault.name, fault.what, path, span, until_s, harmless=fault.harmless)
