"""How many workers a load needs: the formulas, against their limits and a simulated queue."""

from __future__ import annotations

import math
import random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.config.slo import ServiceLevel
from pdserve.router.placement.elastic.demand import LEAST_WEIGHT, Demand, Load
from pdserve.router.placement.elastic.wanted import WAITS, batch_size, mixed_itl_ms, wanted

LEVEL = ServiceLevel(ttft_ms=1000.0, itl_ms=30.0, step_ms=10.0, step_ms_per_request=0.5)


def load(prompts_s: float, prompt_ms: float, answering: float = 0.0) -> Load:
    """Prompts that all take equally long."""
    return Load(prompts_s * prompt_ms, prompts_s * prompt_ms**2, prompts_s, answering)


def test_without_a_level_workers_are_as_many_as_they_are_busy() -> None:
    found = wanted(load(10, 250, answering=32), ServiceLevel(), 16)
    assert found.prefill == pytest.approx(2.5)
    assert found.decode == pytest.approx(2.0)


def test_a_short_time_to_the_first_token_needs_more_workers_than_their_work() -> None:
    assert wanted(load(10, 250), LEVEL, 0).prefill == pytest.approx(
        2.5 + 10 * 250**2 / (2 * 750 / WAITS) / 1e3
    )


def test_the_time_between_tokens_bounds_the_requests_of_a_worker() -> None:
    assert batch_size(LEVEL, 0) == 40
    assert batch_size(LEVEL, 16) == 16
    assert batch_size(ServiceLevel(itl_ms=5.0, step_ms=10.0), 16) == 1
    assert wanted(load(0, 0, answering=100), LEVEL, 0).decode == pytest.approx((100 + 10) / 40)


def test_prompts_beside_answers_make_tokens_late_by_the_time_that_they_take() -> None:
    assert mixed_itl_ms(load(0, 0, answering=20), LEVEL, 2) == pytest.approx(15)
    half_busy = load(4, 250, answering=20)
    assert mixed_itl_ms(half_busy, LEVEL, 2) == pytest.approx(15 + WAITS * 15)
    assert mixed_itl_ms(half_busy, LEVEL, 1) == math.inf


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


def test_demand_comes_to_the_rate_of_steady_requests_and_fades_without_them() -> None:
    demand, now_s = Demand(10.0), 0.0
    for number in range(1000):
        now_s = number / 10
        demand.on_answering(7, now_s)
        demand.on_prompt(200.0, now_s)
    found = demand.load(now_s)
    assert found.prompts_s == pytest.approx(10, rel=0.02)
    assert found.prefill_ms_s == pytest.approx(2000, rel=0.02)
    assert found.prefill_ms2_s == pytest.approx(400_000, rel=0.02)
    assert found.prompt_ms == pytest.approx(200)
    assert found.answering == pytest.approx(7, rel=0.02)
    later = demand.load(now_s + 100)
    assert later.prefill_ms_s < 1


def test_the_first_requests_count_at_once_and_so_do_answers_that_grow() -> None:
    demand = Demand(10.0)
    for number in range(20):
        demand.on_answering(0, number / 10)
        demand.on_prompt(200.0, number / 10)
    assert demand.load(1.9).prompts_s == pytest.approx(10, rel=0.1)
    demand.on_answering(30, 2.0)
    assert demand.load(2.0).answering == 30
    demand.on_answering(0, 3.0)
    assert 0 < demand.load(3.0).answering < 30


@given(times=st.lists(st.floats(-1e6, 1e6), max_size=30))
def test_a_clock_that_goes_back_makes_no_negative_or_growing_mean(times: list[float]) -> None:
    demand = Demand(1.0)
    for now_s in times:
        demand.on_answering(3, now_s)
        demand.on_prompt(10.0, now_s)
        found = demand.load(now_s)
        assert 0 <= found.answering <= 3 * (1 + 1e-9)
        assert 0 <= found.prompts_s <= len(times) / LEAST_WEIGHT
