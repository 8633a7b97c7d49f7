"""Elastic workers: how many workers a load needs, which of them prefill, and which stay as they are."""

from __future__ import annotations

import math
import random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.config.limits import ServiceLevel
from pdserve.router.config.placement import PlacementSettings
from pdserve.router.fleet.eligible import Eligible, LoadLog
from pdserve.router.fleet.registry import Snapshot
from pdserve.router.fleet.worker import Role, Worker
from pdserve.router.placement.elastic import (
    BAND,
    LEAST_WEIGHT,
    Demand,
    Duties,
    ElasticRoles,
    Load,
    wanted,
)

LEVEL = ServiceLevel(ttft_ms=1000.0, itl_ms=30.0)
COUNTS = st.integers(1, 12)


def elastic(count: int) -> list[Worker]:
    return [Worker("elastic", f"http://e{i:02}:1") for i in range(count)]


def ids(*workers: Worker) -> set[str]:
    return {worker.id for worker in workers}


@given(
    count=COUNTS,
    middle=st.floats(0, 1),
    noise=st.lists(st.floats(-0.95, 0.95), max_size=60),
    has_decode=st.booleans(),
)
def test_the_number_comes_as_near_to_its_target_as_the_margin_allows_and_noise_within_changes_nothing(
    count: int, middle: float, noise: list[float], has_decode: bool
) -> None:
    duties, workers = Duties(0.0), elastic(count)
    for step in range(2 * count):
        duties.update(workers, middle, has_decode=has_decode, now_s=float(step))
    settled, changes = duties.prefilling, duties.changes
    most = count if has_decode else count - 1
    assert abs(len(settled) - min(count * middle, most)) <= BAND + 1e-9
    for step, part in enumerate(noise):
        share = min(1.0, max(0.0, middle + part * (BAND - 0.5) / count))
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


@given(
    count=COUNTS,
    shares=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=30),
    common=st.floats(0, 1),
    leaving=st.sets(st.integers(0, 11)),
)
def test_processes_that_see_one_load_come_to_the_same_duties_but_for_one_worker(
    count: int, shares: list[tuple[float, float]], common: float, leaving: set[int]
) -> None:
    """Whatever each of them saw before."""
    here, there, workers = Duties(0.0), Duties(0.0), elastic(count)
    for step, (one, other) in enumerate(shares):
        here.update(workers, one, has_decode=True, now_s=float(step))
        there.update(workers[::-1], other, has_decode=True, now_s=float(step))
    workers = [worker for number, worker in enumerate(workers) if number not in leaving]
    for step in range(100, 120):
        found = [
            duties.update(listed, common, has_decode=True, now_s=float(step))
            for duties, listed in ((here, workers), (there, workers[::-1]))
        ]
    assert len(found[0] ^ found[1]) <= 1


def test_without_load_half_of_the_workers_prefill_and_none_changes() -> None:
    duties, workers = Duties(0.0), elastic(4)
    before = duties.update(workers, None, has_decode=False, now_s=0.0)
    assert len(before) == 2
    assert duties.update(workers, None, has_decode=False, now_s=math.inf) == before
    assert duties.changes == 0


# --- how many workers a load needs


def load(prompts_s: float, prompt_ms: float, answering: float = 0.0) -> Load:
    """Prompts that all take equally long."""
    return Load(prompts_s * prompt_ms, prompts_s * prompt_ms**2, prompts_s, answering)


def test_without_a_level_workers_are_as_many_as_they_are_busy() -> None:
    found = wanted(load(10, 250, answering=32), ServiceLevel(), 16)
    assert found.prefill == pytest.approx(2.5)
    assert found.decode == pytest.approx(2.0)


@given(
    prompts_s=st.floats(0, 100),
    prompt_ms=st.floats(0, 20_000),
    answering=st.floats(0, 5_000),
    more=st.floats(1, 10),
    ttft_ms=st.floats(1, 100_000),
)
def test_more_load_or_a_tighter_level_never_needs_fewer_workers(
    prompts_s: float, prompt_ms: float, answering: float, more: float, ttft_ms: float
) -> None:
    level = ServiceLevel(ttft_ms=ttft_ms, itl_ms=30.0)
    little = wanted(load(prompts_s, prompt_ms, answering), level, 64)
    much = wanted(load(prompts_s * more, prompt_ms, answering * more), level, 64)
    tight = wanted(
        load(prompts_s, prompt_ms, answering), ServiceLevel(ttft_ms=ttft_ms / more, itl_ms=30.0), 64
    )
    assert much.prefill >= little.prefill * (1 - 1e-9)
    assert much.decode >= little.decode * (1 - 1e-9)
    assert tight.prefill >= little.prefill * (1 - 1e-9)


def test_a_queue_with_the_wanted_workers_keeps_the_level() -> None:
    """Prompts of two sizes at random workers: nine of ten are in time. With two thirds they are not."""
    dice = random.Random(7)
    sizes_ms = [100.0 if dice.random() < 0.8 else 500.0 for _ in range(20_000)]
    rate_s = 20.0
    asked = Load(rate_s * mean(sizes_ms), rate_s * mean(s * s for s in sizes_ms), rate_s)
    count = round(wanted(asked, LEVEL, 0).prefill + 0.5)

    def share_in_time(workers: int) -> float:
        free_at, now_ms, good = [0.0] * workers, 0.0, 0
        for size_ms in sizes_ms:
            now_ms += dice.expovariate(rate_s / 1e3)
            one = dice.randrange(workers)
            free_at[one] = max(now_ms, free_at[one]) + size_ms
            good += free_at[one] - now_ms <= LEVEL.ttft_ms
        return good / len(sizes_ms)

    assert share_in_time(count) >= 0.9
    assert share_in_time(count * 2 // 3) < 0.9


def test_demand_comes_to_the_rate_of_requests_at_once_stays_there_and_fades_without_them() -> None:
    demand = Demand(10.0)
    for number in range(1000):
        now_s = number / 10
        demand.on_answering(7, now_s)
        demand.on_prompt(200.0, now_s)
        if number >= 19:
            assert demand.load(now_s).prompts_s == pytest.approx(10, rel=0.1)
    found = demand.load(now_s)
    assert found.prompts_s == pytest.approx(10, rel=0.02)
    assert found.prefill_ms_s == pytest.approx(2000, rel=0.02)
    assert found.prefill_ms2_s == pytest.approx(400_000, rel=0.02)
    assert found.prompt_ms == pytest.approx(200)
    assert found.answering == pytest.approx(7, rel=0.02)
    demand.on_answering(30, now_s)  # more of them count at once, fewer not
    assert demand.load(now_s).answering == 30
    demand.on_answering(0, now_s + 1)
    assert 0 < demand.load(now_s + 1).answering < 30
    assert demand.load(now_s + 100).prefill_ms_s < 1


@given(times=st.lists(st.floats(-1e6, 1e6), max_size=30))
def test_a_clock_that_goes_back_makes_no_negative_or_growing_mean(times: list[float]) -> None:
    demand = Demand(1.0)
    for now_s in times:
        demand.on_answering(3, now_s)
        demand.on_prompt(10.0, now_s)
        found = demand.load(now_s)
        assert 0 <= found.answering <= 3 * (1 + 1e-9)
        assert 0 <= found.prompts_s <= len(times) / LEAST_WEIGHT


# --- roles


def workers(role: Role, count: int) -> tuple[Worker, ...]:
    made = tuple(Worker(role, f"http://{role}{number}:1") for number in range(count))
    for worker in made:
        worker.max_running = 10
    return made


def fleet(prefill: int = 0, decode: int = 0, elastic: int = 0, agg: int = 0) -> Snapshot:
    both = workers("elastic", elastic)
    return Snapshot(
        models=("m",),
        model="m",
        prefill=Eligible((*workers("prefill", prefill), *both), LoadLog()),
        decode=Eligible((*workers("decode", decode), *both) or workers("agg", agg), LoadLog()),
        elastic=both,
    )


def loaded(snapshot: Snapshot, processes: int = 1) -> ElasticRoles:
    """4 prompts a second of 500 ms each: 2 workers prefill. 20 answers of 10 at a time, and their root."""
    roles = ElasticRoles(PlacementSettings(), ServiceLevel(itl_ms=20.0), processes)
    snapshot.decode[0].in_flight = 20
    for number in range(1000):
        roles.narrow(snapshot, number / 4)
        roles.on_planned(snapshot, 5000, number / 4)
    return roles


@pytest.mark.parametrize(
    ("snapshot", "processes", "wanted"),
    [
        (fleet(prefill=1, decode=1), 1, {"prefill": 2.0, "decode": 2.45}),
        (fleet(elastic=2), 1, {"elastic": 4.45}),
        (fleet(agg=2), 1, {"agg": 4.45}),
        (fleet(prefill=1, decode=1, elastic=1), 1, {"prefill": 2.0, "decode": 2.45, "elastic": 2.45}),
        (fleet(prefill=1, decode=1, elastic=1), 2, {"prefill": 2.0, "decode": 2.45, "elastic": 3.45}),
        (fleet(prefill=9, decode=9, elastic=1), 1, {"prefill": 2.0, "decode": 2.45, "elastic": 0.0}),
    ],
)
def test_elastic_and_aggregated_workers_do_what_fixed_ones_leave(
    snapshot: Snapshot, processes: int, wanted: dict[str, float]
) -> None:
    found = loaded(snapshot, processes).wanted_of_role(snapshot, wanted, 250.0)
    assert found == pytest.approx(wanted, rel=0.05, abs=0.01)


def test_requests_whose_prompts_are_still_computed_need_no_answering_worker() -> None:
    snapshot = fleet(elastic=2)
    roles = ElasticRoles(PlacementSettings(), ServiceLevel(itl_ms=20.0))
    prefill, decode = snapshot.decode
    prefill.in_flight, prefill.prefilling, decode.in_flight = 30, 30, 30
    for number in range(100):
        assert roles.wanted(snapshot, float(number)).decode == 0
    prefill.in_flight, prefill.prefilling = 0, 0
    assert roles.wanted(snapshot, 200.0).decode > 3


def test_without_elastic_workers_and_level_nothing_is_measured() -> None:
    roles, snapshot = ElasticRoles(PlacementSettings(), ServiceLevel()), fleet(agg=1)
    roles.on_planned(snapshot, 5000, 0.0)
    assert not roles.counts(snapshot)
    assert roles.narrow(snapshot, 1.0) is snapshot
    assert roles.changes() == {}
