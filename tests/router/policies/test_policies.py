from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import ConfigError
from pdserve.router.config import Session
from pdserve.router.fleet import Worker
from pdserve.router.policies import POLICY_NAMES, make_policy
from pdserve.router.policies.affinity import Affinity, rendezvous_order
from pdserve.router.policies.least_loaded import LeastLoaded
from pdserve.router.schema import Facts

LOADS = st.lists(st.integers(0, 50), min_size=1, max_size=12)


def fleet(loads: list[int]) -> list[Worker]:
    workers = [Worker("decode", f"http://10.0.0.{i}:30000") for i in range(len(loads))]
    for worker, load in zip(workers, loads, strict=True):
        worker.in_flight = load
    return workers


def facts(key: str | None = None, turn: int = 0) -> Facts:
    return Facts("/v1/completions", session_key=key, turn=turn)


@pytest.mark.parametrize("name", POLICY_NAMES)
@given(loads=LOADS, key=st.none() | st.text(), turn=st.integers(0, 10**9), last=st.integers(0, 20))
def test_every_policy_chooses_one_of_the_workers_and_says_why(
    name: str, loads: list[int], key: str | None, turn: int, last: int
) -> None:
    workers = fleet(loads)
    choice = make_policy(name, Session()).choose(facts(key, turn), workers, f"10.0.0.{last}:30000")
    assert choice.worker in workers
    assert choice.reason.replace("-", "").isalpha()


@given(LOADS, st.integers(0, 1000))
def test_least_loaded_takes_the_least(loads: list[int], turn: int) -> None:
    assert LeastLoaded().choose(facts(turn=turn), fleet(loads), None).worker.in_flight == min(loads)


def test_least_loaded_lets_equals_take_turns() -> None:
    workers = fleet([1, 1, 1])
    assert {LeastLoaded().choose(facts(turn=i), workers, None).worker.id for i in range(3)} == {
        w.id for w in workers
    }


def test_round_robin_takes_each_in_turn() -> None:
    policy, workers = make_policy("round_robin", Session()), fleet([9, 0, 0])
    assert [policy.choose(facts(turn=i), workers, None).worker for i in range(4)] == [*workers, workers[0]]


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
    policy = Affinity(LeastLoaded(), overload_factor=1.25, overload_min_requests=4)
    workers = fleet(loads)
    for last in (None, *(w.id for w in workers)):
        assert policy.choose(facts(key), workers, last).worker.in_flight < policy.load_limit(workers)


def test_a_session_keeps_its_worker_until_that_is_overloaded_or_gone() -> None:
    policy = Affinity(LeastLoaded(), overload_factor=2.0, overload_min_requests=8)
    workers = fleet([7, 0, 0])
    last = workers[0].id
    assert policy.choose(facts("k"), workers, last) == (workers[0], "session")
    workers[0].in_flight = 30
    assert policy.choose(facts("k"), workers, last).worker is not workers[0]
    assert policy.choose(facts("k"), workers[1:], last).reason == "rendezvous"


def test_unknown_policy_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'least_loaded'"):
        make_policy("least-loaded", Session())
