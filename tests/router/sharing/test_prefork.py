"""The parent of the router processes, as a state machine: children that die, hang or cannot be started at any
moment, reloads, and a stop. The children are stand-ins and time is virtual. Real processes are started in
test_processes.py.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import socket
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pdserve.errors import ConfigError, StartupError
from pdserve.router.config.limits import Deadlines
from pdserve.router.config.router import RouterConfig
from pdserve.router.metrics.stats import Snapshot
from pdserve.router.sharing import prefork
from pdserve.router.sharing.files import MetricsFiles
from pdserve.router.sharing.fork import REPLACED, Setup
from pdserve.router.sharing.prefork import (
    MAX_REPLACED,
    MAX_RESTART_S,
    READY_TIMEOUT_S,
    STOP_SLACK_S,
    Child,
    ChildFailed,
    Prefork,
)
from tests.support.virtual_time import run_virtually

PROCESSES = 3
TOTAL_S = 300.0
CONFIG = RouterConfig(
    decode=("http://w:1",),
    port=0,
    processes=PROCESSES,
    stop_grace_s=5.0,
    deadlines=Deadlines(total_s=TOTAL_S),
)


class World:
    """What happens to the children, and what must hold of them."""

    def __init__(self, seed: int = 0) -> None:
        self.dice = random.Random(seed)
        self.has_faults = True
        self.config: RouterConfig | ConfigError = CONFIG
        self.made: list[StandIn] = []
        self.is_stopping = False
        self.start_s: float | None = None

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
        return [child for child in self.alive if child.is_ready.is_set() and not child.is_told]


class StandIn(Child):
    """A child without a process."""

    world: World

    def __init__(self, setup: Setup, listening: socket.socket, admin: socket.socket | None) -> None:
        world = self.world
        if world.is_hit(0.1):
            raise StartupError("no router process can be started")
        assert listening.fileno() >= 0
        self.pid, self.setup, self.place = len(world.made), setup, listening
        self.made_s = asyncio.get_running_loop().time()
        self.is_ready, self.is_stopping = asyncio.Event(), False
        self.over = asyncio.Event()
        self.is_told = self.was_ready = False
        self.has_long_request = world.is_hit(0.2)
        self.starting = asyncio.create_task(self.start())
        self.ended = asyncio.create_task(self.exit_status())
        world.made.append(self)

    def send(self, number: signal.Signals) -> None:
        if number == signal.SIGKILL:
            self.end(-9)

    async def start(self) -> None:
        start_s = self.world.start_s
        await asyncio.sleep(self.world.dice.uniform(0.1, 3.0) if start_s is None else start_s)
        if self.world.is_hit(0.1):
            self.end(1)
        elif not self.world.is_hit(0.05):  # or it hangs
            self.was_ready = True
            MetricsFiles(self.setup.directory).write(
                self.setup.name, Snapshot({"requests": {("/", "200"): 1}})
            )
            self.is_ready.set()

    async def exit_status(self) -> int:
        await self.over.wait()
        self.starting.cancel()
        return self.status

    def end(self, status: int) -> None:
        if not self.over.is_set():
            self.status = status
            self.over.set()

    def tell(self, number: signal.Signals) -> None:
        """Somebody else serves on its socket, or did until a fault; then it is about to be replaced."""
        if not self.world.is_stopping and self.was_ready and not self.is_told:
            others = [child for child in self.world.made if child.place is self.place and child is not self]
            assert any(child.was_ready and not child.is_told for child in others)
        self.is_told = self.is_stopping = True
        is_patient = number == REPLACED and self.has_long_request
        least_s, most_s = (TOTAL_S, TOTAL_S + 1) if is_patient else (0.0, 4.0)
        late_s = 10_000.0 if self.world.is_hit(0.1) else self.world.dice.uniform(least_s, most_s)
        asyncio.get_running_loop().call_later(late_s, self.end, 0)


def happens(world: World) -> None:
    """One thing, at random."""
    dice, alive = world.dice, world.alive
    what = dice.choice(["die", "reload", "wrong", "fixed", "nothing"])
    if what == "reload":
        world.config = msgspec.structs.replace(CONFIG, log_level=dice.choice(["debug", "info", "error"]))
    elif what == "wrong":
        world.config = ConfigError("wrong")
    elif what == "fixed":  # what a reload cannot change
        world.config = msgspec.structs.replace(CONFIG, processes=PROCESSES + 1)
    if what in ("reload", "wrong", "fixed"):
        os.kill(os.getpid(), signal.SIGHUP)
    elif what == "die" and alive:
        dice.choice(alive).end(1)


async def is_quiet(world: World) -> None:
    """Long enough for every restart, and for children that hang or have a long request."""
    world.has_faults = False
    await asyncio.sleep(3 * PROCESSES * READY_TIMEOUT_S + TOTAL_S + 60)


def check_quiet(world: World) -> None:
    """All places are served by one configuration, and nobody is left over."""
    children = world.serving
    assert world.alive == children
    assert len({child.place for child in children}) == len(children) == PROCESSES
    assert len({child.setup.config.log_level for child in children}) == 1


@pytest.fixture
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(getattr(request, "param", 0))
    monkeypatch.setattr(StandIn, "world", world, raising=False)
    monkeypatch.setattr(prefork, "Child", StandIn)
    return world


def parent(world: World, config: RouterConfig = CONFIG) -> Prefork:
    source: Any = SimpleNamespace(path=None, load=world.load)
    return Prefork(config, source, is_strict=True)


@pytest.mark.parametrize("world", range(40), indirect=True)
def test_whatever_happens_every_place_is_served_and_nobody_is_left_behind(world: World) -> None:
    async def main() -> None:
        world.has_faults = False
        running = asyncio.create_task(parent(world).run())
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

        directory = world.made[0].setup.directory
        files, served = MetricsFiles(directory), sum(child.was_ready for child in world.made)
        assert len(files.stamps(but="")) == PROCESSES  # of nobody who has ended
        assert files.add_up("nobody", Snapshot(), 0).total("requests") == served  # whose counts stay

        for _ in range(world.dice.randrange(3)):  # it may be stopped amid anything
            world.has_faults = True
            happens(world)
            await asyncio.sleep(world.dice.uniform(0, 3))
        world.is_stopping = True
        os.kill(os.getpid(), signal.SIGTERM)
        await running
        assert world.alive == []
        assert not directory.exists()

    run_virtually(main())


@pytest.mark.parametrize("world", range(10), indirect=True)
def test_a_child_that_cannot_start_at_first_ends_the_router(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "is_hit", lambda share: world.dice.random() < 0.5)

    async def main() -> None:
        world.is_stopping = True
        with pytest.raises(StartupError) as failed:
            await parent(world).run()
        if isinstance(failed.value, ChildFailed):  # its own words say why
            assert failed.value.status == 1
        assert world.alive == []

    run_virtually(main())


def test_a_child_that_dies_is_started_again_less_and_less_often_and_replaced_ones_finish_in_their_time(
    world: World,
) -> None:
    world.has_faults, world.start_s = False, 0.0
    world.config = config = msgspec.structs.replace(CONFIG, processes=1)

    async def main() -> None:
        running = asyncio.create_task(parent(world, config).run())
        for _ in range(8):
            while not world.serving:  # noqa: ASYNC110 - in virtual time
                await asyncio.sleep(0.1)
            world.serving[0].end(1)
            await asyncio.sleep(0.1)
        starts_s = [child.made_s for child in world.made]
        pauses_s = [later - earlier for earlier, later in itertools.pairwise(starts_s)]
        assert [round(pause_s) for pause_s in pauses_s] == [1, 2, 4, 8, 16, MAX_RESTART_S, MAX_RESTART_S]
        await asyncio.sleep(MAX_RESTART_S + 1)
        for _ in range(3 * MAX_REPLACED):  # but not any number of them
            await asyncio.sleep(1)
            world.serving[0].has_long_request = True
            os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(config.stop_grace_s + STOP_SLACK_S)
        assert len(world.alive) == 1 + MAX_REPLACED
        await asyncio.sleep(TOTAL_S)
        assert len(world.alive) == 1
        world.is_stopping = True
        os.kill(os.getpid(), signal.SIGINT)
        await running

    run_virtually(main())
