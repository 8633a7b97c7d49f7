from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.dispatch.job import KEPT_REQUESTS, KEPT_S, RetryBudget


@given(st.floats(0, 1), st.floats(0, 20), st.lists(st.tuples(st.floats(0, 2), st.booleans()), max_size=300))
def test_retries_never_exceed_what_was_paid_in(
    ratio: float, min_per_s: float, steps: list[tuple[float, bool]]
) -> None:
    budget, now_s, requests, retries = RetryBudget(0.0, ratio, min_per_s), 0.0, 0, 0
    for passed_s, is_retry in steps:
        now_s += passed_s
        if is_retry:
            retries += budget.take(now_s)
        else:
            budget.on_request()
            requests += 1
        assert budget.balance >= 0
        assert retries <= requests * ratio + (now_s + KEPT_S) * min_per_s + 1e-6
        assert budget.balance <= KEPT_S * min_per_s + KEPT_REQUESTS * ratio + 1e-6


def test_a_spent_budget_comes_back_with_time_and_requests() -> None:
    budget = RetryBudget(0.0, 0.5, 0.1)
    assert budget.take(0.0)
    assert not budget.take(1.0)
    assert budget.take(10.0)
    assert not budget.take(10.0)
    budget.on_request()
    budget.on_request()
    assert budget.take(10.0)
