"""In which order a node serves its clients' requests. asyncio, in the node's loop.

While nothing waits and a namespace is within its rates, a request is served in the very call that read it;
this costs one look at a set. A *turn* is one round of the event loop: first all sockets with something to
read, then the calls that were asked for. Once a turn has served `TURN_KEYS`, and wherever a rate is exceeded,
requests wait in the fair queue (fair_queue.py), from which each turn serves as many again. So a client that
sends without end delays another by one turn, and not by all that it has sent. A request is never divided: the
protocol bounds it (MAX_PAGES, MAX_BATCH_BYTES), and one that is larger than a turn is a turn of its own.

Some requests never wait: those that free something or end what was granted (Commit, Abort, Release, Discard),
those that the node lives by (Ping, messages between nodes), and rare ones (opening, status, administration).
They are bounded by what was granted, or by `FRAMES_A_TURN` of each connection, and those that free or end
something are charged to their namespace. After a large one its connection is read from again in the next
turn.

When a namespace's queue is full, the connection whose request filled it is not read from until half of the
queue is gone: TCP tells the client's sends to wait. A request that waited too long is answered with a Fault
`overloaded`, so that its connection, whose client may be gone, is read from again.

Requests of other nodes are not the tenants': they wait in a flow of their own, without limits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final, Protocol, TypeAlias, cast

from pdserve.kvpool.core.events import Event, Received
from pdserve.kvpool.core.state import NodeState
from pdserve.kvpool.node.serving.fair_queue import MAX_QUEUED_S, FairQueue
from pdserve.kvpool.node.timers import call_at
from pdserve.kvpool.protocol import messages as m

logger = logging.getLogger(__name__)

TURN_KEYS: Final = 32  # about 0.1 ms of a node's time
REQUEST_KEYS: Final = 4  # what a request costs beside its keys, in keys
WIPED_AS_A_KEY: Final = 256 * 1024  # bytes
PEERS: Final = 0  # the flow of the other nodes; namespaces are numbered from 1
SWEEP_S: Final = 1.0  # how often requests are looked for that have waited too long

Queueable: TypeAlias = m.Exists | m.Wait | m.Get | m.Reserve
QUEUEABLE: Final = frozenset((m.Exists, m.Wait, m.Get, m.Reserve))
Item: TypeAlias = tuple[int, Queueable]  # connection, request


class Client(Protocol):
    """What is asked of a connection."""

    number: int

    def send(self, message: m.Reply) -> None: ...

    def pause(self) -> None:
        """Read nothing more until `resume`."""
        ...

    def resume(self) -> None:
        """Read again from the next round of the loop on."""
        ...


class Serving:
    """The order of requests. `feed` decides and acts at once."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        state: NodeState,
        feed: Callable[[Event], None],
        clients: Mapping[int, Client],
    ) -> None:
        self.overloaded = 0  # requests that waited too long
        self._loop = loop
        self._state = state
        self._feed = feed
        self._clients = clients
        self._wiping: tuple[type, ...] = (m.Reserve, m.Get) if state.tiers.any else (m.Reserve,)
        self._queue: FairQueue[Item] = FairQueue()
        self._revision = -1
        self._watched: Item | None = None  # the request being served: what it is not given does not count
        self._watched_flow = PEERS
        # reads of flows with a rate that wait for pages from a tier, by connection and id; no more than that
        self._loading: dict[tuple[int, int], tuple[int, m.Get]] = {}
        self._turn_keys = 0  # served in this turn
        self._turn: asyncio.Handle | None = None  # the next one
        self._timer: asyncio.Handle | None = None
        self._sweeper: asyncio.Handle | None = None
        self._paused: dict[int, set[int]] = {}  # flow -> connections that wait for room in its queue

    def received(self, client: Client, message: m.Request) -> None:
        """A request of a client."""
        if type(message) not in QUEUEABLE:
            if isinstance(message, m.Commit | m.Abort | m.Discard | m.Release):
                self._end(client, message)
            else:
                self._feed(Received(client.number, message))
            return
        request = cast(Queueable, message)  # an isinstance of four costs as much as all the rest here
        if self._revision != self._state.administration.revision:
            self._configure()
        keys = self._keys_of(request)
        if self._turn is None:
            self._turn_keys = 0
            self._turn = self._loop.call_soon(self._next_turn)
        elif self._turn_keys + keys > TURN_KEYS:
            self._wait(client, request)
            return
        queue = self._queue
        if queue.ready or request.namespace in queue.limited or keys > TURN_KEYS:
            self._wait(client, request)
            return
        self._turn_keys += keys + REQUEST_KEYS
        self._feed(Received(client.number, request))

    def answered(self, connection: int, reply: m.Reply) -> None:
        """A request was answered: the bytes that it was not given count for nothing."""
        if self._watched is not None:
            asker, request = self._watched
            answers = isinstance(reply, m.Got | m.Reserved | m.Fault) and reply.id == request.id
            if connection == asker and answers and isinstance(request, m.Get | m.Reserve):
                self._watched = None
                self._give_back(self._watched_flow, request, reply)
                return
        if self._loading and isinstance(reply, m.Got | m.Fault):
            loading = self._loading.pop((connection, reply.id), None)
            if loading is not None:
                self._give_back(*loading, reply)

    def _give_back(self, flow: int, request: m.Get | m.Reserve, reply: m.Reply) -> None:
        given = 0
        if isinstance(reply, m.Got):
            given = sum(pin.status == m.HIT for pin in reply.pins)
        elif isinstance(reply, m.Reserved):
            given = sum(grant.status == m.GRANTED for grant in reply.grants)
        self._queue.give_back(flow, (len(request.keys) - given) * self._page_bytes(request))

    def gone(self, connection: int) -> None:
        """A client disconnected."""
        if self._queue.waiting:
            self._queue.remove(lambda item: item[0] == connection)
        for paused in self._paused.values():
            paused.discard(connection)
        for asked in [asked for asked in self._loading if asked[0] == connection]:
            del self._loading[asked]

    def counters(self) -> dict[str, int]:
        """What happened, for status and metrics."""
        return {
            "requests_waiting": self._queue.waiting,
            "requests_held_back": self._queue.held_back,
            "requests_overloaded": self.overloaded,
        }

    def close(self) -> None:
        """Serve nothing that still waits."""
        for handle in (self._turn, self._timer, self._sweeper):
            if handle is not None:
                handle.cancel()

    # --- waiting

    def _wait(self, client: Client, message: Queueable) -> None:
        """Serve the request by its flow's rates now, or let it wait."""
        state = self._state
        session = state.sessions.get(client.number)
        if session is None:
            return  # it was closed
        if message.namespace not in state.namespaces or state.may_not(session, message):
            self._feed(Received(client.number, message))  # costs the namespace nothing: it is refused
            return
        flow = PEERS if session.peer else state.namespaces.model(message.namespace)
        now_s, keys, size_bytes = self._loop.time(), len(message.keys), self._size_bytes(message)
        fits = not self._turn_keys or self._turn_keys + self._keys_of(message) <= TURN_KEYS
        if fits and self._queue.admit(flow, keys, size_bytes, now_s):
            self._serve(flow, client.number, message)
            return
        if not self._queue.put(flow, (client.number, message), keys, size_bytes, now_s):
            self._paused.setdefault(flow, set()).add(client.number)
            client.pause()
        self._arm()

    def _end(self, client: Client, message: m.Commit | m.Abort | m.Discard | m.Release) -> None:
        """Serve what ends or frees something: at once, and for the flow's account. After a large one its
        connection is read from again in the next turn.
        """
        flow = self._flow_of(message) if self._queue.ready else None
        self._feed(Received(client.number, message))
        pages = len(message.keys if isinstance(message, m.Discard) else message.slots)
        if flow is not None:
            self._queue.charge(flow, pages)
        if pages > TURN_KEYS:
            client.pause()
            client.resume()

    def _serve(self, flow: int, connection: int, message: Queueable) -> None:
        self._turn_keys += self._keys_of(message) + REQUEST_KEYS
        self._watched, self._watched_flow = (connection, message), flow
        self._feed(Received(connection, message))
        if self._watched is not None and isinstance(message, m.Get) and flow in self._queue.limited:
            self._loading[connection, message.id] = flow, message
        self._watched = None

    def _next_turn(self) -> None:
        self._turn = None
        if self._queue.waiting:
            self._run()

    def _run(self) -> None:
        """Serve one turn's worth of what waits."""
        if self._turn is None:
            self._turn_keys = 0
        while self._turn_keys < TURN_KEYS:
            queued = self._queue.next(self._loop.time())
            if queued is None:
                break
            connection, message = queued.item
            self._serve(queued.flow, connection, message)
        for flow in [flow for flow in self._paused if self._queue.has_room(flow)]:
            for connection in self._paused.pop(flow):
                if connection in self._clients:
                    self._clients[connection].resume()
        self._arm()

    def _arm(self) -> None:
        """Come back for what waits: in the next turn, or when the first rate allows."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._queue.ready:
            if self._turn is None:
                self._turn = self._loop.call_soon(self._next_turn)
        elif self._queue.waiting:
            self._timer = call_at(self._loop, self._queue.next_time_s(), self._run)
        if self._queue.waiting and self._sweeper is None:
            self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        self._sweeper = None
        for queued in self._queue.expired(self._loop.time()):
            self.overloaded += 1
            connection, message = queued.item
            client = self._clients.get(connection)
            if client is not None:
                client.send(self._overloaded(message))
        self._run()

    def _overloaded(self, message: Queueable) -> m.Fault:
        text = f"node {self._state.name}: the request waited for {MAX_QUEUED_S:.0f} s"
        if message.namespace in self._state.namespaces:
            name = self._state.namespaces[message.namespace].name
            text += f": namespace '{name}' asks for more than its rates, or its share of a busy node, allow"
        return m.Fault(message.id, "overloaded", text)

    # --- settings

    def _configure(self) -> None:
        administration, queue, now_s = self._state.administration, self._queue, self._loop.time()
        self._revision = administration.revision
        known = self._state.namespaces
        for number in known.numbers:
            settings = known.settings(number)
            queue.configure(
                number,
                weight=settings.weight,
                operations_s=settings.operations_s,
                bytes_s=settings.bytes_s,
                now_s=now_s,
            )
        for number in queue.numbers:
            if number not in known and number != PEERS:
                queue.forget(number, now_s)

    def _flow_of(self, message: m.Commit | m.Abort | m.Discard | m.Release) -> int | None:
        """The flow that pays for what does not wait; None where there is none."""
        namespaces, number = self._state.namespaces, 0
        if isinstance(message, m.Discard):
            number = message.namespace
        elif message.slots and 0 <= message.slots[0] < self._state.store.slots.slots:
            number = self._state.store.facts.namespace[message.slots[0]]
        return namespaces.model(number) if number in namespaces else None

    def _keys_of(self, message: Queueable) -> int:
        """What serving it costs, in keys: those it has, and more for slots that may have to be wiped."""
        keys = len(message.keys)
        if type(message) in self._wiping:
            keys += self._size_bytes(message) // WIPED_AS_A_KEY
        return keys

    def _size_bytes(self, message: Queueable) -> int:
        return len(message.keys) * self._page_bytes(message) if isinstance(message, m.Get | m.Reserve) else 0

    def _page_bytes(self, message: m.Get | m.Reserve) -> int:
        """There are no larger pages than a slab, whatever was asked for."""
        return min(sum(message.segment_bytes), self._state.store.slots.slab_bytes)
