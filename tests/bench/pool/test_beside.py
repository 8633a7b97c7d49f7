"""`python -m benchmarks pool --beside`: both ways, alone and beside a busy thread."""

from __future__ import annotations

from tests.support.bench.commands import bench, results

SHORT = ("--seconds", "0.1", "--batch", "4", "--capacity", "64MiB", "--rounds", "1", "--pages", "256KiB")


def test_each_way_is_measured_alone_and_beside_each_kind_of_steps() -> None:
    asked = ("--path", "shm", "--checksum", "on", "--beside", "python,torch")
    rows = results(bench("pool", "--json", *SHORT, *asked))
    assert [(row["beside"], row["way"]) for row in rows] == [
        (kind, way) for kind in ("none", "python", "torch") for way in ("in process", "mover")
    ]
    for row in rows:
        assert row["get_gbps"] > 0
        assert row["put_gbps"] > 0
        if row["beside"] == "none":
            assert (row["get_over_alone"], row["put_over_alone"]) == (1.0, 1.0)
        else:
            assert row["step_ms"] > 0
            assert row["get_step_mean"] > 0
            assert row["put_step_p99"] > 0
