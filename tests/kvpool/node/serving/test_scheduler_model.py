"""Whatever clients send and whenever: every request is answered once, in order, in its turn, by its rate."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kvpool.node.serving.fair_queue import BURST_S, MAX_QUEUED_S
from pdserve.kvpool.node.serving.scheduler import TURN_KEYS
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import NamespaceSettings
from tests.support.kvpool.node_model import KIB, key
from tests.support.kvpool.served import Client, Served

RATE = 64.0  # keys a second of namespace b
BYTES_RATE = 256.0 * KIB  # bytes a second of namespace c
PAGE_BYTES = 4 * KIB
WHO = ("a", "a", "b", "b", "c", "peer")
KEYS = [key(n) for n in range(m.MAX_PAGES)]

steps = st.lists(
    st.one_of(
        st.tuples(st.just("exists"), st.integers(0, 5), st.integers(1, m.MAX_PAGES)),
        st.tuples(st.just("get"), st.integers(0, 5), st.integers(1, m.MAX_PAGES)),
        st.tuples(st.just("ping"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("turn"), st.just(0), st.just(0)),
        st.tuples(st.just("pass"), st.just(0), st.integers(1, 700)),
        st.tuples(st.just("go"), st.integers(0, 5), st.just(0)),
    ),
    max_size=60,
)


class Run:
    def __init__(self) -> None:
        rates = {"b": NamespaceSettings(operations_s=RATE), "c": NamespaceSettings(bytes_s=BYTES_RATE)}
        self.served = Served(12, **rates)
        found = [self.served.client("a" if who == "peer" else who, peer=who == "peer") for who in WHO]
        self.clients: list[Client] = [client for client, _ in found]
        self.namespaces = [number for _, number in found]
        self.asked: dict[int, list[tuple[int, str]]] = {client.number: [] for client in self.clients}
        self.sizes: dict[int, int] = {}  # by id of a request
        self.ids = 0
        self.keys_of_b = 0
        self.turn_keys: Counter[str] = Counter()  # by "rated": the limits do not concern peers
        self.began_s = self.served.loop.now_s

    def do(self, what: str, who: int, size: int) -> None:
        loop, client = self.served.loop, self.clients[who]
        if what == "turn":
            loop.turn()
        elif what == "pass":
            loop.pass_time(size / 1000)
        elif client.number not in self.served.clients:
            return
        elif what == "go":
            self.served.disconnect(client)
        elif not client.paused:
            self.ids += 1
            self.sizes[self.ids] = size
            self.asked[client.number].append((self.ids, what))
            self.served.serving.received(client, self.message(what, who, size))

    def message(self, what: str, who: int, size: int) -> m.Request:
        namespace = self.namespaces[who]
        if what == "ping":
            return m.Ping(self.ids)
        if what == "exists":
            return m.Exists(self.ids, namespace, KEYS[:size])
        return m.Get(self.ids, namespace, KEYS[:size], [PAGE_BYTES])

    def answered(self, who: int) -> list[int]:
        return [reply.id for reply in self.clients[who].sent]  # type: ignore[union-attr]

    def keys_answered(self, namespace: str) -> int:
        total = 0
        for who, name in enumerate(WHO):
            if name == namespace:
                kinds = dict(self.asked[self.clients[who].number])
                total += sum(
                    self.sizes[reply.id]  # type: ignore[union-attr]
                    for reply in self.clients[who].sent
                    if not isinstance(reply, m.Fault) and kinds[reply.id] != "ping"  # type: ignore[union-attr]
                )
        return total


def served_keys(run: Run) -> int:
    return sum(run.keys_answered(name) for name in ("a", "b", "c", "peer"))


@given(steps)
@settings(max_examples=60)
def test_every_request_is_answered_once_in_order_in_its_turn_and_by_its_rate(script: list[Any]) -> None:
    run = Run()
    serving, loop = run.served.serving, run.served.loop
    for what, who, size in script:
        before = served_keys(run)
        run.do(what, who, size)
        serving._queue.check()
        if what in ("turn", "pass"):  # a turn, and a timer's at most
            assert served_keys(run) - before <= 2 * (TURN_KEYS + m.MAX_PAGES)
        # misses take no bytes, so keys bound namespace b only
        elapsed_s = loop.now_s - run.began_s
        assert run.keys_answered("b") <= max(RATE * (elapsed_s + BURST_S), RATE * elapsed_s + m.MAX_PAGES) + 1
    for _ in range(400):
        loop.pass_time(0.5)
        loop.turns()
        run.served.node.now_s = loop.now_s
        if not serving.counters()["requests_waiting"]:
            break
    assert serving.counters()["requests_waiting"] == 0
    for who, client in enumerate(run.clients):
        asked = run.asked[client.number]
        if client.number not in run.served.clients:
            assert set(run.answered(who)) <= {number for number, _ in asked}
            continue
        assert not client.paused
        assert sorted(run.answered(who)) == [number for number, _ in asked], "once each"
        queued = [number for number, what in asked if what != "ping"]
        faults = {reply.id for reply in client.sent if isinstance(reply, m.Fault)}
        in_order = [number for number in run.answered(who) if number in set(queued) - faults]
        assert in_order == sorted(in_order)
        waited_s = loop.now_s - run.began_s
        assert not faults or waited_s >= MAX_QUEUED_S
