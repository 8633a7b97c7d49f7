"""A tenant's limits over several processes: never exceeded, never left unused, whatever comes when."""

from __future__ import annotations

import random
from collections import deque
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.api.errors import TooManyError
from pdserve.router.config.tenants import Tenant, TenantLimits
from pdserve.router.processes.shared_limits import Divider, Report, Share, SharedLimits, Shares, split
from pdserve.router.tenants.registry import Tenants

NAME = "t"


class Process:
    """One whose messages take their time."""

    def __init__(self, concurrency: int) -> None:
        self.tenants = Tenants()
        self.lane_is_full = False
        self.configure(concurrency)
        self.limits = SharedLimits(self.tenants, lambda one: 0 if self.lane_is_full else one.waiting)
        self.said: deque[dict[str, Report]] = deque()
        self.heard: deque[dict[str, Share]] = deque()
        (self.tenant,) = self.tenants.all

    def configure(self, concurrency: int | None) -> None:
        """None: another has the only key."""
        limits = Tenant(name=NAME, concurrency=concurrency or 0, requests_s=10.0, tokens_min=6000)
        name = "another" if concurrency is None else NAME
        self.tenants.configure({"0" * 64: name}, [] if name != NAME else [limits], TenantLimits(), 0.0)

    def tell(self) -> None:
        if wants := self.limits.changed():
            self.said.append(wants)

    def start(self) -> None:
        """Whoever waits and may."""
        while self.tenant.waiting and self.tenant.is_free and not self.lane_is_full:
            self.tenant.waiting -= 1
            self.tenant.running += 1


class Cluster:
    def __init__(self, processes: int, concurrency: int) -> None:
        self.divider = Divider()
        self.processes = {number: Process(concurrency) for number in range(processes)}
        self.now_s = 0.0

    @property
    def running(self) -> int:
        return sum(process.tenant.running for process in self.processes.values())

    def deliver(self, shares: Shares) -> None:
        for number, of_tenants in shares.items():
            if number in self.processes:
                self.processes[number].heard.append(of_tenants)

    def step(self, number: int, which: str) -> None:
        process = self.processes[number]
        if which == "arrive":
            process.tenant.waiting += 1
        elif which == "end" and process.tenant.running:
            process.tenant.running -= 1
        elif which == "tell":
            process.tell()
        elif which == "parent" and process.said:
            self.deliver(self.divider.on_reports(number, process.said.popleft()))
        elif which == "hear" and process.heard:
            process.limits.apply(process.heard.popleft(), self.now_s)
        elif which == "die":
            del self.processes[number]
            self.deliver(self.divider.on_end(number))
            return
        process.start()

    def settle(self) -> None:
        """Until all has been said, again and again."""
        for _ in range(8):
            for process in self.processes.values():
                process.tell()
            for number, process in self.processes.items():
                while process.said:
                    self.step(number, "parent")
            for number, process in self.processes.items():
                while process.heard:
                    self.step(number, "hear")


WHICH = ("arrive", "arrive", "end", "tell", "parent", "hear")


@pytest.mark.parametrize("seed", range(40))
def test_the_concurrency_is_never_exceeded_and_is_used_where_it_is_wanted(seed: int) -> None:
    dice = random.Random(seed)
    concurrency = dice.choice([1, 2, 3, 8, 50])
    cluster = Cluster(dice.randrange(1, 6), concurrency)
    for _ in range(600):
        if len(cluster.processes) > 1 and dice.random() < 0.002:
            cluster.step(dice.choice(list(cluster.processes)), "die")
        if dice.random() < 0.002:
            cluster.processes[max(cluster.processes) + 1] = Process(concurrency)
        cluster.step(dice.choice(list(cluster.processes)), dice.choice(WHICH))
        assert cluster.running <= concurrency
    cluster.settle()
    waiting = sum(process.tenant.waiting for process in cluster.processes.values())
    assert cluster.running == concurrency or not waiting
    assert cluster.divider.held(NAME) == concurrency


@pytest.mark.parametrize("concurrency", [1, 2, 5])
def test_nobody_waits_for_ever(concurrency: int) -> None:
    cluster = Cluster(4, concurrency)
    ended = dict.fromkeys(cluster.processes, 0)
    for _ in range(40):
        for process in cluster.processes.values():
            process.tenant.waiting = 50
        cluster.settle()
        for number, process in cluster.processes.items():
            ended[number] += process.tenant.running
            process.tenant.running = 0
            process.start()
    assert min(ended.values()) * 3 >= max(ended.values()) > 0
    assert sum(ended.values()) >= 0.9 * 40 * concurrency


def test_who_waits_gets_a_turn_though_nothing_that_is_told_changes() -> None:
    cluster = Cluster(3, 1)
    ended = dict.fromkeys(cluster.processes, 0)
    for _ in range(60):
        cluster.settle()
        for number, process in cluster.processes.items():  # the next begins before anybody hears of the end
            ended[number] += process.tenant.running
            process.tenant.waiting, process.tenant.running = 50 - process.tenant.running, 0
            process.start()
            process.tenant.waiting = 50 - process.tenant.running
    assert min(ended.values()) > 5


def test_what_one_process_charges_the_others_charge_once() -> None:
    cluster = Cluster(3, 0)
    for process in cluster.processes.values():
        process.tell()
    cluster.settle()
    cluster.processes[0].tenant.take(100, 0.0)
    cluster.processes[1].tenant.take(50, 0.0)
    cluster.settle()
    cluster.processes[0].tenant.settle(100, 30, 20, 0.0)
    cluster.settle()
    for process in cluster.processes.values():
        assert process.tenant.requests is not None
        assert process.tenant.tokens is not None
        assert process.tenant.requests.level == 10.0 - 2
        assert process.tenant.tokens.level == 6000 - 100


def test_what_is_charged_after_a_quiet_time_is_not_forgotten() -> None:
    cluster = Cluster(4, 0)
    cluster.settle()
    cluster.now_s, let_in = 100.0, 0
    for process in cluster.processes.values():
        with suppress(TooManyError):
            for _ in range(30):
                process.tenant.take(1, cluster.now_s)
                let_in += 1
        cluster.settle()
    assert let_in == 10


def test_what_nobody_wants_is_spread_evenly() -> None:
    cluster = Cluster(4, 8)
    cluster.settle()
    assert [process.tenant.granted for process in cluster.processes.values()] == [2, 2, 2, 2]


def test_the_last_process_may_end_whatever_its_tenants_are() -> None:
    divider = Divider()
    want = Report(limit=4, running=1, waiting=0, number=0, requests=0.0, tokens=0.0)
    divider.on_reports(1, {"a": want, "b": want})
    assert divider.on_end(1) == {}
    assert divider.held("a") == divider.held("b") == 0
    divider.on_reports(2, {"b": want})
    assert divider.held("b") == 4


def test_a_tenant_whose_key_is_taken_away_and_given_back_has_its_share() -> None:
    cluster = Cluster(2, 4)
    cluster.settle()
    (tenant,) = cluster.processes[0].tenants.all
    tenant.waiting = 2
    cluster.step(0, "tell")
    for process in cluster.processes.values():
        process.configure(None)
    assert tenant.running == 2
    cluster.settle()
    for process in cluster.processes.values():
        process.configure(4)
        (process.tenant,) = process.tenants.all
        process.tenant.waiting = 9
    assert cluster.processes[0].tenant is tenant
    cluster.settle()
    assert cluster.running == 4


def test_the_newest_process_says_what_the_limit_is() -> None:
    cluster = Cluster(2, 10)
    cluster.settle()
    for number in (2, 3):
        cluster.processes[number] = Process(3)
    cluster.settle()
    cluster.step(0, "die")
    cluster.step(1, "die")
    for process in cluster.processes.values():
        process.tenant.waiting = 9
    cluster.settle()
    assert cluster.running == 3


@pytest.mark.parametrize("concurrency", [1, 4])
def test_who_waits_for_workers_holds_up_nobody_elsewhere(concurrency: int) -> None:
    cluster = Cluster(2, concurrency)
    cluster.processes[0].lane_is_full = True
    ended = 0
    for _ in range(20):
        for process in cluster.processes.values():
            process.tenant.waiting = 9
        cluster.settle()
        other = cluster.processes[1].tenant
        ended += other.running
        other.running = 0
    assert ended == 20 * concurrency


def test_a_process_alone_divides_with_nobody() -> None:
    tenants = Tenants()
    tenants.configure({}, [], TenantLimits(concurrency=2), 0.0)
    tenants.anonymous.running = 1
    assert tenants.anonymous.is_free


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
