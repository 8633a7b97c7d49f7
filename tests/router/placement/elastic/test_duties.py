"""The hysteresis of duties: no flapping under noise, a bounded rate of changes, somebody always answers."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.fleet.worker import Worker
from pdserve.router.placement.elastic.duties import MARGIN, Duties, wanted_step

COUNTS = st.integers(1, 12)


def elastic(count: int) -> list[Worker]:
    return [Worker("elastic", f"http://e{i:02}:1") for i in range(count)]


def ids(*workers: Worker) -> set[str]:
    return {worker.id for worker in workers}


@given(
    count=COUNTS,
    middle=st.floats(0, 1),
    noise=st.lists(st.floats(-0.95, 0.95), min_size=1, max_size=60),
    has_decode=st.booleans(),
)
def test_noise_within_the_margin_changes_nothing_once_the_number_has_settled(
    count: int, middle: float, noise: list[float], has_decode: bool
) -> None:
    duties, workers = Duties(0.0), elastic(count)
    for step in range(2 * count):
        duties.update(workers, middle, has_decode=has_decode, now_s=float(step))
    settled, changes = duties.prefilling, duties.changes
    for step, part in enumerate(noise):
        share = min(1.0, max(0.0, middle + part * MARGIN / count))
        duties.update(workers, share, has_decode=has_decode, now_s=100.0 + step)
    # the target may lie just inside the band's edge: then noise moves the number once, and never back
    assert duties.changes - changes <= 1
    assert len(settled ^ duties.prefilling) <= 1


@given(
    count=COUNTS,
    dwell_s=st.floats(0.1, 20),
    asked=st.lists(st.tuples(st.floats(0, 5), st.floats(0, 1)), max_size=120),
)
def test_the_rate_of_changes_is_bounded_whatever_the_load_does(
    count: int, dwell_s: float, asked: list[tuple[float, float]]
) -> None:
    duties, workers, now_s = Duties(dwell_s), elastic(count), 0.0
    for wait_s, share in asked:
        now_s += wait_s
        before = duties.prefilling
        after = duties.update(workers, share, has_decode=True, now_s=now_s)
        assert not before or len(before ^ after) <= 1
    assert duties.changes <= 1 + now_s / dwell_s + 1e-6


@given(
    steps=st.lists(
        st.tuples(st.sets(st.integers(0, 6)), st.none() | st.floats(0, 1), st.booleans()), max_size=60
    )
)
def test_someone_always_answers_whoever_comes_and_goes(
    steps: list[tuple[set[int], float | None, bool]],
) -> None:
    duties, all_ = Duties(1.0), elastic(7)
    for step, (there, share, has_decode) in enumerate(steps):
        workers = [all_[i] for i in sorted(there)]
        prefilling = duties.update(workers, share, has_decode=has_decode, now_s=float(step))
        assert prefilling <= ids(*workers)
        if workers and not has_decode:
            assert len(prefilling) < len(workers)


@given(count=COUNTS, share=st.floats(0, 1))
def test_the_number_comes_as_near_to_its_target_as_the_margin_allows(count: int, share: float) -> None:
    duties, workers = Duties(0.0), elastic(count)
    for step in range(2 * count):
        duties.update(workers, share, has_decode=True, now_s=float(step))
    assert abs(len(duties.prefilling) - count * share) <= 0.5 + MARGIN + 1e-9


def test_the_least_busy_worker_changes() -> None:
    busy, idle = elastic(2)
    busy.in_flight = 5
    duties = Duties(0.0)
    duties.update([busy, idle], 0.0, has_decode=False, now_s=0.0)
    assert duties.update([busy, idle], 0.9, has_decode=False, now_s=1.0) == ids(idle)
    queued, free = elastic(2)
    queued.queued_here = 9_000
    duties = Duties(0.0)
    duties.update([queued, free], 1.0, has_decode=True, now_s=0.0)
    assert duties.update([queued, free], 0.0, has_decode=True, now_s=1.0) == ids(queued)


def test_without_load_nothing_changes() -> None:
    duties, workers = Duties(0.0), elastic(4)
    before = duties.update(workers, None, has_decode=False, now_s=0.0)
    assert len(before) == 2
    assert duties.update(workers, None, has_decode=False, now_s=math.inf) == before


def test_a_step_needs_more_than_half_a_worker_and_the_margin() -> None:
    assert wanted_step(1.75, 1, 4) == 0
    assert wanted_step(1.76, 1, 4) == 1
    assert wanted_step(0.25, 1, 4) == 0
    assert wanted_step(0.24, 1, 4) == -1
    assert wanted_step(4.0, 1, 1) == 0
