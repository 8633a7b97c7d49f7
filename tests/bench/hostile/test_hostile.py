"""`python -m benchmarks hostile`, short."""

from __future__ import annotations

import pytest

from benchmarks.hostile.attacks import ATTACKS
from benchmarks.hostile.run import NOBODY
from tests.support.bench.commands import bench, results

pytestmark = pytest.mark.long


def test_each_attack_is_measured_beside_nobody_at_each_port() -> None:
    rows = results(bench("hostile", "--json", "--connections", "20", "--phases", "1", "--seconds", "0.2"))
    attacks = {(row["who"], row["port"]) for row in rows if row["who"] != NOBODY}
    assert attacks == {(attack.who, attack.port) for attack in ATTACKS}
    kinds = {(row["port"].partition(":")[0], row["honest"]) for row in rows}
    assert kinds == {("pool", "get"), ("pool", "put"), ("router", "chat")}
    for row in rows:
        assert row["requests"] > 0
        assert (row["missed"], row["crashes"]) == (0, 0), row
        assert row["p99_us"] >= row["p50_us"] > 0
        assert row["memory_mb"] > 1
    alone = [row for row in rows if row["who"] == NOBODY]
    assert {(row["p99_over_alone"], row["memory_over_alone"]) for row in alone} == {(1.0, 1.0)}
