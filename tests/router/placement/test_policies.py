"""Policies, and the cost of a worker."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import ConfigError
from pdserve.router.config.placement import PlacementSettings, Session
from pdserve.router.fleet.worker import Worker
from pdserve.router.placement.policies import (
    POLICY_NAMES,
    Affinity,
    Ask,
    Policy,
    PolicySettings,
    cost_ms,
    make_policy,
    rendezvous_order,
)
from pdserve.router.placement.prefix_index import Cached
from pdserve.settings import plugins

LOADS = st.lists(st.integers(0, 50), min_size=1, max_size=12)


def fleet(loads: list[int]) -> list[Worker]:
    workers = [Worker("decode", f"http://10.0.0.{i}:30000") for i in range(len(loads))]
    for worker, load in zip(workers, loads, strict=True):
        worker.in_flight = load
    return workers


def ask(session: str | None = None, last: str | None = None, **more: int) -> Ask:
    return Ask(session=session, last_id=last, **more)


def policy(name: str, **stickiness: object) -> Policy:
    return make_policy(name, PolicySettings(Session(**stickiness)))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", POLICY_NAMES)
@given(loads=LOADS, key=st.none() | st.text(), turn=st.integers(0, 10**9), last=st.integers(0, 20))
def test_every_policy_chooses_one_of_the_workers_and_says_why(
    name: str, loads: list[int], key: str | None, turn: int, last: int
) -> None:
    workers = fleet(loads)
    asked = ask(key, f"10.0.0.{last}:30000", turn=turn, draw=turn % 2**32)
    choice = policy(name).choose(asked, workers)
    assert choice.worker in workers
    assert choice.reason.replace("-", "").isalpha()
    assert str(choice).isascii()


@given(LOADS, st.integers(0, 1000))
def test_least_loaded_takes_the_least(loads: list[int], turn: int) -> None:
    assert policy("least_loaded").choose(ask(turn=turn), fleet(loads)).worker.in_flight == min(loads)


def test_round_robin_takes_each_in_turn() -> None:
    workers = fleet([9, 0, 0])
    chosen = [policy("round_robin").choose(ask(turn=i), workers).worker for i in range(4)]
    assert chosen == [*workers, workers[0]]


@given(st.text(), LOADS, st.randoms(use_true_random=False))
def test_rendezvous_does_not_depend_on_the_order_given(key: str, loads: list[int], random: object) -> None:
    workers = fleet(loads)
    shuffled = list(workers)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert rendezvous_order(key, workers) == rendezvous_order(key, shuffled)


def test_a_worker_that_leaves_moves_only_its_own_sessions() -> None:
    workers = fleet([0] * 5)
    keys = [f"session-{i}" for i in range(10_000)]
    before = {key: rendezvous_order(key, workers)[0] for key in keys}
    after = {key: rendezvous_order(key, workers[1:])[0] for key in keys}
    assert all(after[key] is before[key] for key in keys if before[key] is not workers[0])
    shares = [sum(1 for worker in before.values() if worker is w) / len(keys) for w in workers]
    assert all(0.17 < share < 0.23 for share in shares)


@given(LOADS, st.text(min_size=1))
def test_affinity_never_chooses_an_overloaded_worker(loads: list[int], key: str) -> None:
    made = policy("affinity", overload_factor=1.25, overload_min_requests=4)
    assert isinstance(made, Affinity)
    workers = fleet(loads)
    for last in (None, *(w.id for w in workers)):
        assert made.choose(ask(key, last), workers).worker.in_flight < made.load_limit(workers)


@given(LOADS, st.text(min_size=1))
def test_a_hard_session_stays_whatever_the_load(loads: list[int], key: str) -> None:
    made, workers = policy("affinity", mode="hard"), fleet(loads)
    best = rendezvous_order(key, workers)[0]
    best.in_flight = 1000
    assert made.choose(ask(key), workers).worker is best
    for worker in workers:
        assert made.choose(ask(key, worker.id), workers).worker is worker


def test_requests_without_a_session_go_where_their_own_policy_says() -> None:
    assert policy("affinity").choose(ask(), fleet([1, 0])).reason == "least-loaded"
    assert policy("affinity", without_key="round_robin").choose(ask(), fleet([1, 0])).reason == "round-robin"
    with pytest.raises(ConfigError, match="without_key"):
        policy("affinity", without_key="affinity")


@given(LOADS, st.integers(0, 2**32 - 1))
def test_power_of_two_never_takes_the_dearest_of_three_or_more(loads: list[int], draw: int) -> None:
    workers = fleet(loads)
    chosen = policy("power_of_two").choose(ask(draw=draw), workers).worker
    if len(set(loads)) == len(loads) > 1:
        assert chosen.in_flight < max(loads)


def test_unknown_policy_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'least_loaded'"):
        policy("least-loaded")


def test_a_policy_of_another_package_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("mine", "pdserve.router.placement.policies:RoundRobin", "pdserve.router.policies")
    broken = EntryPoint("broken", "pdserve.router.placement.policies:Nothing", "pdserve.router.policies")
    monkeypatch.setattr(plugins, "_found", lambda group, path: {"mine": point, "broken": broken})
    assert policy("mine").choose(ask(), fleet([0])).reason == "round-robin"
    with pytest.raises(ConfigError, match="cannot be loaded"):
        policy("broken")
    with pytest.raises(ConfigError, match="did you mean 'mine'"):
        policy("min")


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
