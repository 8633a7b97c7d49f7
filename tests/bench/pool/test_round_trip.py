"""`python -m benchmarks pool --control`, short."""

from __future__ import annotations

from tests.support.bench.commands import bench, results


def test_each_way_to_a_node_is_measured() -> None:
    rows = results(bench("pool", "--json", "--control", "--seconds", "0.2"))
    assert [row["path"] for row in rows] == ["unix", "tcp", "tcp-tls"]
    assert rows[1]["over_tcp"] == 1.0
    for row in rows:
        assert row["messages"] > 0
        assert 0 < row["p50_us"] <= row["p99_us"]
        assert row["connect_p50_us"] > row["p50_us"]
