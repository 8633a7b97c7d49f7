"""The fair queue: slots, waiting, shares. Pure."""

from __future__ import annotations

import random
from collections import Counter

import pytest

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


def test_retry_after_says_how_long_the_queue_takes() -> None:
    admission, a = FairQueue(100), tenant("a")
    for _ in range(50):
        admission.leave(come(admission, a, 2, 0.0), 2.0)
    for _ in range(12):
        come(admission, a, 2)
    assert admission.retry_after_s("m") == pytest.approx(10 * 2 / 2, rel=0.1)
    assert admission.retry_after_s("nobody") == 1.0


def test_no_stream_of_urgent_requests_keeps_another_one_waiting_for_ever() -> None:
    admission, a = FairQueue(100), tenant("a")
    running = come(admission, a, 1)
    patient = Ticket(a, "m", 0.0, INF, -2.0)
    admission.arrive(patient, 1, 0.0)
    for second in range(10):
        admission.arrive(Ticket(a, "m", float(second), INF, 2.0), 1, float(second))
        [running] = admission.leave(running, float(second))
        if running is patient:
            break
    assert second == 4  # who comes then with the longest head start is no more before it


class Watched:
    """A queue beside its rules: they say of every ticket that it starts or refuses whether that was right."""

    def __init__(self, queue_length: int, limits: list[int]) -> None:
        self.queue = FairQueue(queue_length)
        self.tenants = [tenant(f"t{i}", concurrency=n, weight=1.0 + i) for i, n in enumerate(limits)]
        self.slots = {"m": 2, "n": 1}
        self.resized = {lane: [(0.0, slots)] for lane, slots in self.slots.items()}
        """When each lane got how many slots."""
        self.states: dict[Ticket, State] = {}
        """In the order of arrival."""

    def those(self, state: State, lane: str | None = None, who: TenantState | None = None) -> list[Ticket]:
        tickets = [ticket for ticket, known in self.states.items() if known is state]
        return [one for one in tickets if lane in (None, one.lane) and who in (None, one.tenant)]

    def in_order(self, lane: str, who: TenantState) -> list[Ticket]:
        """Its waiting tickets as they should run."""
        return sorted(self.those(State.WAITING, lane, who), key=lambda one: one.counts_from_s)

    def may_run(self, who: TenantState) -> bool:
        return not who.limits.concurrency or len(self.those(State.RUNNING, who=who)) < who.limits.concurrency

    def shares(self, state: State, lane: str, waiting: list[Ticket]) -> dict[TenantState, float]:
        """By tenant of those tickets: how many it has in this state, for its weight."""
        return {
            one.tenant: len(self.those(state, lane, one.tenant)) / one.tenant.limits.weight for one in waiting
        }

    def started(self, ticket: Ticket) -> None:
        """A slot goes to the tenant that runs least for its weight, and to the first of its requests: the
        oldest, but for head starts.
        """
        lane = ticket.lane
        assert len(self.those(State.RUNNING, lane)) < self.slots[lane]
        assert self.may_run(ticket.tenant)
        rivals = [one for one in self.those(State.WAITING, lane) if self.may_run(one.tenant)]
        shares = self.shares(State.RUNNING, lane, rivals)
        assert shares[ticket.tenant] == min(shares.values())
        assert ticket is self.in_order(lane, ticket.tenant)[0]

    def refused(self, ticket: Ticket) -> None:
        """A full queue costs the tenant that waits most for its weight its last request."""
        waiting = self.those(State.WAITING, ticket.lane)
        assert len(waiting) > self.queue.queue_length
        shares = self.shares(State.WAITING, ticket.lane, waiting)
        assert shares[ticket.tenant] == max(shares.values())
        assert ticket is self.in_order(ticket.lane, ticket.tenant)[-1]

    def starts(self, name: str, tenant: TenantState) -> bool:
        """Without a ticket, where nothing is in the way."""
        lane = self.queue.free_lane(name, tenant, self.slots[name])
        if lane is not None:
            lane.start(tenant)
        return lane is not None

    def arrive(self, number: int, lane: str, now_s: float, head_start_s: float) -> None:
        ticket = Ticket(self.tenants[number], lane, now_s, now_s + 6.0, head_start_s, worker_wait_s=2.0)
        self.states[ticket] = State.WAITING
        if not head_start_s and self.starts(lane, ticket.tenant):
            ticket.state, ticket.started_s = State.RUNNING, now_s  # without a ticket, but here
            self.follow([ticket])
        else:
            self.follow(self.queue.arrive(ticket, self.slots[lane], now_s))

    def leave(self, number: int, now_s: float) -> None:
        if here := self.those(State.RUNNING) + self.those(State.WAITING):
            ticket = here[number % len(here)]
            self.states[ticket] = State.OVER
            self.follow(self.queue.leave(ticket, now_s))

    def expire(self, now_s: float) -> None:
        late = [one for one in self.those(State.WAITING) if self.is_late(one, now_s)]
        assert set(self.queue.expire(now_s)) == set(late)
        assert [one.is_without_worker for one in late] == [not self.slots[one.lane] for one in late]
        self.states |= dict.fromkeys(late, State.REFUSED)
        self.follow([])

    def is_late(self, ticket: Ticket, now_s: float) -> bool:
        """The time without slots has its own limit, and does not count for the other one."""
        spans = zip(self.resized[ticket.lane], [*self.resized[ticket.lane][1:], (now_s, 0)], strict=True)
        outages = [
            max(0.0, end_s - max(begin_s, ticket.arrived_s))
            for (begin_s, slots), (end_s, _) in spans
            if not slots
        ]
        if self.slots[ticket.lane]:
            return now_s - ticket.arrived_s - sum(outages) >= 6.0
        return sum(outages) >= 2.0

    def resize(self, lane: str, slots: int, now_s: float) -> None:
        self.slots[lane] = slots
        self.resized[lane].append((now_s, slots))
        self.follow(self.queue.resize(lane, slots, now_s))

    def follow(self, changed: list[Ticket]) -> None:
        for ticket in changed:
            (self.started if ticket.state is State.RUNNING else self.refused)(ticket)
            self.states[ticket] = ticket.state
        assert {ticket: ticket.state for ticket in self.states} == self.states
        self.queue.check()
        for lane, slots in self.slots.items():
            waiting = self.those(State.WAITING, lane)
            idle = slots - len(self.those(State.RUNNING, lane))
            assert idle <= 0 or not any(self.may_run(one.tenant) for one in waiting)
            assert (lane in self.queue.busy_lanes) == bool(waiting)
        for one in self.tenants:
            assert one.running == len(self.those(State.RUNNING, who=one))
            assert one.waiting == len(self.those(State.WAITING, who=one))


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_slots_and_refusals_go_where_the_rules_say(seed: int) -> None:
    dice, now_s = random.Random(seed), 0.0
    watched = Watched(dice.randrange(8), [dice.randrange(3) for _ in range(4)])
    for _ in range(100):
        now_s += dice.uniform(0, 1)
        what, lane = dice.random(), dice.choice("mmn")
        if what < 0.55:
            watched.arrive(dice.randrange(4), lane, now_s, dice.choice((0.0, 0.0, 2.0, -1.0)))
        elif what < 0.8:
            watched.leave(dice.randrange(100), now_s)
        elif what < 0.9:
            watched.expire(now_s)
        else:
            watched.resize(lane, dice.randrange(4), now_s)
    while watched.queue.waiting or watched.those(State.RUNNING):
        watched.leave(0, now_s)
    assert watched.those(State.WAITING) == []
