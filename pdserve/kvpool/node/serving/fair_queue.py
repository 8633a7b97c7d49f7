"""Who is served next when several namespaces want more than there is. Pure.

Two rules, for each request of a namespace (a *flow*) in turn:

**Rate.** A flow may have two token buckets, for operations and for bytes (Turner, "New directions in
communications", 1986). A bucket fills at its rate up to what fills in `BURST_S`; a request takes its cost out
and waits until there is enough. A request larger than the whole bucket waits until the bucket is full, and
leaves a debt. So over any time t a flow gets at most rate x (t + BURST_S), or one request more than rate x t
where that is larger. What turns out not to have been needed (misses) is given back.

**Share.** Flows that wait and may go are served by start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM
1996). A request's start tag is the larger of the virtual time and the finish tag of its flow's request
before; its finish tag is cost / weight later; the smallest start tag is served, and the virtual time is that
tag. Backlogged flows get service in proportion to their weights, to within one request each, whatever sizes
they ask in; a flow that was idle is served before any backlogged neighbour's next; nothing is idle while
something may go. Time at which nothing waits is not accounted for: when the queue is empty the virtual time
takes the largest finish tag, so no flow pays later for time that no other flow wanted.

The cost of a request is KEY_COST_BYTES for each key and one for each byte asked for: what the node spends on
a key, by the time in which memory moves so many bytes.

Queues are bounded, in requests and in keys, for each flow and in keys for all flows: `put` says when one is
full, and its clients must then wait to be read from. What has waited for `MAX_QUEUED_S` is given up
(`expired`): its client has done so before.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

T = TypeVar("T")

BURST_S: Final = 1.0
KEY_COST_BYTES: Final = 64 * 1024  # 6 us of a node's time for a key, at 10 GB/s
MAX_QUEUED: Final = 256  # requests of one flow; then its clients are not read from
MAX_QUEUED_KEYS: Final = 16_384  # of one flow; a key takes about 70 bytes
MAX_QUEUED_KEYS_OF_ALL: Final = 262_144
MAX_TAG: Final = 1e12
INFINITE: Final = float("inf")
MAX_QUEUED_S: Final = 5.0  # the clients' own time-out for a batch


class Bucket:
    """Tokens that come at `rate` a second, up to BURST_S of them. A rate of 0 is no limit."""

    __slots__ = ("_at_s", "_level", "capacity", "rate")

    def __init__(self, rate: float, now_s: float) -> None:
        self.rate = rate
        self.capacity = rate * BURST_S
        self._level = self.capacity
        self._at_s = now_s

    def ready_at_s(self, amount: float, now_s: float) -> float:
        """When so much can be taken; now or earlier if it can be."""
        if not self.rate:
            return now_s
        self._fill(now_s)
        return now_s + (min(amount, self.capacity) - self._level) / self.rate

    def take(self, amount: float) -> None:
        """Give a negative amount back."""
        if self.rate:
            self._level = min(self.capacity, self._level - amount)

    def change(self, rate: float, now_s: float) -> None:
        """Another rate from now on; a debt stays."""
        if rate != self.rate:
            if self.rate:
                self._fill(now_s)
                level = self._level
            else:
                level = rate * BURST_S
            self.rate, self.capacity, self._at_s = rate, rate * BURST_S, now_s
            self._level = min(level, self.capacity)

    def _fill(self, now_s: float) -> None:
        self._level = min(self.capacity, self._level + self.rate * max(0.0, now_s - self._at_s))
        self._at_s = max(self._at_s, now_s)


@dataclass(slots=True)
class Queued(Generic[T]):
    """A request in a queue."""

    item: T
    flow: int
    keys: int  # it takes so many of the flow's operations and bytes
    size_bytes: int
    since_s: float

    @property
    def cost(self) -> float:
        """What it uses of its flow's share."""
        return self.keys * KEY_COST_BYTES + self.size_bytes


class Flow(Generic[T]):
    """One namespace's requests that wait, and what it may have."""

    __slots__ = ("bytes", "entry", "finish", "keys", "number", "operations", "queue", "weight")

    def __init__(self, number: int, now_s: float) -> None:
        self.number = number
        self.weight = 1.0
        self.operations = Bucket(0.0, now_s)
        self.bytes = Bucket(0.0, now_s)
        self.finish = 0.0  # tag of its last request, and the start tag of its next while that is ready
        self.queue: deque[Queued[T]] = deque()
        self.keys = 0  # of the requests in the queue
        self.entry = 0  # which entry of a heap is the flow's; 0: none

    @property
    def limited(self) -> bool:
        return bool(self.operations.rate or self.bytes.rate)

    def ready_at_s(self, keys: int, size_bytes: int, now_s: float) -> float:
        return max(self.operations.ready_at_s(keys, now_s), self.bytes.ready_at_s(size_bytes, now_s))

    def take(self, keys: int, size_bytes: int) -> None:
        self.operations.take(keys)
        self.bytes.take(size_bytes)


class FairQueue(Generic[T]):
    """Requests of all flows. A flow with waiting requests has one entry in one of two heaps: `ready` by start
    tag, or `held` by the time at which its buckets will do. An entry that is not its flow's any more is
    passed over.
    """

    def __init__(
        self,
        max_queued: int = MAX_QUEUED,
        max_keys: int = MAX_QUEUED_KEYS,
        max_keys_of_all: int = MAX_QUEUED_KEYS_OF_ALL,
    ) -> None:
        self.waiting = 0  # requests
        self.waiting_keys = 0
        self._max_keys = max_keys
        self._max_keys_of_all = max_keys_of_all
        self.held_back = 0  # requests that had to wait for their flow's rate, ever
        self._max_queued = max_queued
        self._flows: dict[int, Flow[T]] = {}
        self.limited: set[int] = set()  # flows with a rate
        self._virtual = 0.0
        self._largest_finish = 0.0
        self._entries = 0
        # empty when nothing waits that may go; start tag, -entry (of equal tags the last comer's first), flow
        self.ready: list[tuple[float, int, int]] = []
        self._held: list[tuple[float, int, int]] = []  # ready at, entry, flow

    # --- settings

    def configure(
        self, number: int, *, weight: float, operations_s: float, bytes_s: float, now_s: float
    ) -> None:
        """What a flow may have, from now on."""
        flow = self._flow(number, now_s)
        flow.weight = weight
        flow.operations.change(operations_s, now_s)
        flow.bytes.change(bytes_s, now_s)
        if flow.limited:
            self.limited.add(number)
        else:
            self.limited.discard(number)
        if flow.queue:
            self._activate(flow, now_s)

    def forget(self, number: int, now_s: float) -> None:
        """The flow has no settings any more; what waits is served."""
        self.configure(number, weight=1.0, operations_s=0.0, bytes_s=0.0, now_s=now_s)
        if not self._flows[number].queue:
            del self._flows[number]

    @property
    def numbers(self) -> list[int]:
        """Of the flows known."""
        return list(self._flows)

    # --- in

    def admit(self, number: int, keys: int, size_bytes: int, now_s: float) -> bool:
        """Whether a request may go at once, because nothing that may go waits, and its flow has the tokens,
        which are taken. Else it is to be `put`.
        """
        if self.ready:
            return False
        if number not in self.limited:
            return True
        flow = self._flows[number]
        if flow.queue or flow.ready_at_s(keys, size_bytes, now_s) > now_s:
            return False
        flow.take(keys, size_bytes)
        return True

    def put(self, number: int, item: T, keys: int, size_bytes: int, now_s: float) -> bool:
        """Let a request wait. False when its flow's queue is full now: read no more from that client until
        `has_room`.
        """
        flow = self._flow(number, now_s)
        flow.queue.append(Queued(item, number, keys, size_bytes, now_s))
        self._count(flow, 1, keys)
        if len(flow.queue) == 1:
            self._activate(flow, now_s)
        has_room = len(flow.queue) < self._max_queued and flow.keys < self._max_keys
        return has_room and self.waiting_keys < self._max_keys_of_all

    def has_room(self, number: int) -> bool:
        """Whether clients of the flow may be read from again."""
        flow = self._flows.get(number)
        if flow is None or not flow.queue:
            return True
        has_room = len(flow.queue) <= self._max_queued // 2 and flow.keys <= self._max_keys // 2
        return has_room and self.waiting_keys <= self._max_keys_of_all // 2

    def charge(self, number: int, keys: int) -> None:
        """A request that does not wait was served: it counts towards the flow's share."""
        flow = self._flows.get(number)
        if flow is not None and self.ready:
            self._advance(flow, keys * KEY_COST_BYTES)

    # --- out

    def next(self, now_s: float) -> Queued[T] | None:
        """The request to serve now, whose cost is taken; None when none may go."""
        while self._held and self._held[0][0] <= now_s:
            _, entry, number = heapq.heappop(self._held)
            flow = self._flows.get(number)
            if flow is not None and flow.entry == entry:
                flow.entry = 0
                if flow.queue:
                    self._activate(flow, now_s)
        while self.ready:
            tag, entry, number = self.ready[0]
            flow = self._flows.get(number)
            if flow is None or flow.entry != -entry:
                heapq.heappop(self.ready)
            elif not flow.queue:  # what it was for has gone
                heapq.heappop(self.ready)
                flow.entry = 0
            elif tag < flow.finish:  # it was charged since
                heapq.heapreplace(self.ready, (flow.finish, entry, number))
            else:
                heapq.heappop(self.ready)
                return self._serve(flow, now_s)
        self._rest()
        return None

    def give_back(self, number: int, size_bytes: int) -> None:
        """So many bytes that a request of the flow asked for were not needed."""
        flow = self._flows.get(number)
        if flow is not None:
            flow.bytes.take(-size_bytes)

    def next_time_s(self) -> float:
        """When to call `next` again though nothing was put and nothing is ready; infinite: never."""
        return self._held[0][0] if self._held else INFINITE

    def expired(self, now_s: float) -> list[Queued[T]]:
        """Requests that have waited too long; they wait no more."""
        until_s = now_s - MAX_QUEUED_S
        gone = []
        for flow in self._flows.values():
            while flow.queue and flow.queue[0].since_s <= until_s:
                gone.append(flow.queue.popleft())
                self._count(flow, -1, -gone[-1].keys)
        return gone

    def remove(self, unwanted: Callable[[T], bool]) -> list[Queued[T]]:
        """Forget requests, of a client that went, say; those, in the order of each flow's queue."""
        gone = []
        for flow in self._flows.values():
            removed = [queued for queued in flow.queue if unwanted(queued.item)]
            if removed:
                flow.queue = deque(queued for queued in flow.queue if not unwanted(queued.item))
                gone += removed
                self._count(flow, -len(removed), -sum(queued.keys for queued in removed))
        return gone

    # --- inside

    def _count(self, flow: Flow[T], requests: int, keys: int) -> None:
        self.waiting += requests
        self.waiting_keys += keys
        flow.keys += keys

    def _flow(self, number: int, now_s: float) -> Flow[T]:
        flow = self._flows.get(number)
        if flow is None:
            flow = self._flows[number] = Flow(number, now_s)
        return flow

    def _activate(self, flow: Flow[T], now_s: float) -> None:
        """The flow's first request waits: for its turn, or for tokens. An earlier entry is void."""
        head = flow.queue[0]
        self._entries += 1
        flow.entry = self._entries
        ready_at_s = flow.ready_at_s(head.keys, head.size_bytes, now_s)
        if ready_at_s > now_s:
            self.held_back += 1
            heapq.heappush(self._held, (ready_at_s, flow.entry, flow.number))
        else:
            flow.finish = max(flow.finish, self._virtual)
            heapq.heappush(self.ready, (flow.finish, -flow.entry, flow.number))

    def _serve(self, flow: Flow[T], now_s: float) -> Queued[T]:
        queued = flow.queue.popleft()
        self._count(flow, -1, -queued.keys)
        flow.entry = 0
        flow.take(queued.keys, queued.size_bytes)
        self._virtual = flow.finish
        self._advance(flow, queued.cost)
        if flow.queue:
            self._activate(flow, now_s)
        return queued

    def _advance(self, flow: Flow[T], cost: float) -> None:
        flow.finish = max(flow.finish, self._virtual) + cost / flow.weight
        self._largest_finish = max(self._largest_finish, flow.finish)

    def _rest(self) -> None:
        """Nothing that may go waits: what was used until now is forgotten."""
        self._virtual = self._largest_finish
        if not self.waiting and self._virtual > MAX_TAG:  # far from where sums lose bits
            self._virtual = self._largest_finish = 0.0
            for flow in self._flows.values():
                flow.finish = 0.0

    def check(self) -> None:
        """Assert that every waiting request will be served. For tests."""
        assert self.waiting == sum(len(flow.queue) for flow in self._flows.values())
        assert self.waiting_keys == sum(flow.keys for flow in self._flows.values())
        entries = {-entry for _, entry, _ in self.ready} | {entry for _, entry, _ in self._held}
        for flow in self._flows.values():
            assert not flow.queue or flow.entry in entries
