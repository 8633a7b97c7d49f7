from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.config.placement import PlacementSettings
from pdserve.router.fleet.worker import Worker
from pdserve.router.placement.policies import cost_ms, cost_words
from pdserve.router.placement.prefix_index import Cached

WEIGHTS = PlacementSettings(
    prefill_ms_per_token=1.0,
    pool_ms_per_token=0.5,
    host_ms_per_token=0.25,
    running_ms_per_request=10.0,
    missing_kv_ms_per_token=2.0,
)


def worker(queued: int = 0, requests: int = 0, elsewhere: int = 0, free: int | None = None) -> Worker:
    made = Worker("decode", "http://a:1")
    made.queued_here, made.in_flight, made.elsewhere, made.free_kv_tokens = (
        queued,
        requests,
        elsewhere,
        free,
    )
    return made


def test_the_cost_is_the_sum_of_its_parts() -> None:
    cached = Cached(device=100, host=40, pool=20)
    at = worker(queued=5, requests=1, elsewhere=2, free=50)
    cost = cost_ms(WEIGHTS, at, 300, cached)
    assert cost == 1.0 * (5 + 140) + 0.25 * 40 + 0.5 * 20 + 10.0 * 3 + 2.0 * (200 - 50)
    assert cost_words(cost, at, 300, cached) == f"{cost:.1f}ms uncached=140 queued=5 requests=3"


def test_device_memory_costs_nothing_and_more_cached_than_asked_is_no_gain() -> None:
    assert cost_ms(WEIGHTS, worker(), 100, Cached(device=500)) == 0


TOKENS, COUNT = st.floats(0, 1e5), st.integers(0, 10_000)


@given(COUNT, COUNT, COUNT, st.none() | COUNT, TOKENS, TOKENS, TOKENS)
def test_more_load_is_never_cheaper_and_more_cached_never_dearer(
    prompt: int, queued: int, requests: int, free: int | None, device: float, host: float, pool: float
) -> None:
    cached = Cached(device, host, pool)
    cost = cost_ms(WEIGHTS, worker(queued, requests, free=free), prompt, cached)
    assert cost >= 0
    assert cost_ms(WEIGHTS, worker(queued + 1, requests, free=free), prompt, cached) >= cost
    assert cost_ms(WEIGHTS, worker(queued, requests + 1, free=free), prompt, cached) >= cost
    assert cost_ms(WEIGHTS, worker(queued, requests, free=0), prompt, cached) >= cost
    if device + host + pool + 1 <= prompt:
        more = Cached(device + 1, host, pool)
        assert cost_ms(WEIGHTS, worker(queued, requests, free=free), prompt, more) <= cost
