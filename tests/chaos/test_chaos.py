"""Three pool nodes with SSD tiers under faults, and clients that check every byte.

By default one short run with the faults that disturb most. Under `--all` every kind of fault for two minutes.
PDSERVE_CHAOS_MINUTES and PDSERVE_CHAOS_SEED give another length and another run; an hour without faults
(PDSERVE_CHAOS_SOAK) holds that nothing grows.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from tests.chaos.field import Field
from tests.chaos.judge import Row
from tests.chaos.plan import KINDS, Kind, Plan, make_plan
from tests.chaos.run import run, run_quietly

SEED = int(os.environ.get("PDSERVE_CHAOS_SEED", "1"))
MINUTES = float(os.environ.get("PDSERVE_CHAOS_MINUTES", "0"))
SOAK_MINUTES = float(os.environ.get("PDSERVE_CHAOS_SOAK", "0"))
GROWTH = 0.01
"""Of private memory and descriptors, from the second quarter of a soak to the last (R16)."""
SHORT: tuple[Kind, ...] = ("kill", "visit", "hang_up", "flip", "kill_client")


def check(rows: list[Row], directory: Path) -> None:
    text = "\n".join(
        f"{row.verdict:14} {row.number:4} {row.what}: {row.figure} (goal {row.goal})" for row in rows
    )
    print(text)
    missed = [row for row in rows if row.verdict == "MISS"]
    assert not missed, f"{text}\nplan, logs and records: {directory}"
    wrong_bytes = rows[0]
    assert wrong_bytes.verdict == "pass", "nothing was read under faults"


@pytest.mark.long
def test_a_short_run_of_faults_delivers_no_wrong_byte_and_loses_no_page(tmp_path: Path) -> None:
    check(run(make_plan(SEED, 0.37, kinds=SHORT), tmp_path), tmp_path)


@pytest.mark.extended
@pytest.mark.timeout(max(600, 60 * MINUTES + 300))
def test_all_kinds_of_faults_deliver_no_wrong_byte_and_lose_no_page(tmp_path: Path) -> None:
    check(run(make_plan(SEED, MINUTES or 2.0, kinds=KINDS), tmp_path), tmp_path)


@pytest.mark.skipif(not SOAK_MINUTES, reason="PDSERVE_CHAOS_SOAK: minutes of load without faults")
@pytest.mark.timeout(60 * SOAK_MINUTES + 300)
def test_memory_and_descriptors_of_nodes_do_not_grow_under_steady_load(tmp_path: Path) -> None:
    samples: list[dict[str, tuple[float, float]]] = []

    def sample(field: Field) -> None:
        processes = {node.name: psutil.Process(node.pid) for node in field.nodes}
        samples.append({name: (one.memory_full_info().uss, one.num_fds()) for name, one in processes.items()})

    run_quietly(Plan(SEED, SOAK_MINUTES, 3, []), tmp_path, sample)
    quarter = len(samples) // 4
    for name in samples[0]:
        for place, what in enumerate(("private memory", "descriptors")):
            before, after = (
                sum(one[name][place] for one in part) / len(part)
                for part in (samples[quarter : 2 * quarter], samples[-quarter:])
            )
            assert after <= before * (1 + GROWTH), f"{name}: {what} grew from {before:,.0f} to {after:,.0f}"
