"""A node's state behind Serving, with a scripted loop. Used by the tests of the order of requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.kvpool.core.events import Action, Answer, Event, Received
from pdserve.kvpool.core.namespace_admin import Rules
from pdserve.kvpool.node.serving.scheduler import Serving
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import NamespaceSettings
from tests.support.kvpool.node_model import KIB, Node, key

KEYS = [key(n) for n in range(16)]


class Loop:
    """Of an event loop what Serving uses; time passes when told."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self._soon: list[Call] = []
        self._later: list[tuple[float, Call]] = []

    def time(self) -> float:
        return self.now_s

    def call_soon(self, function: Callable[[], None]) -> Call:
        self._soon.append(Call(function))
        return self._soon[-1]

    def call_at(self, when_s: float, function: Callable[[], None]) -> Call:
        call = Call(function)
        self._later.append((when_s, call))
        return call

    def call_later(self, delay_s: float, function: Callable[[], None]) -> Call:
        return self.call_at(self.now_s + delay_s, function)

    def turn(self) -> None:
        """One round: what was to be called soon, and what is due."""
        calls, self._soon = self._soon, []
        for call in calls:
            call.run()
        self.later()

    def later(self) -> None:
        """What is due."""
        due = [call for when_s, call in self._later if when_s <= self.now_s]
        self._later = [entry for entry in self._later if entry[0] > self.now_s]
        for call in due:
            call.run()

    def turns(self) -> None:
        """Until nothing is to be called soon."""
        for _ in range(1000):
            if not self._soon:
                return
            self.turn()
        raise AssertionError("it never ends")

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.turn()


class Call:
    def __init__(self, function: Callable[[], None]) -> None:
        self.run = function

    def cancel(self) -> None:
        self.run = lambda: None


class Client:
    def __init__(self, number: int) -> None:
        self.number = number
        self.paused = False
        self.pauses = 0
        self.sent: list[m.Reply] = []

    def send(self, message: m.Reply) -> None:
        self.sent.append(message)

    def pause(self) -> None:
        self.paused = True
        self.pauses += 1

    def resume(self) -> None:
        self.paused = False


class Served:
    """A node's state behind Serving; `order` is who was served, by connection, `actions` what the node did
    beside answering these.
    """

    def __init__(self, slabs: int = 4, node: Node | None = None, **settings: NamespaceSettings) -> None:
        self.node = node or Node(slabs, rules=Rules(named=settings))
        self.loop = Loop()
        self.order: list[int] = []
        self.actions: list[Action] = []
        self.clients: dict[int, Client] = {}
        self.serving = Serving(self.loop, self.node.state, self.feed, self.clients)  # type: ignore[arg-type]
        self._ids = 0

    def feed(self, event: Event) -> None:
        assert isinstance(event, Received)
        self.order.append(event.connection)
        for action in self.node.do(event):
            if not isinstance(action, Answer):
                self.actions.append(action)
                continue
            self.serving.answered(action.connection, action.message)
            if action.connection in self.clients:
                self.clients[action.connection].send(action.message)

    def connect(self, **connect: Any) -> Client:
        client = Client(self.node.connect(**connect))
        self.clients[client.number] = client
        return client

    def client(self, namespace: str, **connect: Any) -> tuple[Client, int]:
        """A connected client, and the number of its namespace."""
        client = self.connect(**connect)
        return client, self.node.open(client.number, namespace)

    def disconnect(self, client: Client, by_peer: bool = True) -> list[Action]:
        """As the node's shell does it."""
        del self.clients[client.number]
        self.serving.gone(client.number)
        return self.node.disconnect(client.number, by_peer)

    def ask(self, client: Client, namespace: int, keys: list[bytes] = KEYS) -> None:
        self._ids += 1
        self.serving.received(client, m.Exists(self._ids, namespace, keys))

    def get(
        self, client: Client, namespace: int, keys: list[bytes] = KEYS, page_bytes: int = 4 * KIB
    ) -> None:
        self._ids += 1
        self.serving.received(client, m.Get(self._ids, namespace, keys, [page_bytes]))
