"""Policies, and the cost of a worker."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import ConfigError
from pdserve.router.config.placement import PlacementSettings, Session
from pdserve.router.fleet.eligible import MAX_MOVED, Eligible, LoadLog
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import Worker, WorkerLoad
from pdserve.router.placement import policies
from pdserve.router.placement.policies import (
    POLICY_NAMES,
    Ask,
    Policy,
    PolicySettings,
    cost_ms,
    load_limit,
    make_policy,
    rendezvous_order,
)
from pdserve.router.placement.prefix_index import Cached, Places
from pdserve.settings import plugins

EVENTS = st.sampled_from(["selected", "released", "queued", "said"])
LOADS = st.lists(st.integers(0, 50), min_size=1, max_size=12)


def fleet(loads: list[int]) -> Eligible:
    workers = [Worker("decode", f"http://10.0.0.{i}:30000") for i in range(len(loads))]
    for worker, load in zip(workers, loads, strict=True):
        worker.in_flight = load
    return Eligible(workers, LoadLog())


def ask(session: str | None = None, last: str | None = None, **more: Any) -> Ask:
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
def test_least_loaded_takes_the_least_and_round_robin_each_in_turn(loads: list[int], turn: int) -> None:
    workers = fleet(loads)
    assert policy("least_loaded").choose(ask(turn=turn), workers).worker.in_flight == min(loads)
    chosen = [policy("round_robin").choose(ask(turn=turn + i), workers).worker for i in range(len(workers))]
    assert set(chosen) == set(workers)


@given(LOADS, st.integers(0, 2**32 - 1))
def test_power_of_two_never_takes_the_busiest_worker_alone_nor_one_because_of_its_caches(
    loads: list[int], draw: int
) -> None:
    workers = fleet(loads)
    busiest = workers[loads.index(max(loads))]
    places = Places({busiest.incarnation: (1000, 0.0)}, None)
    for name in ("power_of_two", "load_aware"):
        chosen = policy(name).choose(ask(draw=draw, prompt_tokens=1000, places=places), workers).worker
        assert chosen is not busiest or loads.count(max(loads)) > 1 or len(loads) == 1


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_choice_takes_as_many_bytecodes_among_128_workers_as_among_16(name: str) -> None:
    def cost(count: int) -> int:
        made = Fleet([Worker("decode", f"http://10.0.0.{i}:30000") for i in range(count)])
        knowing = made.workers[3]
        places = Places({knowing.incarnation: (900, 1.0)}, (900, 1.0))
        asked = ask("s"), ask("s", knowing.id), ask(prompt_tokens=1000, places=places)
        return sum(bytecodes(policy(name), one, made) for one in asked)

    assert cost(128) < 1.3 * cost(16)


def bytecodes(chooses: Policy, asked: Ask, made: Fleet) -> int:
    """Of one choice, with what a request before it has changed."""
    kept = Eligible(made.workers, made.log)
    count = 0

    def local(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += event == "opcode"
        return local

    def enter(frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return local

    for _ in range(3):
        made.on_selected(chooses.choose(asked, kept).worker, 0.0)
    before = sys.gettrace()
    sys.settrace(enter)
    try:
        chooses.choose(asked, kept)
    finally:
        sys.settrace(before)
    return count


@given(st.text(), LOADS, st.randoms(use_true_random=False))
def test_rendezvous_does_not_depend_on_the_order_given(key: str, loads: list[int], random: object) -> None:
    workers = fleet(loads)
    shuffled = list(workers)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert rendezvous_order(key, workers) == rendezvous_order(key, Eligible(shuffled, LoadLog()))


def test_a_worker_that_leaves_moves_only_its_own_sessions() -> None:
    workers = fleet([0] * 5)
    keys = [f"session-{i}" for i in range(10_000)]
    before = {key: rendezvous_order(key, workers)[0] for key in keys}
    left = Eligible(workers[1:], LoadLog())
    after = {key: rendezvous_order(key, left)[0] for key in keys}
    assert all(after[key] is before[key] for key in keys if before[key] is not workers[0])
    shares = [sum(1 for worker in before.values() if worker is w) / len(keys) for w in workers]
    assert all(0.17 < share < 0.23 for share in shares)


@given(LOADS, st.text(min_size=1))
def test_affinity_never_chooses_an_overloaded_worker_but_for_a_hard_session(
    loads: list[int], key: str
) -> None:
    settings = Session(overload_factor=1.25, overload_min_requests=4)
    soft, hard = make_policy("affinity", PolicySettings(settings)), policy("affinity", mode="hard")
    workers = fleet(loads)
    limit = load_limit(settings, workers, lambda worker: worker.load)
    for last in (None, *(w.id for w in workers)):
        assert soft.choose(ask(key, last), workers).worker.in_flight < limit
    best = rendezvous_order(key, workers)[0]
    best.in_flight = 1000
    assert hard.choose(ask(key), workers).worker is best
    for worker in workers:
        assert hard.choose(ask(key, worker.id), workers).worker is worker


def test_requests_without_a_session_go_where_their_own_policy_says() -> None:
    assert policy("affinity").choose(ask(), fleet([1, 0])).reason == "least-loaded"
    assert policy("affinity", without_key="round_robin").choose(ask(), fleet([1, 0])).reason == "round-robin"
    with pytest.raises(ConfigError, match="without_key"):
        policy("affinity", without_key="affinity")


@pytest.mark.parametrize("name", ["least_loaded", "affinity", "cache_aware", "load_aware"])
@given(
    count=st.integers(9, 40),
    events=st.lists(st.tuples(st.integers(0, 39), EVENTS, st.integers(0, 30)), max_size=60),
    knowing=st.dictionaries(st.integers(0, 39), st.integers(0, 5000), max_size=5),
    pool_tokens=st.none() | st.integers(0, 5000),
    session=st.none() | st.text(max_size=3),
)
def test_workers_that_are_kept_in_order_are_chosen_as_by_a_walk_over_all(
    name: str,
    count: int,
    events: list[tuple[int, str, int]],
    knowing: dict[int, int],
    pool_tokens: int | None,
    session: str | None,
) -> None:
    made = Fleet([Worker("decode", f"http://10.0.0.{i}:30000") for i in range(count)])
    workers, chooses = made.workers, policy(name)
    kept = Eligible(workers, made.log)
    pool = None if pool_tokens is None else (pool_tokens, 1.0)
    places = Places({workers[i].incarnation: (n, 10.0) for i, n in knowing.items() if i < count}, pool)
    for turn, (number, event, amount) in enumerate([*events, (0, "said", 1)]):
        worker = workers[number % count]
        if event == "selected":
            made.on_selected(worker, 0.0)
        elif event == "released" and worker.in_flight:
            made.on_released(worker)
        elif event == "queued":
            made.on_queued(worker, amount * 100)
        elif event == "said":
            made.on_load(worker, WorkerLoad(amount, 0, amount * 50, free_kv_tokens=amount * 200))
        asked = ask(session, workers[0].id, turn=turn, prompt_tokens=5000, places=places)
        with patch.multiple(policies, FEW=count, FEW_COSTS=count):
            by_walk = chooses.choose(asked, kept)
        by_order = chooses.choose(asked, kept)
        if name in ("least_loaded", "affinity"):
            assert by_order.worker is by_walk.worker
        else:  # of workers with the same cost it may be another one
            assert by_order.figures.partition("ms")[0] == by_walk.figures.partition("ms")[0]


@given(st.lists(st.integers(0, 3), min_size=2, max_size=30), st.integers(0, 100))
def test_equal_workers_take_equal_turns_beside_busy_ones(loads: list[int], first: int) -> None:
    made = Fleet([Worker("decode", f"http://10.0.0.{i}:30000") for i in range(len(loads))])
    for worker, load in zip(made.workers, loads, strict=True):
        made.on_load(worker, WorkerLoad(load))
    idle = loads.count(min(loads))
    for name in ("least_loaded", "load_aware"):
        workers, turns = Eligible(made.workers, made.log), range(first, first + idle)
        assert len({policy(name).choose(ask(turn=turn), workers).worker for turn in turns}) == idle


def test_a_small_part_of_a_prompt_makes_no_worker_preferred() -> None:
    workers = fleet([0, 0, 0])
    for tokens, chosen in ((200, 3), (300, 1)):
        places = Places({workers[0].incarnation: (tokens, 0.0)}, None)
        asked = [ask(turn=turn, prompt_tokens=1000, places=places) for turn in range(3)]
        assert len({policy("cache_aware").choose(one, workers).worker for one in asked}) == chosen


def test_an_order_that_has_missed_more_changes_than_are_kept_sorts_anew() -> None:
    made = Fleet([Worker("decode", f"http://10.0.0.{i}:30000") for i in range(20)])
    kept = Eligible(made.workers, made.log)
    chooses = policy("least_loaded")
    assert chooses.choose(ask(), kept).worker is made.workers[0]
    for worker in made.workers[:-1]:
        made.on_selected(worker, 0.0)
    for _ in range(MAX_MOVED):
        made.on_load(made.workers[0], None)
    assert len(made.log.moved) < MAX_MOVED
    assert chooses.choose(ask(), kept).worker is made.workers[-1]


@given(st.lists(st.integers(0, 500), min_size=2, max_size=30), st.integers(0, 29), st.integers(0, 10**9))
def test_an_overloaded_worker_is_not_chosen_for_what_it_has_of_the_prompt(
    loads: list[int], number: int, turn: int
) -> None:
    workers = fleet(loads)
    knowing = workers[number % len(workers)]
    places = Places({knowing.incarnation: (100_000, 0.0)}, None)
    asked = ask(turn=turn, prompt_tokens=100_000, places=places)
    chosen = policy("cache_aware").choose(asked, workers).worker
    if knowing.load < max(1.5 * (sum(loads) + 1) / len(loads), 8):
        assert chosen is knowing
    else:
        assert chosen.load == min(loads)


def test_a_policy_of_another_package_is_found_by_its_entry_point_and_an_unknown_one_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = EntryPoint("mine", "pdserve.router.placement.policies:RoundRobin", "pdserve.router.policies")
    broken = EntryPoint("broken", "pdserve.router.placement.policies:Nothing", "pdserve.router.policies")
    monkeypatch.setattr(plugins, "_found", lambda group, path: {"mine": point, "broken": broken})
    assert policy("mine").choose(ask(), fleet([0])).reason == "round-robin"
    for name, said in (
        ("broken", "cannot be loaded"),
        ("min", "did you mean 'mine'"),
        ("least-loaded", "did you mean 'least_loaded'"),
    ):
        with pytest.raises(ConfigError, match=said):
            policy(name)


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
