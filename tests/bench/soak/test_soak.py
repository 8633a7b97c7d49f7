"""`python -m benchmarks soak`: what counts as growth, and a short run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak import drift as drift_module
from benchmarks.soak.drift import Drift, drift
from benchmarks.soak.run import Sample, Soaked, watched
from benchmarks.stores import BenchError
from tests.support.bench.commands import bench_here, results

TIMES_S = [float(second) for second in range(100)]


def test_what_stays_has_not_grown() -> None:
    assert drift(TIMES_S, [5.0] * 100) == Drift(5.0, 5.0, 0.0)
    assert drift(TIMES_S, [0.0] * 100) == Drift(0.0, 0.0, 0.0)


def test_the_warm_up_does_not_count() -> None:
    assert drift(TIMES_S, [float(min(second, 20)) for second in range(100)]).share == 0.0


@pytest.mark.parametrize(
    ("values", "share"),
    [
        ([1000 + second for second in TIMES_S], 79 / 1029.5),  # a slope: 20 to 99, over the first quarter
        (
            [1000.0] * 80 + [1100.0] * 20,
            0.111,
        ),  # a step: the line is steeper than that
        ([1000.0 - second for second in TIMES_S], -0.0602),  # shrinking
        ([0.0] * 99 + [1.0], float("inf")),  # one pin where there was none
    ],
)
def test_growth_is_over_what_it_was_at_first(values: list[float], share: float) -> None:
    assert drift(TIMES_S, values).share == pytest.approx(share, rel=0.05)


def test_noise_around_a_level_passes_and_one_percent_an_hour_does_not() -> None:
    noise = [1000.0 + 40 * (second % 2) for second in range(100)]
    assert drift(TIMES_S, noise).passed
    assert not drift(TIMES_S, [value * (1 + second * 2e-4) for second, value in enumerate(noise)]).passed


def test_too_few_samples_are_no_result() -> None:
    with pytest.raises(BenchError, match="run longer"):
        watched([Sample(0.0, "node0", 1, 1, 1)] * 5)


def test_every_value_of_every_process_is_watched() -> None:
    leak = [Sample(second, "node0", 2**20, 10 + int(second), 3, connections=4) for second in TIMES_S]
    fine = [Sample(second, "client", 2**20, 10, 3) for second in TIMES_S]
    found = {(one.process, one.what): one.passed for one in watched([*leak, *fine])}
    assert found.pop(("node0", "descriptors")) is False
    assert all(found.values())
    assert {what for _, what in found} == {
        "anonymous_bytes",
        "descriptors",
        "threads",
        "pins",
        "reserved_bytes",
        "connections",
    }


READ = {"client-shm": 500, "client-ucx": 400}


@pytest.mark.parametrize(
    ("read", "failed", "wrong", "complaints"),
    [
        (READ, 384, 0, []),
        (READ, 385, 0, ["385 of 384,065 operations failed"]),
        (READ, 0, 1, ["1 pages were wrong"]),
        ({**READ, "client-ucx": 0}, 0, 0, ["client-ucx read no page"]),
        ({}, 0, 0, ["no client read a page"]),
    ],
)
def test_a_soak_passes_only_if_every_client_reads_and_hardly_an_operation_fails(
    read: dict[str, int], failed: int, wrong: int, complaints: list[str]
) -> None:
    outcome = Soaked(60.0, 2, 384_065, read, wrong, failed, [])
    assert outcome.complaints == complaints
    assert outcome.passed is (not complaints)


@pytest.mark.long
def test_a_short_run_reads_right_bytes_and_holds_nothing_at_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its growth is not judged: such a run is all warm-up, and a busy machine takes few samples."""
    monkeypatch.setattr(drift_module, "MIN_SAMPLES", 2)
    picture = tmp_path / "soak.png"
    arguments = ("--minutes", "0.1", "--every", "0.2", "--nodes", "1", "--plot", str(picture), "--json")
    (outcome,) = results(bench_here("soak", *arguments))
    assert outcome["wrong"] == 0
    assert sum(outcome["pages_read"].values()) > 0
    clients = {f"client-{path}{kind}" for path in ("shm", "ucx", "tcp") for kind in ("", "-renewed")}
    assert set(outcome["pages_read"]) == clients
    at_rest = [one for one in outcome["watched"] if one["what"] in ("pins", "reserved_bytes")]
    assert {one["process"] for one in at_rest} == {"node0", *clients}
    assert all(one["drift"]["last"] == 0 for one in at_rest)
    assert picture.read_bytes().startswith(b"\x89PNG")
