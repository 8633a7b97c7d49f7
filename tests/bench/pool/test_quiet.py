"""`python -m benchmarks quiet`: short runs; a busy machine's figures are not judged."""

from __future__ import annotations

import pytest

from tests.support.bench.commands import bench_here, results

pytestmark = pytest.mark.long


def test_a_quiet_namespace_is_measured_alone_and_beside_a_loud_one() -> None:
    words = ("--phases", "1", "--seconds", "1", "--limit", "5MB")
    (outcome,) = results(bench_here("quiet", "--json", *words))
    alone, elsewhere, beside = outcome["phases"]
    assert [phase["neighbour"] for phase in outcome["phases"]] == ["none", "elsewhere", "here"]
    assert alone["loud_bytes_s"] == 0
    assert alone["asked_bytes_s"] == 0
    assert alone["missed"] == 0
    for loud, ratio in ((elsewhere, "control"), (beside, "ratio")):
        assert loud["asked_bytes_s"] > 0
        assert loud["missed"] == 0
        # both percentiles are rounded to 0.1 µs, their ratio to 3 places
        bound = 0.0005 + 0.05 * (1 + outcome[ratio]) / (alone["p99_us"] - 0.05)
        assert abs(outcome[ratio] - loud["p99_us"] / alone["p99_us"]) <= bound
    assert beside["loud_bytes_s"] > 100_000, "a page is 256 KiB, and the phase a second"
    assert beside["asked_bytes_s"] > 5 * beside["loud_bytes_s"]


def test_a_model_load_is_a_loud_neighbour_too() -> None:
    words = ("--phases", "1", "--seconds", "1", "--loud", "weights")
    (outcome,) = results(bench_here("quiet", "--json", *words))
    alone, elsewhere, beside = outcome["phases"]
    assert (outcome["loud"], outcome["limit_bytes_s"]) == ("weights", 0.0)
    assert (alone["loud_bytes_s"], alone["missed"], beside["missed"]) == (0, 0, 0)
    assert min(elsewhere["loud_bytes_s"], beside["loud_bytes_s"]) > 4 << 20
