"""What processes tell each other, over a network that loses, delays, doubles and cuts off their messages."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.router.api.errors import TooManyError
from pdserve.router.config.tenants import Tenant, TenantLimits
from pdserve.router.sessions.keys import named
from pdserve.router.sessions.table import SessionEntry, SessionTable
from pdserve.router.sharing.gossip import (
    AWAY_S,
    HEARTBEAT_S,
    MAX_DEBT,
    MAX_MESSAGE_BYTES,
    MAX_PEERS,
    MAX_ROWS,
    MAX_RUNNING,
    REPORT_S,
    SETTLE_S,
    SILENT_S,
    Gossip,
    News,
    Turn,
    Usage,
    split,
)
from pdserve.router.tenants.retained import keep, release
from pdserve.router.tenants.tenant import Tenants, TokenBucket

NAME, RATE, TOKENS = "t", 10.0, 6000
STEPS = 4
STEP_S = REPORT_S / STEPS
UNIX_S = 1.7e9
SESSIONS = 10_000


class Process:
    """One router process. It reports every `REPORT_S`, at a time of its own."""

    def __init__(
        self, name: str, host: str, limits: Tenant, now_s: float, siblings: int, *, remote: bool
    ) -> None:
        self.name, self.host = name, host
        self.tenants = Tenants()
        self.tenants.configure({"0" * 64: NAME}, [limits], TenantLimits(), now_s)
        (self.tenant,) = self.tenants.all
        self.sessions = SessionTable(SESSIONS, 3600.0)
        self.gossip = Gossip(
            name,
            self.tenants,
            self.sessions,
            lambda tenant: tenant.waiting,
            siblings=siblings,
            is_remote=remote,
            now_s=now_s,
            unix_s=UNIX_S + now_s,
        )
        self.phase = 0
        """Of its reports."""
        self.served = 0

    def bucket(self) -> TokenBucket:
        assert self.tenant.requests is not None
        return self.tenant.requests

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


class Network:
    """Processes on hosts, and what is between them. Siblings lose nothing; the rest is as `dice` will."""

    def __init__(self, hosts: dict[str, int], limits: Tenant, seed: int = 0) -> None:
        self.dice = random.Random(seed)
        self.limits, self.now_s, self.steps = limits, 1000.0, 0
        self.loses = self.doubles = self.delay_s = 0.0
        self.is_cut = False
        """Redis is away."""
        self.siblings, self.is_remote = hosts, len(hosts) > 1
        self.flying: list[tuple[float, int, Process, bytes, bool]] = []
        self.count = itertools.count()
        self.processes: list[Process] = []
        for host, number in hosts.items():
            for _ in range(number):
                self.join(host)

    def join(self, host: str) -> Process:
        name = f"{host}{next(self.count)}"
        process = Process(name, host, self.limits, self.now_s, self.siblings[host], remote=self.is_remote)
        process.phase = self.dice.randrange(STEPS)
        self.processes.append(process)
        return process

    @property
    def running(self) -> int:
        return sum(process.tenant.running for process in self.processes)

    @property
    def served(self) -> int:
        return sum(process.served for process in self.processes)

    def send(self, sender: Process, data: bytes, to: str | None) -> None:
        for process in self.processes:
            if process.host == sender.host and process is not sender and to in (None, process.name):
                self.fly(process, data, is_sibling=True)
            is_lost = process is not sender and self.dice.random() < self.loses
            if self.is_remote and to is None and not self.is_cut and not is_lost:
                self.fly(process, data, is_sibling=False)

    def fly(self, to: Process, data: bytes, *, is_sibling: bool) -> None:
        for _ in range(1 + (self.dice.random() < self.doubles)):
            late_s = 0.0 if is_sibling else self.dice.random() * self.delay_s
            heapq.heappush(self.flying, (self.now_s + late_s, next(self.count), to, data, is_sibling))

    def step(self) -> None:
        self.steps += 1
        self.now_s = 1000.0 + self.steps * STEP_S
        for process in self.processes:
            if self.steps % STEPS == process.phase:
                for data, to in process.gossip.tick(self.now_s, UNIX_S + self.now_s):
                    assert len(data) <= MAX_MESSAGE_BYTES
                    self.send(process, data, to)
        while self.flying and self.flying[0][0] <= self.now_s:
            _, _, process, data, is_sibling = heapq.heappop(self.flying)
            if process in self.processes:
                process.gossip.hear(data, self.now_s, UNIX_S + self.now_s, is_sibling=is_sibling)
        for process in self.processes:
            process.start()

    def run(self, seconds: float, *, flood: bool = False) -> int:
        """How many requests were let in by all."""
        before = self.served
        for _ in range(round(seconds / STEP_S)):
            if flood:
                for process in self.processes:
                    process.flood(self.now_s)
            self.step()
        return self.served - before

    def ask(self, process: Process, requests: int) -> None:
        process.tenant.waiting += requests
        process.start()

    def end_some(self, share: float = 0.5) -> None:
        for process in self.processes:
            for _ in range(process.tenant.running):
                if self.dice.random() < share:
                    process.tenant.running -= 1

    def end(self, process: Process) -> None:
        """It says its last word."""
        for data, to in process.gossip.last(UNIX_S + self.now_s, self.now_s):
            self.send(process, data, to)
        self.processes.remove(process)

    def settled(self) -> Network:
        self.run(1.0)
        return self


def concurrent(limit: int, hosts: dict[str, int], seed: int = 0) -> Network:
    return Network(hosts, Tenant(name=NAME, concurrency=limit), seed)


def rated(hosts: dict[str, int], seed: int = 0) -> Network:
    return Network(hosts, Tenant(name=NAME, requests_s=RATE, tokens_min=TOKENS), seed)


HOSTS = st.dictionaries(st.sampled_from("abc"), st.integers(1, 4), min_size=1, max_size=3)
SEEDS = st.integers(0, 2**32)


# --- concurrency


@given(HOSTS, st.integers(1, 12), SEEDS)
@settings(max_examples=40)
def test_the_limit_is_overrun_only_by_what_starts_while_messages_are_late(
    hosts: dict[str, int], limit: int, seed: int
) -> None:
    """And nobody waits for ever, and nothing of the limit is left unused while somebody waits."""
    network = concurrent(limit, hosts, seed).settled()
    network.delay_s = network.dice.choice([0.0, 0.05, 0.3])
    for _ in range(200):
        if network.dice.random() < 0.3:
            network.ask(network.dice.choice(network.processes), network.dice.randrange(4))
        network.end_some(0.1)
        network.step()
        assert network.running <= limit * (2 + math.ceil(network.delay_s / REPORT_S))
        assert all(process.tenant.running <= limit for process in network.processes)
    network.delay_s = 0.0
    waits = sum(process.tenant.waiting for process in network.processes)
    for _ in range(20 * (waits + 10)):
        network.run(REPORT_S)
        network.end_some()
        if not any(process.tenant.waiting for process in network.processes):
            return
    raise AssertionError("requests wait for ever")


def test_a_burst_that_comes_to_all_processes_at_once_does_not_overrun_the_limit() -> None:
    network = concurrent(10, {"a": 8}).settled()
    for process in network.processes:
        network.ask(process, 10)
    most = 0
    for _ in range(100):
        network.step()
        most = max(most, network.running)
    assert most == network.running == 10


def test_one_process_gets_all_that_nobody_else_wants_and_one_place_goes_round() -> None:
    network = concurrent(10, {"a": 4}).settled()
    network.ask(network.processes[2], 10)
    assert network.running in (2, 3)  # its part at once
    network.run(3 * REPORT_S)
    assert network.running == 10
    network = concurrent(1, {"a": 2, "b": 1}).settled()
    for process in network.processes:
        network.ask(process, 10_000)
    for _ in range(2000):
        network.end_some(0.3)
        network.step()
        assert network.running <= 1
    served = [process.served for process in network.processes]
    assert min(served) > 0.6 * max(served)


def test_a_newcomer_gets_its_part_and_what_one_has_that_dies_or_says_it_ends_is_free() -> None:
    network = concurrent(6, {"a": 2}).settled()
    newcomer = network.join("a")
    network.ask(newcomer, 6)
    assert newcomer.tenant.running <= 3
    network.run(1.0)
    assert newcomer.tenant.running == 6
    network.processes.remove(newcomer)
    staying, leaving = network.processes
    network.ask(leaving, 6)
    network.run(SILENT_S - 1)
    assert network.running == 0
    network.run(1.5)
    assert network.running == 6
    network.end(leaving)
    network.ask(staying, 6)
    network.run(2 * REPORT_S)
    assert staying.tenant.running == 6


def test_without_redis_each_router_holds_its_part_and_its_processes_share_it() -> None:
    network = concurrent(12, {"a": 3, "b": 1}).settled()
    network.is_cut = True
    network.run(AWAY_S + 1)
    assert {process.gossip.is_away for process in network.processes} == {True}
    network.ask(network.processes[0], 100)
    network.ask(network.processes[3], 100)
    network.run(1.0)
    assert [process.tenant.running for process in network.processes] == [9, 0, 0, 3]
    network.is_cut = False
    network.run(SILENT_S + 1)
    assert {process.gossip.is_away for process in network.processes} == {False}
    for limit in (12, 3):  # a lower one holds once the surplus has ended
        for process in network.processes:
            process.tenant.set_limits(Tenant(name=NAME, concurrency=limit), network.now_s)
        for _ in range(100):
            network.end_some(0.1)
            network.step()
            assert network.running <= 12
        network.run(1.0)
        assert network.running == limit


@given(st.integers(0, 100), st.dictionaries(st.integers(0, 20), st.integers(0, 200), min_size=1))
def test_the_limit_is_divided_whole_and_fairly(limit: int, demands: dict[int, int]) -> None:
    parts = split(limit, demands)
    assert sum(parts.values()) == limit
    short = [process for process in demands if parts[process] < demands[process]]
    for process in short:  # nobody who wants more has less than another, but for what cannot be divided
        assert parts[process] >= max(parts.values()) - 1
    if sum(demands.values()) <= limit:
        assert not short
    elif limit:
        most = max(parts.values())
        assert sorted(short, key=lambda one: parts[one] < most) == short  # the odd ones to the first


# --- kept conversations


def test_all_processes_keep_no_more_tokens_for_a_tenant_than_it_may_have_kept() -> None:
    network = Network({"a": 2, "b": 1}, Tenant(name=NAME, retain_tokens=100)).settled()
    one, other, _ = network.processes

    def keeps(process: Process, conversation: str, tokens: int) -> bool:
        return keep(process.tenant, conversation, tokens, 60, network.now_s)

    assert keeps(one, "s", 60)
    network.run(3 * REPORT_S)
    assert not any(keeps(process, "t", 50) for process in network.processes)
    assert keeps(other, "t", 40)
    newcomer = network.join("b")
    network.run(SETTLE_S)
    assert not keeps(newcomer, "u", 1)
    release(one.tenant, "s")
    network.run(3 * REPORT_S)
    assert keeps(newcomer, "u", 60)
    network.processes.remove(newcomer)  # what it had kept is bounded by its time, not by its life
    network.run(61.0)
    assert keeps(other, "v", 100)


# --- rates


@given(HOSTS, st.sampled_from([0.0, 0.3]), st.sampled_from([0.0, 0.2]), SEEDS)
@settings(max_examples=25)
def test_sums_heal_whatever_is_lost_late_or_doubled(
    hosts: dict[str, int], loses: float, delay_s: float, seed: int
) -> None:
    network = rated(hosts, seed).settled()
    for process in network.processes:  # each has told of the tenant once
        process.tenant.take(1, network.now_s)
        network.run(0.2)
    for process in network.processes:
        process.bucket().rate_s = 1e-9
    levels = [process.bucket().held(network.now_s) for process in network.processes]
    network.loses, network.delay_s, network.doubles = loses, delay_s, loses
    spent = 0
    for _ in range(40):
        with suppress(TooManyError):
            network.dice.choice(network.processes).tenant.take(0, network.now_s)
            spent += 1
        network.step()
    network.loses = 0.0
    network.run(SILENT_S)
    for process, level in zip(network.processes, levels, strict=True):
        assert process.bucket().held(network.now_s) == pytest.approx(level - spent, abs=0.01)


@pytest.mark.parametrize("hosts", [{"a": 1}, {"a": 4}, {"a": 2, "b": 2}])
@pytest.mark.parametrize("loses", [0.0, 0.2])
def test_however_many_processes_a_tenant_gets_its_rate_once(hosts: dict[str, int], loses: float) -> None:
    network = rated(hosts).settled()
    network.loses = loses
    served = network.run(30.0, flood=True)
    assert RATE * 30 <= served <= RATE * 31 + len(network.processes) * RATE


def test_what_one_gives_back_all_get_back_and_a_newcomer_finds_buckets_as_empty_as_the_others() -> None:
    network = rated({"a": 3}).settled()
    first = network.processes[0].tenant
    first.take(1000, network.now_s)
    first.settle(1000, 300, 200, network.now_s)
    for process in network.processes:
        assert process.tenant.tokens is not None
        process.tenant.tokens.rate_s = 1e-9
    network.run(0.2)
    levels = [
        process.tenant.tokens.held(network.now_s) for process in network.processes if process.tenant.tokens
    ]
    assert levels == pytest.approx([TOKENS - 500] * 3)
    network.run(2.0, flood=True)
    newcomer = network.join("a")
    network.run(SETTLE_S)
    assert newcomer.bucket().held(network.now_s) < RATE / 2


def test_without_redis_each_router_holds_its_share_and_its_return_costs_nothing() -> None:
    network = rated({"a": 2, "b": 2}).settled()
    network.run(1.0, flood=True)
    network.is_cut = True
    network.run(AWAY_S + 0.5, flood=True)
    assert {process.tenant.share for process in network.processes} == {0.5}
    assert network.run(20.0, flood=True) == pytest.approx(RATE * 20, rel=0.15)
    network.is_cut = False
    network.run(SILENT_S + 0.5)
    assert {process.tenant.share for process in network.processes} == {1.0}
    assert min(process.bucket().held(network.now_s) for process in network.processes) > 0


# --- sessions


def entry(number: int, seen_s: float) -> SessionEntry:
    return SessionEntry(f"r{number}", f"d{number}", seen_s, "p", tokens=number, answered=True, turns=number)


@given(HOSTS, st.sampled_from([0.0, 0.2]), SEEDS)
@settings(max_examples=25)
def test_every_process_comes_to_know_each_sessions_last_turn_and_which_are_over(
    hosts: dict[str, int], delay_s: float, seed: int
) -> None:
    network = concurrent(1, hosts, seed).settled()
    network.delay_s, network.doubles = delay_s, delay_s
    last: dict[str, str] = {}
    for number in range(1, 80):
        session, process = network.dice.choice("xyz"), network.dice.choice(network.processes)
        if network.dice.random() < 0.2:
            network.run(3 * REPORT_S)  # a client ends its session when it has had its last answer
            process.sessions.forget(named(session))
            last.pop(session, None)
            network.run(3 * REPORT_S)
        else:
            process.sessions.record(named(session), entry(number, network.now_s))
            last[session] = f"r{number}"
            network.step()
    network.run(1.0)
    for process in network.processes:
        known = {session: process.sessions.get(named(session), network.now_s) for session in "xyz"}
        assert {session: found.request_id for session, found in known.items() if found} == last


@given(st.integers(2, 5), st.integers(0, 5), SEEDS)
@settings(max_examples=40)
def test_no_turn_is_lost_or_late_while_siblings_find_each_other(count: int, steps: int, seed: int) -> None:
    """They start one after the other, and each has a turn when it has settled, or before."""
    network = concurrent(1, {"a": count}, seed)
    processes, network.processes = network.processes, []
    for number, process in enumerate(processes, start=1):
        network.processes.append(process)
        for _ in range(network.dice.randrange(steps + 1)):
            network.step()
        process.sessions.record(named(f"s{number}"), entry(number, network.now_s))
    network.run(SETTLE_S)
    for process in processes:
        assert len(process.sessions) == count, "within the time for which a process that starts waits"


def test_a_process_that_joins_is_told_all_sessions_by_one_of_its_siblings_though_that_ends() -> None:
    network = concurrent(1, {"a": 3}).settled()
    for number in range(1, SESSIONS):
        network.processes[number % 3].sessions.record(named(f"s{number}"), entry(number, network.now_s))
    network.run(1.0)
    newcomer = network.join("a")
    network.run(2 * REPORT_S)
    for process in network.processes[:3]:  # what they have yet to hand over is their last word
        network.end(process)
    network.step()
    assert len(newcomer.sessions) == SESSIONS - 1
    found = newcomer.sessions.get(named("s7"), network.now_s)
    assert found is not None
    assert (found.decode_id, found.tokens, found.turns) == ("d7", 7, 7)


# --- what others say


def lone(limits: Tenant | None = None) -> Process:
    limits = limits or Tenant(name=NAME, requests_s=RATE, tokens_min=TOKENS, concurrency=4)
    process = Process("me", "a", limits, 0.0, 1, remote=True)
    process.gossip.tick(SETTLE_S, UNIX_S)
    return process


def told(usage: Usage | None = None, sender: str = "x", number: int = 1, **more: object) -> bytes:
    said = {} if usage is None else {NAME: usage}
    return msgspec.msgpack.encode(News(sender, number, said, **more))  # type: ignore[arg-type]


def used(requests: float = 0.0, tokens: float = 0.0, running: int = 0, waiting: int = 0) -> Usage:
    return Usage(requests, tokens, requests, tokens, running, waiting, 0.0, 0.0)


def hear(process: Process, data: object, now_s: float = 1.0) -> News | None:
    return process.gossip.hear(data, now_s, UNIX_S + now_s, is_sibling=False)


DEEP = b"\x91" * 5000
NO_NEWS = [
    *(b"", b"garbage", b"\xc1", b"\x92\xa1x\x81", None, "text", DEEP, b"\x00" * (MAX_MESSAGE_BYTES + 1)),
    told(used(1.0))[:-3],
    msgspec.msgpack.encode(["x", 1, {NAME: ["many"] * 8}]),
    msgspec.msgpack.encode(["x", 1, {}, [["s", [], UNIX_S, ["r"]]]]),
]
NONSENSE = [
    used(requests=float("nan")),
    used(tokens=float("inf")),
    used(running=-5),
    used(waiting=MAX_RUNNING + 1),
    Usage(requests_left=float("-inf")),
]


def test_what_no_process_would_tell_counts_for_nothing() -> None:
    for data in NO_NEWS:
        process = lone()
        assert hear(process, data) is None, data
        assert (process.gossip.processes, process.bucket().level) == (1, RATE)
    for usage in NONSENSE:
        process = lone()
        hear(process, told(usage))
        process.gossip.tick(1.1, UNIX_S)
        assert (process.bucket().held(1.1), process.tenant.granted) == (RATE, 2), usage


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.floats(-1e300, 1e300)), max_size=30))
def test_nobody_is_locked_out_for_long_nor_let_beyond_the_limit_whatever_others_say(
    said: list[tuple[str, float]],
) -> None:
    process = lone()
    for number, (sender, amount) in enumerate(said):
        running = min(MAX_RUNNING, int(abs(amount)))
        hear(process, told(used(amount, amount, running), sender, number + 1))
        assert 0 <= (process.tenant.granted or 0) <= 4
    assert -MAX_DEBT * RATE - 0.01 <= process.bucket().held(1.0) <= RATE


def test_usage_that_comes_behind_a_later_message_counts_for_nothing() -> None:
    process = lone()
    for number, requests, charged in ((5, 5.0, 5), (4, 3.0, 5), (6, 6.0, 6)):
        hear(process, told(used(requests), number=number))
        assert process.bucket().held(1.0) == pytest.approx(RATE - charged)


def test_senders_are_bounded() -> None:
    process = lone()
    for number in range(MAX_PEERS + 9):
        hear(process, told(sender=f"s{number}"))
    assert process.gossip.processes == MAX_PEERS + 1


def turn(link: str = "s", replaced: tuple[str, ...] = (), seen_unix_s: float = UNIX_S, **more: Any) -> Turn:
    fields: dict[str, Any] = {"request_id": "r", "decode_id": "d", "seen_s": 0.0, "answered": True} | more
    return Turn(link, replaced, seen_unix_s, SessionEntry(**fields))


def test_turns_that_are_none_are_passed_over_and_odd_ones_bounded() -> None:
    long = "s" * 5000
    for one in (
        turn(decode_id=long),
        turn(long),
        turn("s", (long,)),
        turn(seen_unix_s=float("nan")),
        turn(seen_unix_s=-1e300),
    ):
        process = lone()
        hear(process, told(turns=(one,)))
        assert len(process.sessions) == 0, one
    hear(process, told(turns=(turn(seen_unix_s=UNIX_S + 1e9, tokens=-9, turns=-9, incarnation="mine"),)))
    assert process.sessions.get(named("s"), 1.0) == SessionEntry("r", "d", 1.0, "", 0, True, turns=1)


# --- what is published


def test_who_has_nothing_to_tell_speaks_only_now_and_then_and_who_is_alone_keeps_no_news() -> None:
    gossip = lone().gossip
    said = [bool(gossip.tick(1 + tick * REPORT_S, UNIX_S)) for tick in range(11)]
    assert [number for number, one in enumerate(said) if one] == [0, 5, 10]
    assert HEARTBEAT_S == 5 * REPORT_S
    network = concurrent(1, {"a": 1}).settled()
    (alone,) = network.processes
    alone.sessions.record(named("s"), entry(1, network.now_s))
    assert alone.sessions.news is None
    newcomer = network.join("a")
    network.run(1.0)
    alone.sessions.record(named("t"), entry(2, network.now_s))
    network.run(1.0)
    assert len(newcomer.sessions) == 2
    network.processes.remove(newcomer)
    network.run(SILENT_S + 1)
    assert alone.sessions.news is None


def test_messages_are_bounded_however_much_is_new() -> None:
    process = lone()
    process.tenants.configure(
        {f"{number:064}": f"tenant-{number}" for number in range(3 * MAX_ROWS)},
        [],
        TenantLimits(concurrency=1),
        1.0,
    )
    for tenant in process.tenants.all:
        tenant.running = 1
    for number in range(2000):
        process.sessions.record(named("s" * 200 + str(number)), entry(number, 1.0))
    messages = process.gossip.tick(2.0, UNIX_S)
    assert max(len(data) for data, _ in messages) <= MAX_MESSAGE_BYTES
    heard = [msgspec.msgpack.decode(data, type=News) for data, _ in messages]
    assert sum(len(news.usage) for news in heard) == 3 * MAX_ROWS
    assert sum(len(news.turns) for news in heard) == 2000
