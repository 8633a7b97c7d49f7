"""Whether a node is tried: the table of node_health.py, and what holds after any history."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import (
    PoolError,
    PoolRefused,
    PoolRestarting,
    PoolTimeout,
    PoolUnavailable,
    RequestRefused,
)
from pdserve.kvpool.client.node_health import (
    RESTART_RETRY_S,
    RETRY_SHARE,
    Asked,
    Cause,
    Close,
    DropIdle,
    Event,
    Log,
    Lost,
    NodeHealth,
    NodeState,
    NoRunner,
    Try,
    TryFailed,
    TrySucceeded,
    cause_of,
)
from tests.support.suite.extended import examples

RETRY_S, RESTART_S = 0.5, 3.0
ERROR = PoolTimeout("late")


def health_in(state: NodeState, now_s: float = 0.0) -> NodeHealth:
    health = NodeHealth("n", retry_after_s=RETRY_S, restart_wait_s=RESTART_S)
    causes = {NodeState.RESTARTING: Cause.RESTARTING, NodeState.DOWN: Cause.FAILED}
    if state in causes:
        health.handle(Lost(0, causes[state], ERROR), now_s)
    elif state is NodeState.CLOSED:
        health.handle(Close(), now_s)
    assert health.state is state
    return health


def lost(cause: Cause) -> Event:
    return Lost(0, cause, ERROR)


UP, RESTARTING, DOWN, CLOSED = NodeState.UP, NodeState.RESTARTING, NodeState.DOWN, NodeState.CLOSED


@pytest.mark.parametrize(
    ("state", "event", "after", "actions"),
    [
        (UP, lost(Cause.STALE), UP, [DropIdle()]),
        (UP, lost(Cause.REFUSED), UP, [DropIdle()]),
        (UP, lost(Cause.RESTARTING), RESTARTING, [DropIdle(), logging.INFO, Try(0.0)]),
        (UP, lost(Cause.FAILED), DOWN, [DropIdle(), logging.WARNING, Try(RETRY_S)]),
        (UP, lost(Cause.ABSENT), DOWN, [DropIdle(), logging.WARNING, Try(RESTART_RETRY_S)]),
        (UP, TrySucceeded(), UP, []),
        (UP, TryFailed(), UP, []),
        (UP, Asked(), UP, []),
        (RESTARTING, TryFailed(), RESTARTING, [Try(RESTART_RETRY_S)]),
        (RESTARTING, TrySucceeded(), UP, [logging.INFO]),
        (RESTARTING, NoRunner(), DOWN, [logging.WARNING]),
        (DOWN, TryFailed(), DOWN, [Try(RETRY_S)]),
        (DOWN, TrySucceeded(), UP, [logging.INFO]),
        (DOWN, Asked(), DOWN, []),
        *((state, Close(), CLOSED, [DropIdle()]) for state in (UP, RESTARTING, DOWN)),
        *((CLOSED, event, CLOSED, []) for event in (lost(Cause.FAILED), TrySucceeded(), NoRunner(), Asked())),
    ],
)
def test_the_table(state: NodeState, event: Event, after: NodeState, actions: list[object]) -> None:
    health = health_in(state)
    did = health.handle(event, 0.0)
    assert health.state is after
    assert [action.level if isinstance(action, Log) else action for action in did] == actions


@pytest.mark.parametrize("cause", Cause)
@pytest.mark.parametrize("state", [RESTARTING, DOWN])
def test_a_node_that_is_looked_after_only_loses_its_idle_connections(state: NodeState, cause: Cause) -> None:
    health = health_in(state)
    assert health.handle(Lost(health.generation, cause, ERROR), 1.0) == [DropIdle()]
    assert health.state is state


def test_a_restart_that_does_not_end_costs_its_time_once_then_the_node_is_down() -> None:
    health, now_s, pauses_s = health_in(RESTARTING), 0.0, list[float]()
    while health.state is RESTARTING:
        assert health.reachable
        assert now_s < RESTART_S
        *_, attempt = health.handle(TryFailed(), now_s)
        assert isinstance(attempt, Try)
        pauses_s.append(round(attempt.at_s - now_s, 9))
        now_s = attempt.at_s
    *pauses_s, _ = pauses_s
    assert pauses_s[0] == RESTART_RETRY_S
    assert pauses_s == sorted(pauses_s)
    assert pauses_s[-1] <= RETRY_SHARE * RESTART_S, "little later than the node is back"
    assert health.state is DOWN
    with pytest.raises(PoolUnavailable, match="is down"):
        health.check()
    assert health.handle(TryFailed(), now_s)[-1] != Try(now_s)


def test_where_nobody_listens_pauses_grow_with_the_time_away_to_the_usual_one() -> None:
    health, now_s, pauses_s = health_in(UP), 0.0, list[float]()
    *_, attempt = health.handle(lost(Cause.ABSENT), now_s)
    while now_s < 60:
        assert isinstance(attempt, Try)
        pauses_s.append(round(attempt.at_s - now_s, 9))
        now_s = attempt.at_s
        [attempt] = health.handle(TryFailed(), now_s)
    assert pauses_s == sorted(pauses_s)
    assert pauses_s[0] == pytest.approx(RESTART_RETRY_S)
    assert pauses_s[-1] == pytest.approx(RETRY_S)


@pytest.mark.parametrize(
    ("error", "connected", "excusable", "cause"),
    [
        (PoolRestarting("r"), False, False, Cause.RESTARTING),
        (PoolRestarting("r"), True, True, Cause.RESTARTING),
        (PoolUnavailable("u"), False, True, Cause.ABSENT),
        (PoolUnavailable("u"), True, True, Cause.STALE),
        (PoolUnavailable("u"), True, False, Cause.FAILED),
        (PoolTimeout("t"), True, True, Cause.FAILED),
        (PoolTimeout("t"), False, True, Cause.FAILED),
        (PoolRefused("no"), True, True, Cause.FAILED),
        (RequestRefused("no", "unknown_namespace"), True, True, Cause.REFUSED),
        (RequestRefused("no", "geometry_mismatch"), False, True, Cause.FAILED),
    ],
)
def test_what_an_error_says_of_the_node(
    error: PoolError, connected: bool, excusable: bool, cause: Cause
) -> None:
    assert cause_of(error, connected=connected, excusable=excusable) is cause


STEPS = st.one_of(
    st.tuples(st.just("lost"), st.sampled_from(Cause), st.integers(0, 2)),
    st.tuples(st.sampled_from(["failed", "succeeded", "no runner", "asked"]), st.none(), st.just(0)),
    st.tuples(st.just("close"), st.none(), st.just(0)),
)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.tuples(STEPS, st.floats(0, 1)), max_size=40))
def test_after_any_history_one_try_is_open_at_most_and_no_node_is_forgotten(
    steps: list[tuple[tuple[str, Cause | None, int], float]],
) -> None:
    health, now_s, open_tries = health_in(UP), 0.0, 0
    answers = {"failed": TryFailed(), "succeeded": TrySucceeded(), "no runner": NoRunner()}
    for (what, cause, age), pause_s in steps:
        now_s += pause_s
        if what in answers and not open_tries:
            continue
        event: Event = answers.get(what) or (Close() if what == "close" else Asked())
        if cause is not None:
            event = Lost(health.generation - age, cause, ERROR)
        before = health.state, health.generation
        actions = health.handle(event, now_s)
        tries = [action for action in actions if isinstance(action, Try)]
        open_tries += len(tries) - (what in answers)
        assert open_tries <= 1
        assert all(now_s <= one.at_s <= now_s + RETRY_S for one in tries)
        assert (
            (DropIdle() in actions)
            == (health.generation == before[1] + 1)
            == (health.generation != before[1])
        )
        if isinstance(event, Lost) and age:
            assert (actions, (health.state, health.generation)) == ([], before)
        assert health.reachable == (health.state in (UP, RESTARTING))
        if health.state in (UP, CLOSED):
            open_tries = 0  # a runner that still tries feeds what changes nothing
        elif not open_tries:
            assert health.state is DOWN, "nobody would end the waiting"
    if health.state is DOWN and not open_tries:
        assert [type(action) for action in health.handle(Asked(), now_s + RETRY_S)] == [Try]
