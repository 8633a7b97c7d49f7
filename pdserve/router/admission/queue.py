"""The fair queue: which request runs now, which waits, which is refused. Pure.

Requests of one model share the slots of its workers: a *lane*. The number of slots bounds the requests on all
workers together; placement decides which worker gets how many. Within a lane:

- A request runs at once when a slot is free, its tenant is below its own concurrency, and no request of its
  tenant waits. Otherwise it waits in its tenant's queue, first come first served. Urgent requests have a head
  start: they count as if they had come earlier. The head start is bounded, so no request waits for ever.
- A free slot goes to the waiting tenant with the fewest running requests for its weight. With enough load
  each tenant gets its weight's share of the slots, however many requests it sends (weighted max-min
  fairness). Equal tenants take turns by weight (stride scheduling, Waldspurger 1995), so that they also
  share a single slot over time. Turns are counted while requests wait; what runs then are the first ones.
- The queue of each lane is bounded, so a flooded model takes nothing from the others. In a full queue the
  tenant with most waiting requests for its weight loses the last one of its queue, which may be the request
  that just came. A tenant that floods the queue cannot keep the others out of it.
- A request that still waits at its deadline is refused.
- A lane without slots has no worker that is ready. Its requests wait for one in the same order. That time has
  a limit of its own, `worker_wait_s`, and puts off the deadline.

A request that runs at once needs no ticket: its lane counts it (`free_lane`, `Lane.start`, `end`). Each
ticket is in one state. Every method returns the tickets that it changed to RUNNING or REFUSED, for the caller
to wake.

    NEW -> RUNNING -> OVER
    NEW -> WAITING -> RUNNING | REFUSED | OVER (its client left)
    NEW -> REFUSED
"""

from __future__ import annotations

import enum
import math
from bisect import insort_right
from collections import defaultdict
from operator import attrgetter

from pdserve.router.tenants.tenant import TenantState

MAX_RETRY_AFTER_S = 60.0
_SMOOTHING = 0.05
"""Weight of the newest service time in the running mean."""


class State(enum.Enum):
    """Of a ticket."""

    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    REFUSED = "refused"
    OVER = "over"


class Ticket:
    """One request's place."""

    __slots__ = (
        "arrived_s", "counts_from_s", "deadline_s", "is_without_worker", "lane", "number", "outage_before_s",
        "started_s", "state", "tenant", "worker_wait_s",
    )  # fmt: skip

    def __init__(
        self,
        tenant: TenantState,
        lane: str,
        now_s: float,
        deadline_s: float,
        head_start_s: float = 0.0,
        worker_wait_s: float = math.inf,
    ) -> None:
        self.tenant = tenant
        self.lane = lane
        self.arrived_s = now_s
        self.counts_from_s = now_s - head_start_s
        """Its place among those of its tenant."""
        self.deadline_s = deadline_s
        """A ticket that still waits then is refused; later by the time for which its lane had no slots."""
        self.worker_wait_s = worker_wait_s
        """A ticket is refused when its lane has had no slots for so long while it waited."""
        self.outage_before_s = 0.0
        """`Lane.outage_s` when it came."""
        self.is_without_worker = False
        """It was refused in a lane without slots."""
        self.started_s = 0.0
        self.state = State.NEW
        self.number = 0

    def __repr__(self) -> str:
        return f"Ticket({self.tenant.name} {self.number} {self.state.name})"


class Lane:
    """The slots of one model."""

    __slots__ = (
        "outage_since_s", "past_outages_s", "queues", "running", "running_of", "service_s", "slots", "turn",
        "turn_of", "waiting",
    )  # fmt: skip

    def __init__(self) -> None:
        self.slots = 0
        self.outage_since_s = math.nan
        """Since when there are no slots; not a number while there are some."""
        self.past_outages_s = 0.0
        self.running = 0
        self.running_of: defaultdict[TenantState, int] = defaultdict(int)
        self.queues: dict[TenantState, list[Ticket]] = {}
        self.waiting = 0
        self.service_s = 1.0
        """Smoothed time that a request keeps its slot."""
        self.turn = 0.0
        """The highest turn that was taken."""
        self.turn_of: dict[TenantState, float] = {}
        """A tenant's next turn, while requests wait. A tenant that was away does not catch up."""

    def start(self, tenant: TenantState) -> None:
        """A request of the tenant runs in the lane from now on; `FairQueue.end` is due when it is over."""
        self.running += 1
        self.running_of[tenant] += 1
        tenant.running += 1

    def resize(self, slots: int, now_s: float) -> None:
        """The number of slots is now this one."""
        if slots and not math.isnan(self.outage_since_s):
            self.past_outages_s += now_s - self.outage_since_s
            self.outage_since_s = math.nan
        elif not slots and math.isnan(self.outage_since_s):
            self.outage_since_s = now_s
        self.slots = slots

    def outage_s(self, now_s: float) -> float:
        """The time without slots, added up. Only its growth while a ticket waits has a meaning."""
        if math.isnan(self.outage_since_s):
            return self.past_outages_s
        return self.past_outages_s + now_s - self.outage_since_s

    def late(self, now_s: float) -> list[Ticket]:
        """The tickets whose time is over."""
        outage_s = self.outage_s(now_s)
        waiting = [ticket for queue in self.queues.values() for ticket in queue]
        if self.slots:
            return [t for t in waiting if t.deadline_s + outage_s - t.outage_before_s <= now_s]
        return [t for t in waiting if outage_s - t.outage_before_s >= t.worker_wait_s]

    def next(self) -> Ticket | None:
        """The ticket that gets a free slot; None if no tenant may run more."""
        best: Ticket | None = None
        best_rank = (0.0, 0.0, 0)
        for tenant, queue in self.queues.items():
            if tenant.is_free:
                share = self.running_of.get(tenant, 0) / tenant.limits.weight
                rank = (share, max(self.turn, self.turn_of.get(tenant, 0.0)), queue[0].number)
                if best is None or rank < best_rank:
                    best, best_rank = queue[0], rank
        return best


def _put(queue: list[Ticket], ticket: Ticket) -> None:
    """Behind those that count from the same moment or an earlier one."""
    if not queue or queue[-1].counts_from_s <= ticket.counts_from_s:
        queue.append(ticket)
    else:
        insort_right(queue, ticket, key=attrgetter("counts_from_s"))


class FairQueue:
    """All lanes."""

    def __init__(self, queue_length: int) -> None:
        self.queue_length = queue_length
        self._lanes: dict[str, Lane] = {}
        self._numbers = 0
        self.waiting = 0
        """Tickets WAITING, of all lanes."""

    def free_lane(self, name: str, tenant: TenantState, slots: int) -> Lane | None:
        """The lane in which a request of the tenant may `start` at once: nobody waits, and nothing keeps it
        from that. None: it needs a ticket. `slots`: those of its lane now.
        """
        lane = self._lanes.get(name)
        if lane is None or lane.slots != slots or lane.running >= slots or lane.waiting:
            return None
        if tenant.limits.concurrency and not tenant.is_free:
            return None
        return lane

    def lane(self, ticket: Ticket) -> Lane:
        """The lane of a ticket that has arrived."""
        return self._lanes[ticket.lane]

    def end(self, lane: Lane, tenant: TenantState, started_s: float, now_s: float) -> list[Ticket]:
        """A request that ran in the lane is over."""
        lane.running -= 1
        lane.running_of[tenant] -= 1
        tenant.running -= 1
        lane.service_s += _SMOOTHING * (now_s - started_s - lane.service_s)
        return self._start_others(lane, tenant, now_s) if self.waiting else []

    def _start_others(self, lane: Lane, tenant: TenantState, now_s: float) -> list[Ticket]:
        started = self._fill(lane, now_s)
        if tenant.limits.concurrency and tenant.waiting:
            for other in self._lanes.values():  # its own limit may have held it back in another lane
                started += self._fill(other, now_s)
        return started

    def arrive(self, ticket: Ticket, slots: int, now_s: float) -> list[Ticket]:
        """A NEW ticket; `slots`: those of its lane now."""
        self._numbers += 1
        ticket.number = self._numbers
        lane = self._lanes.get(ticket.lane)
        if lane is None:
            lane = self._lanes[ticket.lane] = Lane()
        if lane.slots != slots or not slots:
            lane.resize(slots, now_s)
        ticket.outage_before_s = lane.outage_s(now_s)
        tenant = ticket.tenant
        if lane.running < slots and tenant.is_free and tenant not in lane.queues:
            self._start(lane, ticket, now_s)
            return [ticket]
        changed: list[Ticket] = []
        if lane.waiting >= self.queue_length:
            changed = self._make_room(lane, ticket)
            if not changed:
                ticket.state, ticket.is_without_worker = State.REFUSED, not slots
                return [ticket]
        if not lane.waiting:
            running = lane.running_of.items()
            lane.turn_of = {one: lane.turn + count / one.limits.weight for one, count in running}
        ticket.state = State.WAITING
        _put(lane.queues.setdefault(tenant, []), ticket)
        tenant.waiting += 1
        lane.waiting += 1
        self.waiting += 1
        return changed + self._fill(lane, now_s)

    def leave(self, ticket: Ticket, now_s: float) -> list[Ticket]:
        """A ticket's request is over, in any state and however it ended."""
        lane = self._lanes.get(ticket.lane)
        state, ticket.state = ticket.state, State.OVER
        if lane is not None and state is State.RUNNING:
            return self.end(lane, ticket.tenant, ticket.started_s, now_s)
        if lane is not None and state is State.WAITING:
            self._take_out(lane, ticket)
        return []

    def resize(self, name: str, slots: int, now_s: float) -> list[Ticket]:
        """Change a lane's number of slots. Running requests stay."""
        lane = self._lanes.get(name)
        if lane is None:
            return []
        lane.resize(slots, now_s)
        return self._fill(lane, now_s)

    def expire(self, now_s: float) -> list[Ticket]:
        """Refuse the tickets that wait past their deadlines, or too long for a worker."""
        late = [ticket for lane in self._lanes.values() if lane.queues for ticket in lane.late(now_s)]
        for ticket in late:
            self._refuse(ticket)
        return late

    def retry_after_s(self, name: str) -> float:
        """When a refused request can try again: about when the queue is worked off."""
        lane = self._lanes.get(name)
        if lane is None or not lane.slots:
            return 1.0
        waiting = sum(map(len, lane.queues.values()))
        return min(MAX_RETRY_AFTER_S, waiting * lane.service_s / lane.slots)

    def next_slot_s(self, name: str, slots: int) -> float:
        """About how long it takes until a slot of the lane is free; 0: one is, or nobody knows."""
        lane = self._lanes.get(name)
        if lane is None or lane.running < slots or not slots:
            return 0.0
        return lane.service_s / slots

    def held_back(self, tenant: TenantState) -> int:
        """Requests of the tenant that would run now if its concurrency were larger."""
        return sum(
            max(0, min(len(lane.queues[tenant]), lane.slots - lane.running))
            for lane in self._lanes.values()
            if tenant in lane.queues
        )

    @property
    def busy_lanes(self) -> list[str]:
        """Lanes with waiting tickets."""
        return [name for name, lane in self._lanes.items() if lane.queues]

    def _start(self, lane: Lane, ticket: Ticket, now_s: float) -> None:
        tenant = ticket.tenant
        ticket.state = State.RUNNING
        ticket.started_s = now_s
        lane.start(tenant)
        if lane.waiting:
            lane.turn = max(lane.turn, lane.turn_of.get(tenant, 0.0))
            lane.turn_of[tenant] = lane.turn + 1.0 / tenant.limits.weight

    def _fill(self, lane: Lane, now_s: float) -> list[Ticket]:
        started = []
        while lane.running < lane.slots and (ticket := lane.next()) is not None:
            self._start(lane, ticket, now_s)
            self._take_out(lane, ticket)
            started.append(ticket)
        return started

    def _make_room(self, lane: Lane, ticket: Ticket) -> list[Ticket]:
        """Refuse the last ticket of the tenant that waits most. If that is the newcomer's own tenant, it is
        the newcomer, unless that stands before the last one.
        """
        queues, newcomer = lane.queues, ticket.tenant
        greedy = max(queues, key=lambda t: (len(queues[t]) / t.limits.weight, t.name), default=None)
        if greedy is None:
            return []
        waiting = len(queues.get(newcomer, ())) + 1
        if waiting / newcomer.limits.weight > len(queues[greedy]) / greedy.limits.weight:
            greedy = newcomer
        last = queues[greedy][-1] if greedy in queues else ticket
        if greedy is newcomer and last.counts_from_s <= ticket.counts_from_s:
            return []
        self._refuse(last)
        return [last]

    def _refuse(self, ticket: Ticket) -> None:
        lane = self._lanes[ticket.lane]
        self._take_out(lane, ticket)
        ticket.state, ticket.is_without_worker = State.REFUSED, not lane.slots

    def _take_out(self, lane: Lane, ticket: Ticket) -> None:
        queue = lane.queues[ticket.tenant]
        if queue[0] is ticket:
            del queue[0]
        else:
            queue.remove(ticket)
        if not queue:
            del lane.queues[ticket.tenant]
        ticket.tenant.waiting -= 1
        lane.waiting -= 1
        self.waiting -= 1

    def check(self) -> None:
        """Raises AssertionError when counts do not agree; for tests."""
        assert self.waiting == sum(len(q) for lane in self._lanes.values() for q in lane.queues.values())
        for lane in self._lanes.values():
            assert lane.waiting == sum(map(len, lane.queues.values())) <= self.queue_length
            assert lane.running == sum(lane.running_of.values())
            assert min(lane.running_of.values(), default=0) >= 0
            assert all(lane.queues.values())
            assert lane.running >= lane.slots or lane.next() is None, "a slot is free while a ticket waits"
