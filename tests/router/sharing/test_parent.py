"""The parent of several router processes, as a state machine: children that die, hang or cannot be started at
any moment, reloads, and a stop. The children are stand-ins and time is virtual. Real processes are started in
test_processes.py.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pdserve.errors import ConfigError, StartupError
from pdserve.router.config.router import RouterConfig
from pdserve.router.fleet.changes import FleetChange
from pdserve.router.fleet.health_check import STRICT, FirstRound
from pdserve.router.metrics.stats import Snapshot
from pdserve.router.processes import parent as parent_module
from pdserve.router.processes.channel import (
    ChannelClosed,
    Collect,
    Collected,
    Last,
    LimitsTold,
    Ready,
    Refused,
    Reload,
)
from pdserve.router.processes.parent import READY_TIMEOUT_S, Child, Parent, Setup
from tests.support.virtual_time import run_virtually

PROCESSES = 3
CONFIG = RouterConfig(decode=("http://w:1",), host="127.0.0.1", port=0, processes=PROCESSES, stop_grace_s=5.0)


class World:
    """What happens to the children, and what must hold of them."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.has_faults = True
        self.config: RouterConfig | ConfigError = CONFIG
        self.made: list[StandIn] = []
        self.joined: set[str] = set()
        self.refused: frozenset[str] = frozenset()
        self.reloads = 0
        self.sums: list[Snapshot] = []
        self.is_stopping = False

    def is_hit(self, share: float) -> bool:
        return self.has_faults and self.dice.random() < share

    def load(self) -> RouterConfig:
        if isinstance(self.config, ConfigError):
            raise self.config
        return self.config

    @property
    def alive(self) -> list[StandIn]:
        return [child for child in self.made if not child.over.is_set()]

    @property
    def serving(self) -> list[StandIn]:
        return [child for child in self.alive if child.is_ready.is_set() and not child.is_terminated]

    @property
    def requests(self) -> int:
        """Known to the parent once it has asked: of a killed child, what it had told before."""
        return sum(child.told if child.was_killed else child.requests for child in self.made)


class StandIn(Child):
    """A child without a process."""

    world: World

    def __init__(
        self, setup: Setup, listening: socket.socket, admin: Any, on_message: Any, first: FirstRound
    ) -> None:
        world = self.world
        if world.is_hit(0.1):
            raise StartupError("no router process can be started")
        assert listening.fileno() >= 0
        self.number, self.setup, self.place = len(world.made), setup, listening
        self.has_admin = admin is not None
        self.is_ready, self.is_stopping, self.has_left = asyncio.Event(), False, False
        self.metrics = Snapshot()
        self.on_message = on_message
        self.over = asyncio.Event()
        self.is_terminated = self.was_ready = self.was_killed = False
        self.requests = self.told = self.reloads = 0
        self.heard: list[bytes] = []
        self.known = {change.worker for change in first.changes}
        if first is not STRICT:
            assert first.refused == world.refused
        self.channel: Any = SimpleNamespace(send=self.hear, collect=self.collect)
        self.process: Any = SimpleNamespace(
            pid=self.number, terminate=self.terminate, kill=lambda: self.end(-9)
        )
        self.serving = asyncio.create_task(self.live())
        self.ended = asyncio.create_task(self.exit_status())
        world.made.append(self)

    async def live(self) -> None:
        starting = asyncio.create_task(self.start())
        await self.over.wait()
        starting.cancel()

    async def start(self) -> None:
        await asyncio.sleep(self.world.dice.uniform(0.1, 3.0))
        if self.world.is_hit(0.1):
            self.end(1)
        elif not self.world.is_hit(0.05):  # or it hangs
            self.was_ready = True
            self.on_message(self, Ready())
            self.report()

    async def exit_status(self) -> int:
        await self.over.wait()
        return self.status

    def end(self, status: int) -> None:
        if not self.over.is_set():
            self.status, self.was_killed = status, status != 0
            self.over.set()

    def terminate(self) -> None:
        """Somebody else serves on its socket, or did until a fault; then it is about to be replaced."""
        if not self.world.is_stopping and self.was_ready:
            others = [child for child in self.world.made if child.place is self.place and child is not self]
            assert any(child.was_ready and not child.is_terminated for child in others)
        self.is_terminated = True
        asyncio.get_running_loop().call_later(
            60.0 if self.world.is_hit(0.1) else self.world.dice.uniform(0, 4), self.leave
        )

    def leave(self) -> None:
        if not self.over.is_set():
            self.told = self.requests
            self.on_message(self, Last(self.own_metrics()))
            self.end(0)

    def own_metrics(self) -> Snapshot:
        return Snapshot({"requests": {("/", "200"): self.requests}, "requests_in_flight": {(): 1}})

    async def collect(self, timeout_s: float) -> Snapshot:
        if self.over.is_set():
            raise ChannelClosed("gone")
        if self.world.is_hit(0.2):
            await asyncio.sleep(timeout_s)
            raise ChannelClosed("silent")
        self.told = self.requests
        return self.own_metrics()

    def report(self) -> None:
        if not self.over.is_set():
            self.on_message(self, LimitsTold(b"%d" % self.number))

    def hear(self, message: object) -> None:
        if isinstance(message, FleetChange):
            self.known.add(message.worker)
        elif isinstance(message, Reload):
            self.reloads += 1
        elif isinstance(message, LimitsTold):
            self.heard.append(message.data)
        elif isinstance(message, Collected):
            self.world.sums.append(message.metrics)


def happens(world: World) -> None:
    """One thing, at random."""
    dice, alive = world.dice, world.alive
    what = dice.choice(["requests", "die", "reload", "wrong", "fixed", "join", "refuse", "keys", "collect"])
    if what == "reload":
        world.config = msgspec.structs.replace(CONFIG, log_level=dice.choice(["debug", "info", "error"]))
    elif what == "wrong":
        world.config = ConfigError("wrong")
    elif what == "fixed":  # what a reload cannot change
        world.config = msgspec.structs.replace(CONFIG, processes=PROCESSES + 1)
    if what in ("reload", "wrong", "fixed"):
        os.kill(os.getpid(), signal.SIGHUP)
    if not alive:
        return
    child = dice.choice(alive)
    if what == "die":
        child.end(1)
    elif what == "requests" and child in world.serving:
        child.requests += dice.randrange(10)
    elif what == "collect":
        child.on_message(child, Collect(0))
    elif what == "refuse":
        world.refused = frozenset({f"r:{dice.randrange(9)}"})
        child.on_message(child, Refused(world.refused))
    elif what == "join":
        change = FleetChange("join", f"http://joined:{len(world.joined) + 1}")
        world.joined.add(change.worker)
        child.known.add(change.worker)
        child.on_message(child, change)
    elif what == "keys":
        before = {other: other.reloads for other in alive}
        child.on_message(child, Reload())
        assert {other for other in alive if other.reloads > before[other]} == set(alive) - {child}


async def is_quiet(world: World) -> None:
    """Long enough for every restart, and for children that hang."""
    world.has_faults = False
    await asyncio.sleep(3 * PROCESSES * READY_TIMEOUT_S)


def check_quiet(world: World) -> None:
    """All places are served by one configuration, and nobody is left over."""
    children = world.serving
    assert world.alive == children
    assert len({child.place for child in children}) == len(children) == PROCESSES
    assert len({child.setup.config.log_level for child in children}) == 1
    assert all(child.known == world.joined for child in children)
    for one in children:  # what is told comes to all, in one order
        for other in children:
            both = min(len(one.heard), len(other.heard))
            assert both
            assert one.heard[-both:] == other.heard[-both:]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_every_place_is_served_and_nobody_is_left_behind(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(seed)
    monkeypatch.setattr(StandIn, "world", world, raising=False)
    monkeypatch.setattr(parent_module, "Child", StandIn)

    async def main() -> None:
        world.has_faults = False
        source: Any = SimpleNamespace(path=None, load=world.load)
        running = asyncio.create_task(Parent(CONFIG, source, STRICT).run())
        await is_quiet(world)
        check_quiet(world)
        world.has_faults = True
        for _ in range(60):
            await asyncio.sleep(world.dice.uniform(0, 3))
            happens(world)
        await is_quiet(world)
        check_quiet(world)

        world.config = msgspec.structs.replace(CONFIG, log_level="warning")
        os.kill(os.getpid(), signal.SIGHUP)
        await is_quiet(world)
        check_quiet(world)
        assert {child.setup.config.log_level for child in world.serving} == {"warning"}

        child = world.serving[0]
        child.on_message(child, Collect(1))
        await asyncio.sleep(1)
        seen = [one.value("requests", "/", "200") for one in world.sums]
        assert seen == sorted(seen)  # counters never fall
        assert seen[-1] == world.requests
        assert world.sums[-1].value("requests_in_flight") == PROCESSES
        assert world.sums[-1].is_whole

        for _ in range(world.dice.randrange(3)):  # it may be stopped amid anything
            world.has_faults = True
            happens(world)
            await asyncio.sleep(world.dice.uniform(0, 3))
        world.is_stopping = True
        os.kill(os.getpid(), signal.SIGTERM)
        await running
        assert world.alive == []

    run_virtually(main())


@pytest.mark.parametrize("seed", range(10))
def test_a_child_that_cannot_start_at_first_ends_the_router(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(seed)
    monkeypatch.setattr(StandIn, "world", world, raising=False)
    monkeypatch.setattr(parent_module, "Child", StandIn)
    monkeypatch.setattr(world, "is_hit", lambda share: world.dice.random() < 0.5)

    async def main() -> None:
        world.is_stopping = True
        with pytest.raises(StartupError):
            await Parent(CONFIG, None, STRICT).run()
        assert world.alive == []

    run_virtually(main())
