"""The order of requests in a node: shares, rates, back-pressure; with a scripted loop, and for real."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path

import pytest

from pdserve.kvpool.core.events import ReserveRows
from pdserve.kvpool.core.tiering.tier_index import TierSpec
from pdserve.kvpool.node.config.node import PoolNodeConfig
from pdserve.kvpool.node.serving.fair_queue import MAX_QUEUED, MAX_QUEUED_S
from pdserve.kvpool.node.serving.request_split import (
    MAX_PARTS,
    PART_BYTES,
    PART_KEYS,
    Gathered,
    divide,
    part_keys,
    size,
)
from pdserve.kvpool.node.serving.scheduler import TURN_KEYS
from pdserve.kvpool.node.timers import CLOCK_STEP_S
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import NamespaceSettings, PutNamespace
from pdserve.kvpool.transports.control import ControlChannel, make_hello
from tests.support.kvpool.node_model import KIB, Node, key
from tests.support.kvpool.pools import ProcessPool, arena_dir, remove_arena
from tests.support.kvpool.served import KEYS, Client, Served


def test_requests_are_served_at_once_while_nothing_waits() -> None:
    served = Served()
    a, ns = served.client("a")
    for place in range(5):
        served.ask(a, ns, KEYS[:1])
        assert len(a.sent) == place + 1


def test_a_turn_serves_so_much_and_a_quiet_neighbour_comes_next() -> None:
    served = Served()
    loud, loud_ns = served.client("loud")
    quiet, quiet_ns = served.client("quiet")
    for _ in range(100):
        served.ask(loud, loud_ns)
    in_a_turn = len(served.order)
    assert in_a_turn * len(KEYS) <= TURN_KEYS
    served.ask(quiet, quiet_ns)
    assert not quiet.sent
    served.loop.turn()
    assert served.order[in_a_turn : in_a_turn + 2].count(quiet.number) == 1
    while len(served.order) < 101:
        before = len(served.order)
        served.loop.turn()
        assert before < len(served.order) <= before + TURN_KEYS // len(KEYS)


def test_a_busy_node_is_shared_by_weight() -> None:
    served = Served(a=NamespaceSettings(weight=3.0), b=NamespaceSettings(weight=1.0))
    a, a_ns = served.client("a")
    b, b_ns = served.client("b")
    for _ in range(100):
        served.ask(a, a_ns)
        served.ask(b, b_ns)
    at_once = len(served.order)
    for _ in range(10):
        served.loop.turn()
    order = served.order[at_once:]
    assert order.count(a.number) == pytest.approx(3 * order.count(b.number), abs=3)


# --- large requests, in parts

MANY = 4 * PART_KEYS + 7
MANY_KEYS = [key(n) for n in range(MANY)]
MANY_SLABS = MANY // 16 + 1


def reserve_many(served: Served, client: Client, namespace: int) -> list[m.Grant]:
    served.serving.received(client, m.Reserve(9000, namespace, MANY_KEYS, [4 * KIB]))
    served.loop.turns()
    reply = client.sent.pop()
    assert isinstance(reply, m.Reserved)
    assert reply.id == 9000
    return reply.grants


def test_what_came_up_from_a_tier_has_its_place_in_the_whole() -> None:
    request, ids = m.Get(1, 1, MANY_KEYS, [4 * KIB]), iter(range(-1, -9, -1))
    parts = divide(request, PART_KEYS, lambda: next(ids))
    gathered = Gathered(request, parts)
    for part in reversed(parts):
        pins = [m.Pin(m.HIT)] * len(part.keys)  # type: ignore[union-attr]
        got = gathered.add(m.Got(part.id, pins, below=[2, 5] if part is not parts[1] else []))
    assert got == m.Got(
        1, [m.Pin(m.HIT)] * MANY, below=[start + n for start in (0, 256, 384, 512) for n in (2, 5)]
    )


def test_a_small_request_is_answered_between_the_parts_of_a_big_one() -> None:
    served = Served(MANY_SLABS)
    a, ns = served.client("a")
    quiet, quiet_ns = served.client("quiet")
    grants = reserve_many(served, a, ns)
    slots, sequences = [grant.slot for grant in grants], [grant.sequence for grant in grants]
    for big in (m.Commit(1, slots, sequences, [7] * MANY), m.Get(2, ns, MANY_KEYS, [4 * KIB])):
        served.serving.received(a, big)
        for asked in range(1, 4):
            served.ask(quiet, quiet_ns, KEYS[:1])
            served.loop.turn()
            assert len(quiet.sent) == asked
            assert not a.sent
        served.loop.turns()
        quiet.sent.clear()
        reply = a.sent.pop()
        assert (reply.id, a.sent) == (big.id, [])  # type: ignore[union-attr]
        if isinstance(reply, m.Committed):
            assert reply.mask == b"\1" * MANY
        else:
            assert isinstance(reply, m.Got)
            key_of = served.node.state.store.facts.key
            assert [key_of[pin.slot] for pin in reply.pins] == MANY_KEYS
            served.node.release(a.number, *reply.pins)
    assert served.node.status().pins == 0
    assert served.node.status().reserved_bytes == 0


def test_pages_whose_slots_have_to_be_wiped_are_granted_a_few_in_a_turn() -> None:
    page_bytes, pages = PART_BYTES // 2, 16
    served = Served(node=Node(pages // 2, 2 * page_bytes, page_bytes, max_reserved_bytes=1 << 40))
    a, a_ns = served.client("a")
    served.serving.received(a, m.Reserve(1, a_ns, MANY_KEYS[:pages], [page_bytes]))
    served.loop.turns()
    [reserved] = a.sent
    assert isinstance(reserved, m.Reserved)
    served.node.abort(a.number, *reserved.grants)
    b, b_ns = served.client("b")
    quiet, quiet_ns = served.client("quiet")
    served.actions.clear()
    served.serving.received(b, m.Reserve(1, b_ns, MANY_KEYS[:pages], [page_bytes]))
    wiped_bytes = []
    while not b.sent:
        served.ask(quiet, quiet_ns, KEYS[:1])
        served.loop.turn()
        wipes = [span for act in served.actions if isinstance(act, ReserveRows) for span in act.wipe]
        wiped_bytes.append(sum(end - start for start, end in wipes))
        assert len(quiet.sent) == len(wiped_bytes)
    assert wiped_bytes[-1] == pages * page_bytes
    assert max(after - before for before, after in pairwise([0, *wiped_bytes])) <= 2 * PART_BYTES
    [reserved] = b.sent
    assert isinstance(reserved, m.Reserved)
    assert [grant.status for grant in reserved.grants] == [m.GRANTED] * pages


@pytest.mark.parametrize("pages", [1, 100, 2047, 4096])
def test_a_request_has_so_many_parts_at_most(pages: int) -> None:
    request, ids = m.Reserve(1, 1, MANY_KEYS[:1] * pages, [PART_BYTES]), count()
    parts = divide(request, part_keys(request, PART_BYTES, wipes=True), lambda: next(ids))
    assert len(parts) == pages if pages <= MAX_PARTS else len(parts) <= MAX_PARTS
    assert sum(map(size, parts)) == pages


@pytest.mark.parametrize(("tiers", "parts"), [((), 1), ((TierSpec("ssd:/a", "ssd", 1 << 40),), 8)])
def test_a_get_that_may_bring_pages_up_from_a_tier_is_served_in_parts(
    tiers: tuple[TierSpec, ...], parts: int
) -> None:
    page_bytes = PART_BYTES // 2
    served = Served(node=Node(8, 2 * page_bytes, page_bytes, tiers=tiers))
    a, ns = served.client("a")
    served.get(a, ns, MANY_KEYS[:16], page_bytes)
    served.loop.turns()
    assert len(served.order) == parts


def test_a_node_is_told_the_age_of_every_page_of_a_big_request() -> None:
    served = Served(MANY_SLABS, a=NamespaceSettings(ttl_s=3600.0))
    a, ns = served.client("a", peer=True)
    served.node.commit(a.number, *reserve_many(served, a, ns))
    served.loop.now_s = served.node.now_s = served.node.now_s + 10.0
    served.get(a, ns, [*MANY_KEYS, bytes(32)])
    served.loop.turns()
    [got] = a.sent
    assert isinstance(got, m.Got)
    assert got.ages_s == [10.0] * MANY + [0.0]
    client, _ = served.client("a")
    served.get(client, ns, MANY_KEYS)
    served.loop.turns()
    [got] = client.sent
    assert isinstance(got, m.Got)
    assert not got.ages_s


def test_a_big_request_takes_its_rate_once_and_then_goes_on() -> None:
    served = Served(MANY_SLABS, a=NamespaceSettings(operations_s=float(MANY)))
    a, ns = served.client("a")
    for _ in range(2):
        served.get(a, ns, MANY_KEYS)
    served.loop.turns()
    assert len(a.sent) == 1
    served.loop.pass_time(0.99)
    served.loop.turns()
    assert len(a.sent) == 1
    served.loop.pass_time(0.02)
    served.loop.turns()
    assert len(a.sent) == 2


@pytest.mark.parametrize("why", ["late", "dropped"])
def test_parts_that_cannot_be_served_any_more_are_misses(why: str) -> None:
    served = Served(MANY_SLABS)
    a, ns = served.client("a")
    served.node.commit(a.number, *reserve_many(served, a, ns))
    served.get(a, ns, MANY_KEYS)  # the first part is served
    if why == "late":
        served.loop.now_s += MAX_QUEUED_S + 1
        served.loop.later()
    else:
        served.node.send(a.number, m.DropNamespace(1, "a"))
    served.loop.turns()
    [got] = a.sent
    assert isinstance(got, m.Got)
    assert [pin.status for pin in got.pins] == [m.HIT] * PART_KEYS + [m.MISS] * (MANY - PART_KEYS)
    assert served.serving.counters()["requests_waiting"] == 0
    if why == "dropped":  # all parts are refused now, so the request is
        served.get(a, ns, MANY_KEYS)
        served.loop.turns()
        assert isinstance(a.sent[-1], m.Fault)


def test_a_client_is_not_read_from_while_parts_of_its_commit_wait() -> None:
    served = Served(MANY_SLABS)
    a, ns = served.client("a")
    grants = reserve_many(served, a, ns)
    slots, sequences = [grant.slot for grant in grants], [grant.sequence for grant in grants]
    served.serving.received(a, m.Commit(1, slots, sequences, [7] * MANY))
    while not a.sent:
        assert a.paused
        served.loop.turn()
    assert not a.paused


def test_clients_that_commit_much_take_turns() -> None:
    served = Served(MANY_SLABS)
    a, _ = served.client("a")
    b, _ = served.client("b")
    nothing = [0] * MANY
    for client in (a, b):
        served.serving.received(client, m.Commit(1, nothing, nothing, nothing))
    served.loop.turns()
    assert served.order == [a.number, b.number] * -(-MANY // TURN_KEYS)


def test_a_large_commit_leaves_others_half_of_a_node() -> None:
    served = Served(MANY_SLABS)
    a, _ = served.client("a")
    b, ns = served.client("b")
    nothing = [0] * MANY
    served.serving.received(a, m.Commit(1, nothing, nothing, nothing))
    for _ in range(100):
        served.ask(b, ns)
    while not a.sent:
        served.loop.turn()
    assert len(b.sent) * len(KEYS) >= MANY


def test_a_client_that_goes_between_the_parts_of_its_request_leaves_nothing() -> None:
    served = Served(MANY_SLABS)
    a, ns = served.client("a")
    grants = reserve_many(served, a, ns)
    slots, sequences = [grant.slot for grant in grants], [grant.sequence for grant in grants]
    served.serving.received(a, m.Commit(1, slots, sequences, [7] * MANY))
    served.get(a, ns, MANY_KEYS)
    served.loop.turn()
    served.serving.gone(a.number)
    served.node.disconnect(a.number)
    del served.clients[a.number]
    before = len(served.order)
    served.loop.turns()
    assert len(served.order) == before
    status = served.node.status()
    assert (status.pins, status.reserved_bytes, status.pages) == (0, 0, TURN_KEYS)


def test_over_its_rate_a_namespace_waits_and_its_neighbour_does_not() -> None:
    served = Served(a=NamespaceSettings(operations_s=32.0))
    a, a_ns = served.client("a")
    b, b_ns = served.client("b")
    for _ in range(4):
        served.ask(a, a_ns)
        served.loop.turn()
    assert len(a.sent) == 2
    served.ask(b, b_ns)
    assert len(b.sent) == 1
    served.loop.turn()
    served.loop.pass_time(0.49)
    assert len(a.sent) == 2
    served.loop.pass_time(0.02)
    assert len(a.sent) == 3
    served.loop.pass_time(0.5)
    assert len(a.sent) == 4
    assert served.serving.counters()["requests_waiting"] == 0


def test_what_waits_for_its_rate_is_not_looked_at_before_the_loops_clock_has_moved() -> None:
    served = Served(a=NamespaceSettings(operations_s=16_000.0))
    a, ns = served.client("a")
    served.get(a, ns, [key(n) for n in range(16_001)])  # it leaves a debt of a key, some 60 us
    served.loop.turns()
    served.ask(a, ns, KEYS[:1])
    served.loop.turns()
    assert served.serving.counters()["requests_waiting"] == 1
    assert min(when_s for when_s, _ in served.loop._later) >= served.loop.now_s + CLOCK_STEP_S


def test_misses_take_no_bytes() -> None:
    page = 4 * KIB
    served = Served(a=NamespaceSettings(bytes_s=float(8 * page)))
    a, ns = served.client("a")
    served.node.put(a.number, ns, 0)
    for _ in range(10):  # each asks for four pages and gets one
        served.get(a, ns, KEYS[:4])
        served.loop.turn()
    assert len(a.sent) == 5


@pytest.mark.parametrize("how", ["gone", "late"])
def test_parts_that_are_never_served_leave_their_namespace_no_debt(how: str) -> None:
    page = 4 * KIB
    served = Served(MANY_SLABS, a=NamespaceSettings(bytes_s=float(8 * page)))
    a, ns = served.client("a")
    other, _ = served.client("a")
    served.node.commit(other.number, *served.node.reserve(other.number, ns, 0))
    for _ in range(2):  # the parts after the first have no page to read, the second waits as a whole
        served.get(a, ns, MANY_KEYS)
    if how == "gone":
        served.disconnect(a)
    else:
        served.loop.now_s += MAX_QUEUED_S
        served.loop.later()
    assert served.serving.counters()["requests_waiting"] == 0
    served.loop.pass_time(1.0)
    served.get(other, ns, KEYS[:1])
    served.loop.turn()
    assert len(other.sent) == 1


def test_what_cannot_be_a_page_takes_no_more_of_a_rate_than_the_largest_page() -> None:
    slab = 64 * KIB
    served = Served(a=NamespaceSettings(bytes_s=float(8 * slab)))
    a, ns = served.client("a")
    served.serving.received(a, m.Get(1, ns, MANY_KEYS, [1 << 60]))
    served.serving.gone(a.number)
    flow = served.serving._queue._flows[ns]
    assert flow.bytes.ready_at_s(slab, served.loop.now_s) <= served.loop.now_s + MANY


def test_the_client_that_fills_the_queue_is_not_read_from_until_half_is_gone() -> None:
    served = Served(a=NamespaceSettings(operations_s=16.0))
    a, ns = served.client("a")
    place = 0
    while not a.paused:
        served.ask(a, ns, KEYS[:1])
        served.loop.turn()
        place += 1
    assert place == 16 + MAX_QUEUED
    assert a.paused
    for _ in range(8):
        served.loop.pass_time(1.0)
    assert not a.paused


def test_what_waits_too_long_is_answered_and_its_client_read_from_again() -> None:
    served = Served(a=NamespaceSettings(operations_s=1.0))
    a, ns = served.client("a")
    while not a.paused:
        served.ask(a, ns, KEYS[:1])
    for _ in range(int(MAX_QUEUED_S) + 2):
        served.loop.pass_time(1.0)
    assert not a.paused
    faults = [reply for reply in a.sent if isinstance(reply, m.Fault)]
    assert len(faults) > MAX_QUEUED - 10
    assert faults[0].code == "overloaded"
    assert "namespace 'a'" in faults[0].message


def test_requests_of_a_client_that_went_are_not_served() -> None:
    served = Served(a=NamespaceSettings(operations_s=16.0))
    a, ns = served.client("a")
    other, _ = served.client("a")
    served.ask(a, ns)
    for _ in range(5):
        served.ask(a, ns, KEYS[:1])
    served.ask(other, ns, KEYS[:1])
    served.serving.gone(a.number)
    del served.clients[a.number]
    served.loop.pass_time(2.0)
    assert served.order[1:] == [other.number]


def test_what_frees_or_ends_something_never_waits() -> None:
    served = Served(a=NamespaceSettings(operations_s=1.0))
    a, ns = served.client("a")
    [grant] = served.node.reserve(a.number, ns, 1)
    served.ask(a, ns, KEYS[:1])
    served.ask(a, ns, KEYS[:1])
    assert served.serving.counters()["requests_waiting"] == 1
    served.serving.received(a, m.Ping(100))
    served.serving.received(a, m.Commit(101, [grant.slot], [grant.sequence], [0]))
    assert a.sent[-2:] == [m.Done(100), m.Committed(101, b"\1")]


def test_other_nodes_are_held_to_no_namespaces_rate() -> None:
    served = Served(a=NamespaceSettings(operations_s=1.0))
    a, ns = served.client("a")
    node, _ = served.client("a", peer=True)
    served.ask(a, ns, KEYS[:1])
    for _ in range(3):
        served.ask(node, ns, KEYS[:1])
    assert len(node.sent) == 3


def test_a_stranger_cannot_use_up_a_namespaces_rate() -> None:
    served = Served(a=NamespaceSettings(operations_s=2.0, read_token="ab" * 32))
    _, ns = served.client("a", peer=True)
    stranger = Client(served.node.connect(token="guess"))
    served.clients[stranger.number] = stranger
    for _ in range(100):
        served.ask(stranger, ns, KEYS[:1])
    assert all(isinstance(reply, m.Fault) for reply in stranger.sent)
    assert len(stranger.sent) == 100
    assert served.serving.counters()["requests_waiting"] == 0


def test_a_changed_setting_counts_at_once() -> None:
    served = Served(a=NamespaceSettings(operations_s=1.0))
    a, ns = served.client("a")
    served.ask(a, ns, KEYS[:1])
    served.ask(a, ns, KEYS[:1])
    assert len(a.sent) == 1
    served.node.send(a.number, m.DropNamespace(1, "a"))
    served.node.open(a.number, "a")
    served.ask(a, ns, KEYS[:1])  # of the dropped number: refused
    served.loop.turn()
    served.loop.turn()
    assert [type(reply) for reply in a.sent[1:]] == [m.Fault, m.Fault]


# --- a real node


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ProcessPool]:
    config = PoolNodeConfig(
        name="serving",
        arena_dir=arena_dir(),
        capacity_bytes="16MiB",
        slab_bytes="1MiB",
        min_slot_bytes="8KiB",
    )
    found = ProcessPool(config, tmp_path, "shm")
    yield found
    found.kill()
    remove_arena(found.config)


def soon() -> float:
    return time.monotonic() + 30.0


def latencies_s(channel: ControlChannel, namespace: int, count: int) -> list[float]:
    found = []
    for place in range(count):
        started_s = time.monotonic()
        channel.call(m.Exists(1000 + place, namespace, KEYS[:1]), soon())
        found.append(time.monotonic() - started_s)
        time.sleep(0.002)  # a quiet client: what it does is not to be its own load
    return found


class Loud(threading.Thread):
    """A client that sends without end, reading what comes."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.channel = ControlChannel.connect(address, make_hello("loud", "", "none"), soon())
        opened = self.channel.call(m.OpenNamespace(1, "loud", {}), soon())
        assert isinstance(opened, m.Opened)
        self.namespace = opened.namespace
        self.served_keys = 0
        self.stop = threading.Event()

    def run(self) -> None:
        sent = received = 1
        while not self.stop.is_set():
            while sent < received + 64:
                sent += 1
                self.channel.send(m.Exists(sent, self.namespace, KEYS), soon())
            received += 1
            reply = self.channel.receive(received, soon())
            self.served_keys += len(KEYS) * isinstance(reply, m.Present)
        self.channel.close()


def test_a_loud_neighbour_gets_its_rate_and_a_quiet_one_its_answers(pool: ProcessPool) -> None:
    channel = ControlChannel.connect(pool.address, make_hello("quiet", "", "none"), soon())
    opened = channel.call(m.OpenNamespace(1, "quiet", {}), soon())
    assert isinstance(opened, m.Opened)
    put = PutNamespace(2, "loud", NamespaceSettings(operations_s=2000.0))
    assert isinstance(channel.call(put, soon()), m.Done)
    alone_s = latencies_s(channel, opened.namespace, 100)
    loud = [Loud(pool.address) for _ in range(3)]
    started_s = time.monotonic()
    for thread in loud:
        thread.start()
    beside_s = latencies_s(channel, opened.namespace, 300)
    took_s = time.monotonic() - started_s
    for thread in loud:
        thread.stop.set()
    for thread in loud:
        thread.join(20)
    assert sum(thread.served_keys for thread in loud) <= 2000 * (time.monotonic() - started_s + 1)
    assert sum(thread.served_keys for thread in loud) >= 500 * took_s
    # others may use this machine too, for most of the time; what it excludes is that each waits for all that
    # the neighbour has sent
    assert statistics.quantiles(beside_s, n=4)[0] <= 3 * statistics.median(alone_s) + 0.01
    status = channel.call(m.Status(9), soon())
    assert isinstance(status, m.StatusReport)
    assert status.counters["requests_held_back"] > 0
    channel.close()


def test_a_client_that_sends_without_reading_delays_nobody_and_loses_nothing(pool: ProcessPool) -> None:
    flood = ControlChannel.connect(pool.address, make_hello("flood", "", "none"), soon())
    quiet = ControlChannel.connect(pool.address, make_hello("quiet", "", "none"), soon())
    opened = [each.call(m.OpenNamespace(1, name, {}), soon()) for each, name in ((flood, "f"), (quiet, "q"))]
    numbers = [reply.namespace for reply in opened if isinstance(reply, m.Opened)]
    for place in range(2, 3000):
        flood.send(m.Exists(place, numbers[0], KEYS), soon())
    assert latencies_s(quiet, numbers[1], 1)[0] < 10.0
    assert all(isinstance(flood.receive(place, soon()), m.Present) for place in range(2, 3000))
    flood.close()
    quiet.close()
