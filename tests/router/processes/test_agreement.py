"""Rates over the processes of several routers: together they are one bucket, and apart they are shares."""

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
from pdserve.router.processes.agreement import HEARTBEAT_S, SILENT_S, Agreement, Charged, Told
from pdserve.router.tenants.tenant import Tenants, TenantState

NAME, RATE, TOKENS = "t", 10.0, 6000
TICK_S = 0.1


class Replica:
    def __init__(self, name: str, processes: int = 1) -> None:
        self.tenants = Tenants()
        limits = Tenant(name=NAME, requests_s=RATE, tokens_min=TOKENS)
        self.tenants.configure({"0" * 64: NAME}, [limits], TenantLimits(), 0.0)
        (self.tenant,) = self.tenants.all
        self.rates = Agreement(
            self.tenants, lambda tenant: tenant.waiting, name, away_s=1.0, processes=processes, now_s=0.0
        )
        self.is_reached = True
        self.let_in = 0

    def flood(self, now_s: float) -> None:
        with suppress(TooManyError):
            while True:
                self.tenant.take(1, now_s)
                self.let_in += 1


class Channel:
    """Redis, as replicas see it; it may be away for some of them, and lose messages."""

    def __init__(self, replicas: int, processes: int = 1) -> None:
        self.replicas = [Replica(f"r{i}", processes) for i in range(replicas)]
        self.now_s = 0.0
        self.lost: deque[bytes] = deque()
        self.loses = 0.0
        self.dice = random.Random(7)

    def step(self, seconds: float = TICK_S) -> None:
        self.now_s += seconds
        for replica in self.replicas:
            replica.rates.tick(self.now_s)
            data = replica.rates.message(self.now_s)
            if data is None or not replica.is_reached:
                continue
            for other in self.replicas:
                if other.is_reached and self.dice.random() >= self.loses:
                    other.rates.hear(data, self.now_s)

    def run(self, seconds: float, *, flood: bool = False) -> int:
        """How many requests were let in by all."""
        before = self.let_in
        for _ in range(round(seconds / TICK_S)):
            if flood:
                for replica in self.replicas:
                    replica.flood(self.now_s)
            self.step()
        return self.let_in - before

    @property
    def let_in(self) -> int:
        return sum(replica.let_in for replica in self.replicas)

    def reach(self, *which: int, reached: bool) -> None:
        for number in which:
            self.replicas[number].is_reached = reached


def level(tenant: TenantState) -> float:
    assert tenant.requests is not None
    return tenant.requests.level


@pytest.mark.parametrize("replicas", [1, 2, 5])
@pytest.mark.parametrize("loses", [0.0, 0.2])
def test_however_many_replicas_a_tenant_gets_its_rate_once(replicas: int, loses: float) -> None:
    channel = Channel(replicas)
    channel.run(1.0)
    channel.loses = loses
    assert RATE * 30 <= channel.run(30.0, flood=True) <= RATE * 31 + replicas * RATE


def test_what_one_replica_gives_back_all_get_back() -> None:
    channel = Channel(3)
    channel.run(1.0)
    first = channel.replicas[0].tenant
    first.take(1000, channel.now_s)
    first.settle(1000, 300, 200, channel.now_s)
    channel.step(0.0)
    for replica in channel.replicas:
        assert replica.tenant.tokens is not None
        assert replica.tenant.tokens.level == pytest.approx(TOKENS - 500)


def test_a_lost_message_is_made_up_for_by_the_next() -> None:
    channel = Channel(2)
    channel.run(1.0)
    here, there = channel.replicas
    here.tenant.take(1, channel.now_s)
    channel.step(0.0)
    here.tenant.take(1, channel.now_s)
    here.rates.message(channel.now_s)  # nobody hears it
    here.tenant.take(1, channel.now_s)
    channel.step(0.0)
    assert level(there.tenant) == level(here.tenant) == RATE - 3


def test_without_the_channel_each_holds_its_share_and_its_return_costs_nothing() -> None:
    channel = Channel(2)
    channel.run(1.0, flood=True)
    channel.reach(0, 1, reached=False)
    channel.run(2.0, flood=True)
    assert [replica.tenant.share for replica in channel.replicas] == [0.5, 0.5]
    assert channel.run(20.0, flood=True) == pytest.approx(RATE * 20, abs=4)
    channel.reach(0, 1, reached=True)
    channel.run(1.0)
    assert [replica.tenant.share for replica in channel.replicas] == [1.0, 1.0]
    assert min(level(replica.tenant) for replica in channel.replicas) > 0
    assert RATE * 19 <= channel.run(20.0, flood=True) <= RATE * 23


def test_one_that_is_cut_off_holds_its_share_beside_the_others() -> None:
    channel = Channel(3)
    channel.run(1.0)
    channel.reach(0, reached=False)
    channel.run(SILENT_S + 1)
    assert [replica.tenant.share for replica in channel.replicas] == [pytest.approx(1 / 3), 1.0, 1.0]
    alone = channel.replicas[0].let_in
    channel.run(30.0, flood=True)
    assert channel.replicas[0].let_in - alone <= RATE / 3 * 30 + RATE
    channel.reach(0, reached=True)
    channel.run(1.0)
    assert min(level(replica.tenant) for replica in channel.replicas) > 0


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
    replica = Replica("r")
    replica.rates.hear(data, 0.0)
    assert (replica.rates.unread, level(replica.tenant)) == (1, RATE)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_none_charge_nothing(number: float) -> None:
    replica = Replica("r")
    replica.rates.hear(told(requests=number), 0.0)
    replica.rates.hear(told(tokens=number), 0.0)
    replica.rates.hear(told(tenant="nobody"), 0.0)
    assert level(replica.tenant) == RATE


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.floats(-1e300, 1e300)), max_size=30))
def test_nobody_is_locked_out_for_long_whatever_others_say(said: list[tuple[str, float]]) -> None:
    replica = Replica("r")
    for sender, number in said:
        replica.rates.hear(told(sender, requests=number, tokens=number), 0.0)
    assert -4.001 * RATE <= level(replica.tenant) <= RATE
    replica.tenant.take(1, 61.0 * 5)


def test_senders_are_bounded() -> None:
    replica = Replica("r")
    for number in range(3000):
        replica.rates.hear(told(f"s{number}", requests=0.0), 0.0)
    assert len(replica.rates._senders) == 1024


def test_a_channel_that_never_was_there_leaves_the_share_that_the_configuration_says() -> None:
    channel = Channel(2, processes=4)
    channel.reach(0, 1, reached=False)
    channel.run(1.5)
    assert [replica.tenant.share for replica in channel.replicas] == [0.25, 0.25]


def test_who_has_nothing_to_tell_speaks_only_now_and_then() -> None:
    rates = Replica("r").rates
    said = [rates.message(tick * TICK_S) for tick in range(11)]
    assert [i for i, one in enumerate(said) if one is not None] == [0, 5, 10]
    assert HEARTBEAT_S == 0.5
