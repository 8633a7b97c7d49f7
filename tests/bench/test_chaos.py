"""`pdserve bench chaos`, end to end: real nodes, real clients, real faults."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(360)]


def chaos(*arguments: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "pdserve", "bench", "chaos", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout, done.stderr
    outcome = json.loads(done.stdout)
    assert isinstance(outcome, dict)
    return done.returncode, outcome


def verdicts(outcome: dict[str, Any]) -> dict[str, str]:
    return {row["number"]: row["verdict"] for row in outcome["rows"]}


def test_half_a_minute_of_faults_costs_misses_and_nothing_else(tmp_path: Path) -> None:
    kinds = ("--kinds", "kill,silence,flip,abandon")
    returncode, outcome = chaos("--seed", "10", "--minutes", "0.5", *kinds, "--out", str(tmp_path))
    rows = "\n".join(f"{row['number']} {row['figure']} {row['verdict']}" for row in outcome["rows"])
    assert returncode == 0, rows
    found = verdicts(outcome)
    assert all(found[number] == "pass" for number in ("R1", "R2", "R3", "R4", "R12", "R14", "")), rows
    flips = [line for line in (tmp_path / "faults.jsonl").read_text().splitlines() if '"flipped"' in line]
    assert flips


def test_without_checksums_a_flipped_bit_is_reported_and_the_run_fails_again_from_its_file(
    tmp_path: Path,
) -> None:
    short = ("--minutes", "0.1", "--seed", "5", "--kinds", "flip", "--no-checksum")
    returncode, outcome = chaos(*short, "--out", str(tmp_path))
    assert (returncode, verdicts(outcome)["R1"]) == (1, "MISS")
    again, replayed = chaos("--replay", str(tmp_path / "plan.json"))
    assert (again, verdicts(replayed)["R1"]) == (1, "MISS")
    assert replayed["replay"] == outcome["replay"]
