"""`pdserve bench hostile`, short."""

from __future__ import annotations

from pdserve.bench.pool.hostile_process import KINDS
from tests.support.bench.commands import bench, results


def test_each_kind_of_connections_is_measured_beside_none() -> None:
    rows = results(bench("hostile", "--json", "--connections", "20", "--phases", "1", "--seconds", "0.2"))
    assert [row["kind"] for row in rows] == ["none", *KINDS]
    for row in rows:
        assert row["gets"] > 0
        assert row["missed"] == 0
        assert row["p99_us"] >= row["p50_us"] > 0
    assert (rows[0]["p99_over_alone"], rows[0]["memory_over_alone"]) == (1.0, 1.0)
