"""The fair queue: slots, waiting, shares. Pure."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.router.admission.queue import FairQueue, State, Ticket
from pdserve.router.config.tenants import TenantLimits
from pdserve.router.tenants.tenant import TenantState

INF = float("inf")


def tenant(name: str, **limits: float) -> TenantState:
    return TenantState(name, TenantLimits(**limits), 0.0)  # type: ignore[arg-type]


def come(admission: FairQueue, who: TenantState, slots: int, now_s: float = 0.0, lane: str = "m") -> Ticket:
    ticket = Ticket(who, lane, now_s, now_s + 30.0)
    admission.arrive(ticket, slots, now_s)
    admission.check()
    return ticket


def test_requests_run_while_there_are_slots_and_then_wait_in_turn() -> None:
    admission, a = FairQueue(10), tenant("a")
    first, second, third = (come(admission, a, 1) for _ in range(3))
    assert [t.state for t in (first, second, third)] == [State.RUNNING, State.WAITING, State.WAITING]
    assert admission.leave(first, 1.0) == [second]
    assert admission.leave(second, 1.0) == [third]
    assert admission.leave(third, 1.0) == []
    assert (a.running, a.waiting) == (0, 0)


def test_a_tenant_that_floods_gets_its_share_and_no_more() -> None:
    admission, flood, quiet = FairQueue(1000), tenant("flood"), tenant("quiet")
    running = [come(admission, flood, 4) for _ in range(100)][:4]
    late = [come(admission, quiet, 4) for _ in range(2)]
    assert [admission.leave(running[i], 1.0) for i in range(2)] == [[late[0]], [late[1]]]
    assert (flood.running, quiet.running) == (2, 2)


def test_tenants_take_turns_at_a_single_slot_by_weight() -> None:
    admission, flood, quiet = FairQueue(1000), tenant("flood"), tenant("quiet", weight=2.0)
    running = come(admission, flood, 1)
    for _ in range(19):
        come(admission, flood, 1)
    for _ in range(10):
        come(admission, quiet, 1)
    served = []
    for _ in range(9):
        [running] = admission.leave(running, 1.0)
        served.append(running.tenant.name)
    assert Counter(served) == {"flood": 3, "quiet": 6}
    assert served[0] == "quiet"


def test_slots_are_shared_by_weight() -> None:
    admission, heavy, light = FairQueue(1000), tenant("heavy", weight=3.0), tenant("light")
    tickets = [come(admission, who, 8) for _ in range(50) for who in (light, heavy)]
    dice = random.Random(1)
    for _ in range(60):
        going = dice.choice([t for t in tickets if t.state is State.RUNNING])
        admission.leave(going, 1.0)
        admission.check()
    # the last of one tenant or the other may have run out of requests before
    assert heavy.waiting == 0 or (heavy.running, light.running) == (6, 2)


def test_a_tenants_own_concurrency_holds_it_back_and_nobody_else() -> None:
    admission, narrow, wide = FairQueue(10), tenant("narrow", concurrency=1), tenant("wide")
    first, second = come(admission, narrow, 4), come(admission, narrow, 4)
    assert (first.state, second.state) == (State.RUNNING, State.WAITING)
    assert come(admission, wide, 4).state is State.RUNNING
    assert admission.leave(first, 1.0) == [second]


def test_a_tenants_concurrency_counts_over_all_models() -> None:
    admission, narrow = FairQueue(10), tenant("narrow", concurrency=1)
    first = come(admission, narrow, 4, lane="m")
    second = come(admission, narrow, 4, lane="other")
    assert second.state is State.WAITING
    assert admission.leave(first, 1.0) == [second]


def test_what_waits_for_a_slot_is_not_held_back_by_its_tenants_share() -> None:
    admission, a, b = FairQueue(10), tenant("a", concurrency=5), tenant("b")
    a.granted = 1
    for _ in range(4):
        come(admission, a, 3)
    assert (a.running, admission.held_back(a)) == (1, 2)  # of three that wait: there are two slots
    running = [come(admission, b, 3) for _ in range(2)]
    assert admission.held_back(a) == 0
    admission.leave(running[0], 1.0)
    assert admission.held_back(a) == 1
    assert admission.held_back(b) == 0


def test_a_full_queue_refuses_the_newcomer_of_the_tenant_that_fills_it() -> None:
    admission, a = FairQueue(2), tenant("a")
    tickets = [come(admission, a, 1) for _ in range(4)]
    assert tickets[-1].state is State.REFUSED
    assert [t.state for t in tickets[1:3]] == [State.WAITING, State.WAITING]


def test_a_full_queue_makes_room_for_others_at_the_expense_of_who_fills_it() -> None:
    admission, flood, quiet = FairQueue(4), tenant("flood"), tenant("quiet")
    tickets = [come(admission, flood, 1) for _ in range(5)]
    polite = Ticket(quiet, "m", 0.0, INF)
    assert admission.arrive(polite, 1, 0.0) == [tickets[-1]]
    assert (polite.state, tickets[-1].state) == (State.WAITING, State.REFUSED)
    assert admission.leave(tickets[0], 1.0) == [polite]


def test_a_model_that_is_flooded_leaves_the_others_their_queue() -> None:
    admission, a = FairQueue(2), tenant("a")
    flood = [come(admission, a, 1, lane="busy") for _ in range(9)]
    assert flood[-1].state is State.REFUSED
    other = [come(admission, a, 1, lane="other") for _ in range(4)]
    states = [State.RUNNING, State.WAITING, State.WAITING, State.REFUSED]
    assert [ticket.state for ticket in other] == states
    admission.check()


def test_what_waits_past_its_deadline_is_refused() -> None:
    admission, a = FairQueue(10), tenant("a")
    _, early, late = come(admission, a, 1), come(admission, a, 1, 1.0), come(admission, a, 1, 2.0)
    assert admission.expire(30.9) == []
    assert admission.expire(31.0) == [early]
    assert late.state is State.WAITING
    assert a.waiting == 1


def test_a_client_that_leaves_the_queue_leaves_no_trace() -> None:
    admission, a = FairQueue(10), tenant("a")
    first, second = come(admission, a, 1), come(admission, a, 1)
    assert admission.leave(second, 1.0) == []
    assert admission.leave(first, 1.0) == []
    assert admission.leave(first, 1.0) == []
    admission.check()
    assert (a.running, a.waiting) == (0, 0)


def test_workers_that_come_let_in_what_waits() -> None:
    admission, a = FairQueue(10), tenant("a")
    tickets = [come(admission, a, 1) for _ in range(4)]
    assert admission.resize("m", 3, 1.0) == tickets[1:3]
    assert admission.resize("m", 0, 1.0) == []
    assert admission.leave(tickets[0], 1.0) == []
    assert admission.busy_lanes == ["m"]


def test_retry_after_says_how_long_the_queue_takes() -> None:
    admission, a = FairQueue(100), tenant("a")
    for _ in range(50):
        admission.leave(come(admission, a, 2, 0.0), 2.0)
    for _ in range(12):
        come(admission, a, 2)
    assert admission.retry_after_s("m") == pytest.approx(10 * 2 / 2, rel=0.1)
    assert admission.retry_after_s("nobody") == 1.0


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "arrive", "arrive", "leave", "expire", "resize"]),
        st.integers(0, 3),
        st.integers(0, 5),
        st.floats(0, 3),
    ),
    max_size=120,
)


@settings(max_examples=100)
@given(
    steps=STEPS, queue_length=st.integers(0, 8), limits=st.lists(st.integers(0, 2), min_size=4, max_size=4)
)
def test_whatever_happens_counts_agree_and_no_slot_stays_free_while_somebody_waits(
    steps: list[tuple[str, int, int, float]], queue_length: int, limits: list[int]
) -> None:
    admission = FairQueue(queue_length)
    tenants = [tenant(f"t{i}", concurrency=limit, weight=1.0 + i) for i, limit in enumerate(limits)]
    slots = {"m": 2, "n": 1}
    tickets: list[Ticket] = []
    now_s = 0.0
    for what, i, number, pause_s in steps:
        now_s += pause_s
        lane = "mn"[number % 2]
        if what == "arrive":
            ticket = Ticket(tenants[i], lane, now_s, now_s + 4.0)
            tickets.append(ticket)
            changed = admission.arrive(ticket, slots[lane], now_s)
        elif what == "leave" and tickets:
            changed = admission.leave(tickets.pop(number % len(tickets)), now_s)
        elif what == "expire":
            changed = admission.expire(now_s)
        else:
            slots[lane] = number
            changed = admission.resize(lane, number, now_s)
        assert all(t.state in (State.RUNNING, State.REFUSED) for t in changed)
        admission.check()
        states = Counter((t.tenant.name, t.state) for t in tickets)
        for t in tenants:
            assert t.running == states[t.name, State.RUNNING]
            assert t.waiting == states[t.name, State.WAITING]
            assert not t.limits.concurrency or t.running <= t.limits.concurrency
    while tickets:
        admission.leave(tickets.pop(), now_s)
    admission.check()
    assert admission.waiting == 0
    assert all(t.running == t.waiting == 0 for t in tenants)


@given(
    st.lists(st.integers(1, 5), min_size=2, max_size=5), st.integers(5, 40), st.randoms(use_true_random=False)
)
def test_with_enough_to_do_slots_end_up_shared_by_weight(
    weights: list[int], slots: int, dice: random.Random
) -> None:
    admission = FairQueue(100_000)
    tenants = [tenant(f"t{i}", weight=weight) for i, weight in enumerate(weights)]
    tickets = [come_quietly(admission, t, slots) for t in tenants for _ in range(6 * slots)]
    for _ in range(4 * slots):
        admission.leave(dice.choice([t for t in tickets if t.state is State.RUNNING]), 1.0)
    for t in tenants:
        fair = slots * t.limits.weight / sum(weights)
        assert abs(t.running - fair) <= 1 + len(tenants) * 0.5, (t.name, t.running, fair)


def come_quietly(admission: FairQueue, who: TenantState, slots: int) -> Ticket:
    ticket = Ticket(who, "m", 0.0, INF)
    admission.arrive(ticket, slots, 0.0)
    return ticket
