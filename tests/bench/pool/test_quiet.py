"""`pdserve bench quiet` and `pdserve bench hot`: short runs; a busy machine's figures are not judged."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.long


def bench(*arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "pdserve", "bench", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_quiet_namespace_is_measured_alone_and_beside_a_loud_one() -> None:
    (outcome,) = bench("quiet", "--phases", "1", "--seconds", "1", "--limit", "20MB")
    alone, elsewhere, beside = outcome["phases"]
    assert [phase["neighbour"] for phase in outcome["phases"]] == ["none", "elsewhere", "here"]
    assert alone["loud_bytes_s"] == 0
    assert alone["asked_bytes_s"] == 0
    assert alone["missed"] == 0
    for loud, ratio in ((elsewhere, "control"), (beside, "ratio")):
        assert loud["asked_bytes_s"] > 0
        assert loud["missed"] == 0
        assert outcome[ratio] == pytest.approx(loud["p99_us"] / alone["p99_us"], rel=0.01)
    assert beside["loud_bytes_s"] > 0
    assert beside["asked_bytes_s"] > 5 * beside["loud_bytes_s"]


def test_without_replicas_one_node_serves_a_hot_prefix_and_with_them_others_do_too() -> None:
    alone, copied = bench("hot", "--readers", "2", "--seconds", "2", "--warm-up", "4", "--path", "shm")
    assert (alone["replicas"], copied["replicas"]) == (0, 2)
    assert alone["busiest_share"] == 1.0
    assert copied["busiest_share"] < 0.7
    assert alone["missed"] == copied["missed"] == 0
