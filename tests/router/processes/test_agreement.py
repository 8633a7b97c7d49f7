"""Limits of a tenant over the processes of several routers: one limit together, and shares of it apart.

Concurrency is never exceeded while the channel works, and never left unused.
"""

from __future__ import annotations

import random
from collections import deque
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.api.errors import TooManyError
from pdserve.router.config.tenants import Tenant, TenantLimits
from pdserve.router.processes.agreement import (
    HEARTBEAT_S,
    MAX_PERMITS,
    MAX_TURN,
    SETTLE_S,
    SILENT_S,
    Agreement,
    Charged,
    Permit,
    Told,
    split,
)
from pdserve.router.tenants.tenant import Tenants

NAME, RATE, TOKENS = "t", 10.0, 6000
TICK_S = 0.1
AWAY_S = 1.0


class Process:
    """One router process; messages reach it in the order of the channel, but at its own time."""

    def __init__(self, name: str, limits: Tenant, now_s: float, processes: int) -> None:
        self.tenants = Tenants()
        self.configure(limits, now_s)
        (self.tenant,) = self.tenants.all
        self.agreement = Agreement(
            self.tenants, lambda one: one.waiting, name, away_s=AWAY_S, processes=processes, now_s=now_s
        )
        self.agreement.listen()
        self.inbox: deque[tuple[float, bytes]] = deque()
        self.told_s = now_s
        self.is_reached = True
        self.served = 0

    def configure(self, limits: Tenant, now_s: float) -> None:
        self.tenants.configure({"0" * 64: NAME}, [limits], TenantLimits(), now_s)

    @property
    def level(self) -> float:
        assert self.tenant.requests is not None
        return self.tenant.requests.level

    def flood(self, now_s: float) -> None:
        with suppress(TooManyError):
            while True:
                self.tenant.take(1, now_s)
                self.served += 1

    def start(self) -> None:
        while self.tenant.waiting and self.tenant.is_free:
            self.tenant.waiting -= 1
            self.tenant.running += 1
            self.served += 1

    def end(self) -> None:
        self.tenant.running -= bool(self.tenant.running)

    def hear(self, count: int, now_s: float) -> None:
        for _ in range(min(count, len(self.inbox))):
            self.agreement.hear(self.inbox.popleft()[1], now_s)
        self.start()


class Cluster:
    """Processes, and the channel between them: it may be away for some of them, and lose messages."""

    def __init__(self, processes: int, limits: Tenant, configured: int = 1) -> None:
        """`configured`: how many processes each is told that there are."""
        self.limits, self.configured = limits, configured
        self.loses = 0.0
        self.dice = random.Random(7)
        self.now_s = 0.0
        self.processes: list[Process] = []
        for _ in range(processes):
            self.join()

    def join(self) -> Process:
        process = Process(f"p{len(self.processes)}", self.limits, self.now_s, self.configured)
        self.processes.append(process)
        return process

    @property
    def running(self) -> int:
        return sum(process.tenant.running for process in self.processes)

    def tell(self, process: Process) -> None:
        process.told_s = self.now_s
        process.agreement.tick(self.now_s)
        process.start()
        data = process.agreement.message(self.now_s)
        if data is not None and process.is_reached:
            for other in self.processes:
                if other.is_reached and self.dice.random() >= self.loses:
                    other.inbox.append((self.now_s, data))

    def step(self, seconds: float = TICK_S) -> None:
        """Everyone tells, and hears all."""
        self.now_s += seconds
        for process in self.processes:
            self.tell(process)
        for process in self.processes:
            process.hear(10**6, self.now_s)

    def run(self, seconds: float, *, flood: bool = False) -> int:
        """How many requests were let in by all."""
        before = self.served
        for _ in range(round(seconds / TICK_S)):
            if flood:
                for process in self.processes:
                    process.flood(self.now_s)
            self.step()
        return self.served - before

    @property
    def served(self) -> int:
        return sum(process.served for process in self.processes)

    def reach(self, *which: int, reached: bool) -> None:
        for number in which:
            self.processes[number].is_reached = reached

    def ask(self, number: int, requests: int) -> None:
        process = self.processes[number]
        process.tenant.waiting += requests
        process.start()


def concurrent(limit: int) -> Tenant:
    return Tenant(name=NAME, concurrency=limit)


def rated(processes: int, configured: int = 1) -> Cluster:
    return Cluster(processes, Tenant(name=NAME, requests_s=RATE, tokens_min=TOKENS), configured)


def settled(processes: int, limit: int) -> Cluster:
    cluster = Cluster(processes, concurrent(limit))
    cluster.run(4 * SETTLE_S)
    return cluster


def test_nothing_runs_before_a_process_knows_what_others_hold() -> None:
    cluster = Cluster(2, concurrent(4))
    cluster.ask(0, 4)
    cluster.run(SETTLE_S - TICK_S)
    assert cluster.running == 0
    cluster.run(2.0)
    assert cluster.running == 4


def test_places_that_nobody_needs_are_spread_so_that_a_request_does_not_wait() -> None:
    cluster = settled(3, 10)
    assert sorted(process.tenant.granted or 0 for process in cluster.processes) == [3, 3, 4]
    cluster.ask(1, 1)
    assert cluster.running == 1


def test_one_place_goes_round() -> None:
    cluster = settled(3, 1)
    for number in range(3):
        cluster.ask(number, 1000)
    for _ in range(600):
        for process in cluster.processes:
            process.end()
        cluster.step()
        assert cluster.running <= 1
    served = [process.served for process in cluster.processes]
    assert min(served) > 0.6 * max(served)
    assert sum(served) > 100


def test_a_process_that_joins_gets_its_share_and_one_that_ends_leaves_its_own() -> None:
    cluster = settled(2, 6)
    cluster.join()
    cluster.run(2 * SETTLE_S)
    assert [process.tenant.granted for process in cluster.processes] == [2, 2, 2]
    cluster.processes.pop()
    cluster.ask(0, 6)
    cluster.run(1.0)
    assert cluster.running == 4
    cluster.run(SILENT_S)
    assert cluster.running == 6


def test_without_the_channel_each_holds_a_part_and_its_return_is_exact_again() -> None:
    cluster = settled(2, 6)
    for process in cluster.processes:
        process.is_reached = False
    for number in range(2):
        cluster.ask(number, 100)
    cluster.run(AWAY_S + 0.5)
    assert [process.tenant.running for process in cluster.processes] == [3, 3]
    for process in cluster.processes:
        process.is_reached = True
        process.agreement.listen()
    cluster.run(2.0)
    assert cluster.running == 6
    cluster.processes[1].tenant.waiting = 0
    for _ in range(3):
        cluster.processes[1].end()
    cluster.run(1.0)
    assert [process.tenant.running for process in cluster.processes] == [6, 0]


def test_a_message_that_comes_behind_a_later_one_counts_for_nothing() -> None:
    cluster = settled(2, 4)
    late = msgspec.msgpack.encode(Told("p0", {}, 1, {NAME: Permit(4, 4, 4, 4, 0, 0)}))
    for process in cluster.processes:
        process.agreement.hear(late, cluster.now_s)
    cluster.ask(1, 4)
    cluster.run(1.0)
    assert cluster.running == 4


@pytest.mark.parametrize(
    "place",
    [
        Permit(4, -5, 4, 0, 0, 0),
        Permit(4, 0, MAX_PERMITS + 1, 0, 0, 0),
        Permit(-1, 0, 0, 0, 0, 0),
        Permit(4, 0, 0, -7, 0, 0),
        Permit(4, 0, 0, 0, 1 << 40, 0),
        Permit(4, 4, 4, 0, 0, -1),
        Permit(4, 4, 4, 0, 0, MAX_TURN + 1),
    ],
)
def test_numbers_that_no_process_would_tell_count_for_nothing(place: Permit) -> None:
    cluster = settled(1, 4)
    (process,) = cluster.processes
    process.agreement.hear(msgspec.msgpack.encode(Told("x", {}, 1, {NAME: place})), cluster.now_s)
    cluster.ask(0, 9)
    cluster.run(1.0)
    assert cluster.running == 4


def test_no_process_runs_more_than_the_limit_whatever_others_say() -> None:
    cluster = settled(1, 4)
    (process,) = cluster.processes
    own = msgspec.msgpack.encode(
        Told("p0", {}, process.agreement._number, {NAME: Permit(99, 99, 99, 0, 0, 0)})
    )
    process.agreement.hear(own, cluster.now_s)
    cluster.ask(0, 99)
    assert cluster.running <= 4


@given(
    st.integers(0, 2**32),
    st.integers(1, 5),
    st.integers(1, 12),
)
def test_however_late_messages_come_the_limit_holds_and_all_are_served(
    seed: int, processes: int, limit: int
) -> None:
    """Processes tell in time. They hear late, each at its own time, and all in the same order."""
    dice = random.Random(seed)
    cluster = settled(processes, limit)
    for step in range(300):
        cluster.now_s += dice.random() * TICK_S / 4
        for process in cluster.processes:
            if cluster.now_s - process.told_s >= TICK_S:
                cluster.tell(process)
            while process.inbox and cluster.now_s - process.inbox[0][0] > AWAY_S / 3:
                process.hear(1, cluster.now_s)
        process = dice.choice(cluster.processes)
        match dice.randrange(4):
            case 0:
                process.tenant.waiting += dice.randrange(4)
                process.start()
            case 1:
                process.end()
                process.start()
            case _:
                process.hear(dice.randrange(1, 8), cluster.now_s)
        if step % 100 == 50:
            cluster.join()
        assert cluster.running <= limit, step
    waits = sum(process.tenant.waiting for process in cluster.processes)
    for _ in range(20 * (waits + 10)):
        if not any(process.tenant.waiting for process in cluster.processes):
            return
        for process in cluster.processes:
            process.end()
        cluster.step()
        assert cluster.running <= limit
    raise AssertionError("requests wait for ever")


@given(st.integers(0, 100), st.dictionaries(st.integers(0, 20), st.integers(0, 200), min_size=1))
def test_the_limit_is_divided_whole_and_fairly(limit: int, demands: dict[int, int]) -> None:
    given_ = split(limit, demands)
    assert sum(given_.values()) == limit
    short = [process for process in demands if given_[process] < demands[process]]
    for process in short:  # nobody who wants more has less than another, but for what cannot be divided
        assert given_[process] >= max(given_.values()) - 1
    if sum(demands.values()) <= limit:
        assert not short
    elif limit:
        most = max(given_.values())
        assert sorted(short, key=lambda one: given_[one] < most) == short  # the odd ones to the first


def test_a_lower_limit_holds_once_the_surplus_has_ended() -> None:
    cluster = settled(2, 8)
    for number in range(2):
        cluster.ask(number, 100)
    cluster.run(1.0)
    assert cluster.running == 8
    for process in cluster.processes:
        process.configure(concurrent(3), cluster.now_s)
    for _ in range(10):
        for process in cluster.processes:
            process.end()
        cluster.step()
    assert cluster.running <= 3
    cluster.run(1.0)
    assert cluster.running == 3


# --- rates


def lone() -> Process:
    return rated(1).processes[0]


@pytest.mark.parametrize("replicas", [1, 2, 5])
@pytest.mark.parametrize("loses", [0.0, 0.2])
def test_however_many_replicas_a_tenant_gets_its_rate_once(replicas: int, loses: float) -> None:
    cluster = rated(replicas)
    cluster.run(1.0)
    cluster.loses = loses
    assert RATE * 30 <= cluster.run(30.0, flood=True) <= RATE * 31 + replicas * RATE


def test_what_one_replica_gives_back_all_get_back() -> None:
    cluster = rated(3)
    cluster.run(1.0)
    first = cluster.processes[0].tenant
    first.take(1000, cluster.now_s)
    first.settle(1000, 300, 200, cluster.now_s)
    cluster.step(0.0)
    for replica in cluster.processes:
        assert replica.tenant.tokens is not None
        assert replica.tenant.tokens.level == pytest.approx(TOKENS - 500)


def test_a_lost_message_is_made_up_for_by_the_next() -> None:
    cluster = rated(2)
    cluster.run(1.0)
    here, there = cluster.processes
    here.tenant.take(1, cluster.now_s)
    cluster.step(0.0)
    here.tenant.take(1, cluster.now_s)
    here.agreement.message(cluster.now_s)  # nobody hears it
    here.tenant.take(1, cluster.now_s)
    cluster.step(0.0)
    assert there.level == here.level == RATE - 3


def test_without_the_channel_each_holds_its_share_and_its_return_costs_nothing() -> None:
    cluster = rated(2)
    cluster.run(1.0, flood=True)
    cluster.reach(0, 1, reached=False)
    cluster.run(2.0, flood=True)
    assert [replica.tenant.share for replica in cluster.processes] == [0.5, 0.5]
    assert cluster.run(20.0, flood=True) == pytest.approx(RATE * 20, abs=4)
    cluster.reach(0, 1, reached=True)
    cluster.run(1.0)
    assert [replica.tenant.share for replica in cluster.processes] == [1.0, 1.0]
    assert min(replica.level for replica in cluster.processes) > 0
    assert RATE * 19 <= cluster.run(20.0, flood=True) <= RATE * 23


def test_one_that_is_cut_off_holds_its_share_beside_the_others() -> None:
    cluster = rated(3)
    cluster.run(1.0)
    cluster.reach(0, reached=False)
    cluster.run(SILENT_S + 1)
    assert [replica.tenant.share for replica in cluster.processes] == [pytest.approx(1 / 3), 1.0, 1.0]
    alone = cluster.processes[0].served
    cluster.run(30.0, flood=True)
    assert cluster.processes[0].served - alone <= RATE / 3 * 30 + RATE
    cluster.reach(0, reached=True)
    cluster.run(1.0)
    assert min(replica.level for replica in cluster.processes) > 0


def told(sender: str = "x", tenant: str = NAME, requests: float = 1.0, tokens: float = 1.0) -> bytes:
    return msgspec.msgpack.encode(Told(sender, {tenant: Charged(requests, tokens, requests, tokens)}))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        b"\xc1",
        b"\x92\xa1x\x81",
        None,
        5,
        "text",
        b"\x91" * 5000,
        b"\x00" * (2 << 20),
        told()[:-3],
        msgspec.msgpack.encode(["x", {NAME: ["many", 1, 1, 1]}]),
        msgspec.msgpack.encode(["x", {NAME: [1]}]),
    ],
)
def test_garbage_is_dropped_and_counted(data: object) -> None:
    replica = lone()
    replica.agreement.hear(data, 0.0)
    assert (replica.agreement.unread, replica.level) == (1, RATE)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_none_charge_nothing(number: float) -> None:
    replica = lone()
    replica.agreement.hear(told(requests=number), 0.0)
    replica.agreement.hear(told(tokens=number), 0.0)
    replica.agreement.hear(told(tenant="nobody"), 0.0)
    assert replica.level == RATE


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.floats(-1e300, 1e300)), max_size=30))
def test_nobody_is_locked_out_for_long_whatever_others_say(said: list[tuple[str, float]]) -> None:
    replica = lone()
    for sender, number in said:
        replica.agreement.hear(told(sender, requests=number, tokens=number), 0.0)
    assert -4.001 * RATE <= replica.level <= RATE
    replica.tenant.take(1, 61.0 * 5)


def test_senders_are_bounded() -> None:
    replica = lone()
    for number in range(3000):
        replica.agreement.hear(told(f"s{number}", requests=0.0), 0.0)
    assert len(replica.agreement._senders) == 1024


def test_a_channel_that_never_was_there_leaves_the_share_that_the_configuration_says() -> None:
    cluster = rated(2, configured=4)
    cluster.reach(0, 1, reached=False)
    cluster.run(1.5)
    assert [replica.tenant.share for replica in cluster.processes] == [0.25, 0.25]


def test_who_has_nothing_to_tell_speaks_only_now_and_then() -> None:
    rates = lone().agreement
    said = [rates.message(tick * TICK_S) for tick in range(11)]
    assert [i for i, one in enumerate(said) if one is not None] == [0, 5, 10]
    assert HEARTBEAT_S == 0.5


def test_what_others_charge_while_one_is_cut_off_costs_it_nothing_however_short_that_was() -> None:
    cluster = rated(2)
    cluster.run(1.0, flood=True)
    cluster.reach(0, reached=False)
    cluster.run(1.5, flood=True)
    cluster.reach(0, reached=True)
    cluster.reach(1, reached=False)  # the first to be heard again is this one itself
    cluster.step(HEARTBEAT_S)
    cluster.reach(1, reached=True)
    before = cluster.processes[0].level
    cluster.step(HEARTBEAT_S)
    assert cluster.processes[0].tenant.share == 1.0
    assert cluster.processes[0].level > before - 3


def test_a_channel_that_comes_and_goes_does_not_make_the_others_forgotten() -> None:
    cluster = rated(2)
    cluster.run(1.0)
    for _ in range(3):
        cluster.reach(0, 1, reached=False)
        cluster.run(2.0)
        assert cluster.processes[0].tenant.share == 0.5
        cluster.reach(0, reached=True)  # the other one is not back yet
        cluster.run(0.6)
        assert cluster.processes[0].tenant.share == 1.0


def test_a_replica_that_has_ended_is_not_counted() -> None:
    cluster = rated(2)
    cluster.run(1.0)
    cluster.reach(1, reached=False)
    cluster.run(2 * SILENT_S)
    cluster.reach(0, reached=False)
    cluster.run(2.0)
    assert cluster.processes[0].tenant.share == 1.0
