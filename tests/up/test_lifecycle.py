"""The supervisor's decisions: a random world against the rules, and each case in words. No process starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdserve.up import events as ev
from pdserve.up.config import ClusterFile, ClusterSettings
from pdserve.up.hosts import Site
from pdserve.up.lifecycle import Lifecycle
from pdserve.up.plan import make_plan
from pdserve.up.spec import Plan
from tests.support.suite.extended import examples

NAMES = ("pool0", "prefill0", "decode0", "router")
RESTARTED = NAMES[1:3]
"""When all is restarted; the pool node goes on by itself, with its pages."""
STAGES = (("pool0",), ("prefill0", "decode0"), ("router",))


def plan_of(
    tables: dict[str, dict[str, Any]] | None = None,
    decode: int = 1,
    before: Plan | None = None,
    **cluster: Any,
) -> Plan:
    """One process of each role; `tables` adds to theirs. `decode`: so many of these."""
    tables = tables or {}
    cluster = {"start_parallelism": 2, "stop_grace_s": 5.0, "start_timeout_s": 60.0, **cluster}
    file = ClusterFile(
        cluster=ClusterSettings(**cluster),
        router=tables.get("router", {}),
        **{role: [tables.get(role, {})] for role in ("pool", "prefill")},
        decode=[tables.get("decode", {})] * decode,
    )
    ports = iter(range(7000 if before is None else 7100, 7200))
    return make_plan(file, program=("x",), run_dir=Path("/run"), uid=0, ports=ports, before=before)


def on_two_hosts() -> Plan:
    """A router on each."""
    hosts = {"pool0": "a", "prefill0": "b", "decode0": "a", "router0": "a", "router1": "b"}
    file = ClusterFile(pool=[{}], prefill=[{}], decode=[{}], router={"count": 2, "port": 80})
    ports = iter(range(7000, 7100))
    return make_plan(file, program=("x",), run_dir=Path("/run"), uid=0, ports=ports, site=Site(hosts))


class World:
    """Processes that do as they are told, and a clock."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.lifecycle = Lifecycle(plan)
        self.now_s = 0.0
        self.alive: list[str] = []
        """In the order of their start."""
        self.done: list[ev.Action] = []
        self.said: list[str] = []
        self.scaled: list[str] = []
        """How each scaling ended."""
        self.exit: int | None = None
        self.take(self.lifecycle.begin(0.0))

    def tell(self, event: ev.Event) -> list[ev.Action]:
        actions = self.lifecycle.handle(event, self.now_s)
        self.take(actions)
        return actions

    def take(self, actions: list[ev.Action]) -> None:
        for action in actions:
            assert self.exit is None, "nothing comes after the end"
            self.done.append(action)
            if isinstance(action, ev.Start):
                assert action.name not in self.alive
                self.alive.append(action.name)
            elif isinstance(action, ev.Terminate | ev.Kill | ev.Reload | ev.Upgrade):
                assert action.name in self.alive
            elif isinstance(action, ev.Say):
                self.said.append(action.text)
            elif isinstance(action, ev.Scaled):
                self.scaled.append(action.problem)
            elif isinstance(action, ev.Exit):
                assert not self.alive
                self.exit = action.status

    def ready(self, *names: str) -> None:
        for name in names:
            self.tell(ev.BecameReady(name))

    def end(self, name: str, status: int = 0, **more: Any) -> list[ev.Action]:
        self.alive.remove(name)
        return self.tell(ev.Ended(name, status, **more))

    def scale(self, **more: Any) -> list[ev.Action]:
        """To a plan with other numbers of workers; those that leave end when they are told to."""
        self.plan = plan_of(before=self.plan, **more)
        return self.tell(ev.ScaleAsked(self.plan))

    def wait(self, seconds: float) -> list[ev.Action]:
        """Time passes; what is due meanwhile is done when it is due."""
        until_s = self.now_s + seconds
        actions: list[ev.Action] = []
        while (at_s := self.lifecycle.wake_at_s) is not None and at_s <= until_s:
            self.now_s = max(self.now_s, at_s)
            actions += self.tell(ev.Tick())
        self.now_s = until_s
        return actions

    def up(self) -> World:
        for stage in self.plan.stages:
            self.ready(*(spec.name for spec in stage))
        assert isinstance(self.done[-1], ev.Announce)
        self.said.clear()
        return self


class AnyWorld(RuleBasedStateMachine):
    """Whatever happens in whatever order, the rules of lifecycle.py's docstring hold."""

    @initialize(
        parallelism=st.integers(1, 3),
        never=st.sets(st.sampled_from(["pool", "prefill", "decode", "router"])),
        stop_on_loss=st.booleans(),
        restarts=st.integers(0, 3),
    )
    def start(self, parallelism: int, never: set[str], stop_on_loss: bool, restarts: int) -> None:
        tables: dict[str, dict[str, Any]] = {role: {"restart": "never"} for role in never}
        plan = plan_of(
            tables, start_parallelism=parallelism, stop_on_loss=stop_on_loss, max_restarts=restarts
        )
        self.parallelism = parallelism
        self.is_ready: set[str] = set()
        self.was_ready: set[str] = set()
        self.killed: set[str] = set()
        self.told: set[str] = set()
        self.upgrading: set[str] = set()
        self.stopped = False
        self.scaling = self.restarting = False
        self.tables = tables
        self.settings = {
            "start_parallelism": parallelism,
            "stop_on_loss": stop_on_loss,
            "max_restarts": restarts,
        }
        self.world = World(plan)
        self.check(self.world.done)

    def check(self, actions: list[ev.Action]) -> None:
        for action in actions:
            if isinstance(action, ev.Start):
                assert not self.stopped
                assert action.again == (action.name in self.was_ready)
                stage = {"pool0": 0, "router": 2}.get(action.name, 1)
                assert all(name in self.was_ready for names in STAGES[:stage] for name in names)
                self.killed.discard(action.name)
            elif isinstance(action, ev.Scaled):
                self.scaling = False
            elif isinstance(action, ev.Restarted):
                self.restarting = False
            elif isinstance(action, ev.Terminate):
                self.told.add(action.name)
            elif isinstance(action, ev.Upgrade):
                assert action.name in self.is_ready
                self.upgrading.add(action.name)
            elif isinstance(action, ev.Kill):
                self.killed.add(action.name)
            elif isinstance(action, ev.Announce):
                assert self.was_ready >= set(NAMES)
            elif isinstance(action, ev.Say) and action.text.endswith("stopping all processes"):
                self.stopped = True
            elif isinstance(action, ev.Say) and action.text.endswith(" has stopped"):
                self.was_ready.discard(action.text.split()[0])

    @precondition(lambda self: self.world.exit is None)
    @rule(data=st.data())
    def a_process_is_ready(self, data: st.DataObject) -> None:
        if waiting := [name for name in self.world.alive if name not in self.is_ready]:
            name = data.draw(st.sampled_from(waiting))
            late = name in self.killed
            if not late:
                self.is_ready.add(name)
                self.was_ready.add(name)
            self.check(self.world.tell(ev.BecameReady(name)))

    @precondition(lambda self: self.world.alive)
    @rule(data=st.data(), status=st.sampled_from([0, 1, -9]))
    def a_process_ends(self, data: st.DataObject, status: int) -> None:
        name = data.draw(st.sampled_from(self.world.alive))
        self.is_ready.discard(name)
        self.told.discard(name)
        self.upgrading.discard(name)
        self.check(self.world.end(name, status))

    @precondition(lambda self: self.world.exit is None and self.upgrading)
    @rule(problem=st.sampled_from(["", "", "its new version would not start"]))
    def the_pool_node_is_upgraded(self, problem: str) -> None:
        self.check(self.world.tell(ev.Upgraded(self.upgrading.pop(), problem)))

    @rule(seconds=st.sampled_from([0.5, 3.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.check(self.world.wait(seconds))

    @precondition(lambda self: self.world.exit is None and not self.scaling and not self.restarting)
    @rule()
    def restart_all(self) -> None:
        self.restarting = True
        self.check(self.world.tell(ev.RestartAsked()))

    @precondition(lambda self: self.world.exit is None and not self.scaling and not self.restarting)
    @rule(decode=st.integers(1, 3))
    def scale(self, decode: int) -> None:
        self.scaling = True
        self.check(self.world.scale(tables=self.tables, decode=decode, **self.settings))

    @precondition(lambda self: self.world.exit is None)
    @rule()
    def stop(self) -> None:
        self.stopped = True
        self.check(self.world.tell(ev.StopAsked("SIGTERM")))

    @invariant()
    def no_more_start_at_once_than_may(self) -> None:
        assert len(set(self.world.alive) - self.is_ready) <= self.parallelism

    @invariant()
    def at_most_one_is_restarted_at_a_time(self) -> None:
        if not self.stopped:
            told = (self.told | self.upgrading) & set(self.world.alive)
            assert len(told) <= 1 or not told & set(NAMES)

    def teardown(self) -> None:
        """It can always be stopped: all that is alive ends when it is told to, and nothing is left."""
        world = self.world
        if world.exit is None:
            self.stop()
        for _ in range(len(NAMES) + 3):
            for name in sorted(self.told & set(world.alive)):
                self.told.discard(name)
                self.check(world.end(name))
        assert world.exit is not None
        assert world.alive == []
        assert not self.scaling, "who asked gets an answer"
        assert not self.restarting, "who asked gets an answer"


TestAnyWorld = AnyWorld.TestCase
TestAnyWorld.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


def test_by_default_a_host_starts_as_many_as_it_has_processors_and_gpu_workers_all_at_once() -> None:
    world = World(plan_of(decode=3, start_parallelism=0))
    world.ready("pool0")
    assert world.alive == ["pool0", "prefill0", "decode0"]
    world.ready("prefill0")
    assert world.alive == ["pool0", "prefill0", "decode0", "decode1"]
    gpu = {"env": {"CUDA_VISIBLE_DEVICES": "0"}}
    world = World(plan_of({"prefill": gpu, "decode": gpu}, decode=5, start_parallelism=0))
    world.ready("pool0")
    assert len(world.alive) == 1 + 6


def names(actions: list[ev.Action], kind: type[Any]) -> list[str]:
    return [action.name for action in actions if isinstance(action, kind)]


def test_slow_starts_are_told_every_few_seconds() -> None:
    world = World(plan_of())
    world.wait(11.0)
    assert world.said == ["starting pool0", "waiting for pool0 (5 s)", "waiting for pool0 (10 s)"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"status": 3}, "decode0 exited with status 3 before it was ready"),
        ({"status": -9}, "decode0 was killed by SIGKILL before it was ready"),
        (
            {"status": 1, "problem": "/run/decode0.log: cannot be written"},
            "/run/decode0.log: cannot be written",
        ),
    ],
)
def test_a_process_that_ends_before_it_was_ever_ready_stops_the_cluster(
    more: dict[str, Any], message: str
) -> None:
    world = World(plan_of())
    world.ready("pool0", "prefill0")
    world.said.clear()
    world.end("decode0", lines=["one", "two"], **more)
    assert world.said == [
        f"error: {message}; its whole log: /run/decode0.log",
        *("its last 2 lines:", "    one", "    two", "stopping all processes"),
    ]
    assert names(world.done, ev.Terminate) == ["prefill0"]
    world.end("prefill0")
    world.end("pool0")
    assert world.exit == 1
    assert "router" not in names(world.done, ev.Start)


def test_a_process_that_is_late_is_killed_and_reported() -> None:
    world = World(plan_of(start_timeout_s=60.0))
    assert names(world.wait(60.0), ev.Kill) == ["pool0"]
    world.ready("pool0")  # too late
    world.end("pool0", -9)
    assert "error: pool0 was not ready within 60 s; its whole log: /run/pool0.log" in world.said
    assert world.exit == 1


def test_a_process_that_dies_later_is_started_again_after_a_pause_that_doubles() -> None:
    world = World(plan_of(max_restarts=2)).up()
    for pause_s in (1.0, 2.0):
        world.said.clear()
        world.end("decode0", 4)
        assert world.said == ["error: decode0 exited with status 4", f"restarting decode0 in {pause_s:.1f} s"]
        assert world.wait(pause_s - 0.1) == []
        assert world.wait(0.1)[-1] == ev.Start("decode0", again=True)
        world.ready("decode0")
    world.end("decode0", 4)
    assert world.said[-1] == (
        "decode0 exited with status 4 and stays ended; the others go on; its whole log: /run/decode0.log"
    )
    assert world.exit is None


@pytest.mark.parametrize(
    ("name", "status", "stop_on_loss", "says", "stops"),
    [
        ("pool0", 0, False, "stays ended; the others go on", False),
        ("pool0", 4, False, "stays ended; the others go on", False),
        ("decode0", 0, True, "exited with status 0 and is not restarted", True),
        ("router", 0, False, "exited with status 0 and is not restarted", True),
        ("router", -99, False, "was killed by signal 99 and is not restarted", True),
    ],
)
def test_what_is_not_restarted_takes_the_cluster_down_if_nobody_serves_then_or_any_loss_does(
    name: str, status: int, stop_on_loss: bool, says: str, stops: bool
) -> None:
    never = {role: {"restart": "never"} for role in ("pool", "router")}
    world = World(plan_of(never, stop_on_loss=stop_on_loss)).up()
    world.end(name, status)
    assert says in "\n".join(world.said)
    assert (names(world.done, ev.Terminate) != []) is stops
    assert any(line.startswith("error: ") for line in world.said) is (stops or status != 0)
    while world.alive and stops:
        world.end(world.alive[-1])
    assert world.exit == (1 if stops else None)


def test_the_cluster_goes_on_while_it_has_a_router() -> None:
    world = World(on_two_hosts()).up()
    world.end("router0", 0)
    assert "stays ended; the others go on" in world.said[-1]
    world.end("router1", 0)
    assert world.said[-1] == "stopping all processes"


def test_a_stop_goes_through_the_stages_in_reverse_each_within_its_grace() -> None:
    world = World(plan_of({"decode": {"stop_grace_s": 20.0, "release_s": 30.0}}, stop_grace_s=5.0)).up()
    assert names(world.tell(ev.StopAsked("SIGINT")), ev.Terminate) == ["router"]
    assert names(world.end("router"), ev.Terminate) == ["prefill0", "decode0"]
    assert names(world.wait(4.9), ev.Kill) == []
    assert names(world.wait(0.1), ev.Kill) == ["prefill0"]
    world.end("prefill0", -9)
    assert names(world.wait(52.9), ev.Kill) == []
    assert names(world.wait(0.1), ev.Kill) == [
        "decode0"
    ]  # its own 20 s, 8 s for its end, 30 s for its memory
    assert names(world.end("decode0", -9), ev.Terminate) == ["pool0"]
    assert names(world.tell(ev.StopAsked("SIGINT")), ev.Kill) == ["pool0"]  # once more: at once
    world.end("pool0")
    assert world.exit == 0
    stopped = [line.split()[0] for line in world.said if line.endswith("has stopped")]
    assert stopped == ["router", "prefill0", "decode0", "pool0"]


def restarting(plan: Plan) -> World:
    """A restart was asked for, and the pool node has been upgraded."""
    world = World(plan).up()
    world.tell(ev.RestartAsked())
    world.tell(ev.Upgraded("pool0"))
    return world


def restarted(world: World, name: str) -> None:
    """It ended as it was told to, was started again, and is ready."""
    assert names(world.end(name), ev.Start) == [name]
    world.ready(name)


def test_a_restart_takes_each_process_once_the_one_before_is_ready_and_routers_replace_themselves() -> None:
    world = restarting(plan_of())
    for name in RESTARTED:
        assert names(world.done, ev.Terminate)[-1] == name
        restarted(world, name)
    assert world.done[-3:] == [
        ev.Reload("router"),
        ev.Say("all processes have been restarted"),
        ev.Restarted(),
    ]
    assert world.said[0] == "restarting all processes, one after the other"
    assert world.said[-1] == "all processes have been restarted"
    assert not any("error" in line for line in world.said)
    assert names(world.end("decode0", 4), ev.Start) == []  # a failure again
    assert world.said[-1] == "restarting decode0 in 1.0 s"


def test_a_restart_takes_one_host_after_the_other() -> None:
    world = restarting(on_two_hosts())
    for name in ("decode0", "prefill0"):
        assert names(world.done, ev.Terminate)[-1] == name
        restarted(world, name)
    assert names(world.done, ev.Reload) == ["router0", "router1"]
    assert world.said[-1] == "all processes have been restarted"


def test_a_restarted_process_that_dies_again_is_restarted_like_any_other_and_may_end_the_restart() -> None:
    world = restarting(plan_of(max_restarts=1))
    restarted(world, "prefill0")
    world.end("decode0")
    world.end("decode0", 5)
    world.wait(1.0)
    world.end("decode0", 5)
    assert world.said[-2].startswith("decode0 exited with status 5 before it was ready and stays ended")
    assert world.said[-1] == "error: the restart of all processes ends here; not restarted: router"
    assert names(world.done, ev.Terminate) == ["prefill0", "decode0"]
    world.tell(ev.RestartAsked())  # of what is left
    assert names(world.done, ev.Upgrade) == ["pool0", "pool0"]


def test_a_pool_node_that_cannot_be_upgraded_ends_the_restart() -> None:
    world = World(plan_of()).up()
    world.tell(ev.RestartAsked())
    world.tell(ev.Upgraded("pool0", "pool0 is not upgraded: its new version would not start"))
    assert world.said[-2:] == [
        "error: pool0: pool0 is not upgraded: its new version would not start",
        "error: the restart of all processes ends here; not restarted: prefill0, decode0, router",
    ]
    assert names(world.wait(100.0), ev.Terminate) == []
    assert names(world.scale(decode=2), ev.Start) == ["decode1"]


def test_a_pool_node_that_dies_while_it_is_upgraded_is_started_again_and_the_others_wait_for_it() -> None:
    world = World(plan_of()).up()
    world.tell(ev.RestartAsked())
    world.end("pool0", 1)
    assert names(world.wait(1.0), ev.Start) == ["pool0"]
    assert names(world.done, ev.Terminate) == []
    assert names(world.tell(ev.BecameReady("pool0")), ev.Terminate) == ["prefill0"]
    assert world.tell(ev.Upgraded("pool0", "it did not come back in time")) == []


def test_a_restart_asked_for_before_all_are_ready_is_done_afterwards_and_one_that_comes_meanwhile_too() -> (
    None
):
    world = World(plan_of())
    world.tell(ev.RestartAsked())
    for stage in STAGES:
        world.ready(*stage)
    world.tell(ev.Upgraded("pool0"))
    assert names(world.done, ev.Terminate) == ["prefill0"]
    world.tell(ev.RestartAsked())
    for name in RESTARTED:
        restarted(world, name)
    assert names(world.done, ev.Terminate) == list(RESTARTED)
    assert names(world.done, ev.Upgrade) == ["pool0", "pool0"]


def test_a_new_worker_is_started_and_the_router_learns_of_it_when_it_is_ready() -> None:
    world = World(plan_of()).up()
    assert world.scale(decode=2) == [ev.Say("starting decode1"), ev.Start("decode1", again=False)]
    actions = world.tell(ev.BecameReady("decode1"))
    assert actions[1:] == [ev.Rewire("router"), ev.Reload("router"), ev.Scaled()]


def test_a_worker_that_leaves_is_told_so_after_the_router_and_has_its_grace() -> None:
    world = World(plan_of(decode=2))
    for stage in (("pool0",), ("prefill0", "decode0", "decode1"), ("router",)):
        world.ready(*stage)
    assert world.scale(decode=1) == [ev.Rewire("router"), ev.Reload("router"), ev.Terminate("decode1")]
    assert names(world.wait(5.0), ev.Kill) == ["decode1"]
    assert world.end("decode1", -9)[0] == ev.Say("decode1 has stopped")
    assert world.scaled == [""]
    assert names(world.wait(100.0), ev.Start) == []
    world.tell(ev.StopAsked("SIGTERM"))
    for name in ("router", "prefill0", "decode0", "pool0"):
        world.end(name)
    assert world.exit == 0


@pytest.mark.parametrize("end", [{"status": 3}, {"status": 0}, {"status": 1, "problem": "no room"}])
def test_a_new_worker_that_fails_stays_ended_and_the_others_go_on(end: dict[str, Any]) -> None:
    world = World(plan_of(stop_on_loss=True)).up()
    world.scale(decode=2, stop_on_loss=True)
    world.end("decode1", **end)
    (problem,) = world.scaled
    assert problem.startswith(end.get("problem") or "decode1 exited")
    assert names(world.wait(100.0), ev.Start) == []
    assert world.exit is None


def test_scaling_waits_until_all_have_started_or_been_restarted() -> None:
    world = World(plan_of())
    assert names(world.scale(decode=2), ev.Start) == []
    world.ready(*STAGES[0], *STAGES[1])
    assert names(world.tell(ev.BecameReady("router")), ev.Start) == ["decode1"]
    world.tell(ev.RestartAsked())
    assert names(world.done, ev.Upgrade) == []
    assert names(world.tell(ev.BecameReady("decode1")), ev.Upgrade) == ["pool0"]


def test_a_router_that_starts_meanwhile_is_told_again_when_it_is_ready() -> None:
    world = World(plan_of()).up()
    world.end("router", 1)
    world.wait(1.0)
    world.scale(decode=2)
    assert world.tell(ev.BecameReady("decode1"))[1:] == [ev.Rewire("router"), ev.Scaled()]
    assert ev.Reload("router") in world.tell(ev.BecameReady("router"))


def test_every_router_learns_of_it() -> None:
    world = World(on_two_hosts()).up()
    file = ClusterFile(pool=[{}], prefill=[{}], decode=[{}] * 2, router={"count": 2, "port": 80})
    hosts = {spec.name: spec.host for spec in world.plan.processes} | {"decode1": "b"}
    plan = make_plan(
        file, program=("x",), run_dir=Path("/run"), uid=0, ports=iter(range(7100, 7200)),
        site=Site(hosts), before=world.plan,
    )  # fmt: skip
    world.tell(ev.ScaleAsked(plan))
    world.ready("decode1")
    assert names(world.done, ev.Rewire) == names(world.done, ev.Reload) == ["router0", "router1"]


def test_who_asks_for_more_workers_of_a_cluster_that_stops_hears_it() -> None:
    world = World(plan_of()).up()
    world.scale(decode=2)
    world.tell(ev.StopAsked("SIGTERM"))
    assert world.scaled == ["the cluster stops"]
    world.scale(decode=3)
    assert world.scaled == ["the cluster stops"] * 2
