from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import ConfigError
from pdserve.router.api.errors import NoWorkerError
from pdserve.router.config.placement import Session
from pdserve.router.fleet.worker import Worker
from pdserve.router.placement.policies import (
    POLICY_NAMES,
    Affinity,
    Ask,
    Choice,
    Policy,
    PolicySettings,
    make_policy,
    rendezvous_order,
)
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


def test_least_loaded_lets_equals_take_turns() -> None:
    workers = fleet([1, 1, 1])
    chosen = {policy("least_loaded").choose(ask(turn=i), workers).worker.id for i in range(3)}
    assert chosen == {w.id for w in workers}


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


def test_a_session_keeps_its_worker_until_that_is_overloaded_or_gone() -> None:
    made = policy("affinity", overload_factor=2.0, overload_min_requests=8)
    workers = fleet([7, 0, 0])
    last = workers[0].id
    assert made.choose(ask("k", last), workers) == Choice(workers[0], "session")
    assert made.choose(ask("k", last), workers[1:]).reason == "gone"
    workers[0].elsewhere = 23  # sent there by other routers
    moved = made.choose(ask("k", last), workers)
    assert moved.worker is not workers[0]
    assert moved.reason == "overloaded"


@given(LOADS, st.text(min_size=1))
def test_a_hard_session_stays_whatever_the_load(loads: list[int], key: str) -> None:
    made, workers = policy("affinity", mode="hard"), fleet(loads)
    best = rendezvous_order(key, workers)[0]
    best.in_flight = 1000
    assert made.choose(ask(key), workers).worker is best
    for worker in workers:
        assert made.choose(ask(key, worker.id), workers).worker is worker


def test_a_session_whose_worker_is_gone_can_be_refused() -> None:
    made, workers = policy("affinity", when_gone="refuse"), fleet([0, 0])
    with pytest.raises(NoWorkerError, match="is gone"):
        made.choose(ask("k", "10.9.9.9:1"), workers)
    assert made.choose(ask("k"), workers).reason == "rendezvous"


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


def test_power_of_two_draws_every_pair() -> None:
    workers, pairs = fleet([0, 1, 2, 3]), set()
    for draw in range(12):
        pairs.add(policy("power_of_two").choose(ask(draw=draw), workers).worker.in_flight)
    assert pairs == {0, 1, 2}


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
