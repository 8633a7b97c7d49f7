"""Ray: the supervisor is the driver, and each process has an actor that runs it (ray_host.py).

A placement group reserves processors, GPUs and memory for all processes, before any of them starts. Workers
that are added later get a group of their own. The actors get the configuration with their start, so hosts
need no common directory. Output comes to the driver: to the console and to the run directory here.

- A process that ends is started again by the supervisor's own rules, in its place in the group. So they are
  the same everywhere, and Ray restarts no actor by itself.
- When the driver dies, Ray ends its actors. However an actor ends, its process is asked to end then, and is
  killed with its children after `GRACE_S`. One that is started again on that host waits for this.
- A lost node takes its processes along. Workers get a room on another node, with a new address. Pool nodes
  stay ended: others know them by their addresses.

`RAY_ADDRESS` names the cluster of Ray, as for every driver.
"""

from __future__ import annotations

import asyncio
import math
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pdserve.errors import StartupError
from pdserve.up.config import WORKER_ROLES, ClusterSettings
from pdserve.up.console import Console
from pdserve.up.places import ray_host
from pdserve.up.places.base import HostLost
from pdserve.up.places.orphan_reaper import GRACE_S
from pdserve.up.places.process import TAIL_LINES, LineSplitter
from pdserve.up.places.remote import AGENT, exit_status, order_for
from pdserve.up.places.remote_process import KILL
from pdserve.up.plan import ProcessSpec
from pdserve.up.site import Demand

PLACE_TIMEOUT_S: Final = 60.0
START_TIMEOUT_S: Final = 60.0
ASK_S: Final = 2.0
"""One request for output waits so long."""
LOST: Final = -int(signal.SIGKILL)
"""Status of a process whose actor or node is gone."""
NODE: Final = "ray.io/node-id"
"""A label that Ray gives each node."""
NODE_NAMES: Final = ("NodeName", "NodeManagerHostname", "NodeManagerAddress")
LITTLE_CPU: Final = 0.01
"""Processors of a process that says no number: it is placed, and takes what is there."""


class Actor:
    """A process that an actor of Ray runs."""

    def __init__(
        self, spec: ProcessSpec, actor: Any, log: Any, console: Console, ended: Callable[[str], None]
    ) -> None:
        """`ended` is told the name at the end."""
        self.spec = spec
        self._ended = ended
        self._actor = actor
        self._log = log
        self._console = console
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._status = LOST
        self._following = asyncio.create_task(self._follow())

    async def wait(self) -> None:
        """Until it has ended, or its actor is gone."""
        await asyncio.shield(self._following)

    def signal(self, number: signal.Signals) -> None:
        """Ask the actor to send it; does not wait."""
        if not self._following.done():
            self._actor.say.remote(str(int(number)).encode())

    def configure(self, config: str) -> None:
        """Only routers are configured anew, and they run beside the supervisor, which has written it."""

    async def kill(self) -> None:
        """End the process and its children."""
        if self._following.done():
            return
        try:
            await asyncio.wait_for(_result(self._actor.say.remote(KILL)), ASK_S)
        except (ray.exceptions.RayError, TimeoutError):
            ray.kill(self._actor)  # the process ends after it

    async def finish(self) -> int:
        """The status; the actor goes."""
        await asyncio.shield(self._following)
        ray.kill(self._actor)
        self._ended(self.spec.name)
        return self._status

    def last_lines(self) -> list[str]:
        """The last lines of output, at most `TAIL_LINES`."""
        return list(self._tail)

    async def _follow(self) -> None:
        lines = LineSplitter()
        with self._log:
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    await _result(self._actor.started.remote())
            except (ray.exceptions.RayError, TimeoutError) as error:
                words = str(error).strip().splitlines() or ["its actor did not start in time"]
                self._show([f"not started: {words[-1]}"])
                return
            while True:
                try:
                    data, status = await _result(self._actor.output.remote(ASK_S))
                except ray.exceptions.RayError as error:
                    self._show([f"lost: {str(error).splitlines()[0]}"])
                    return
                self._log.write(data)
                self._show(lines.feed(data))
                if status is not None:
                    self._show(lines.close())
                    self._status = exit_status(status)
                    return

    def _show(self, lines: list[str]) -> None:
        for line in lines:
            self._tail.append(line)
            self._console.log(self.spec.name, line)


@dataclass(frozen=True)
class _Room:
    """What a process holds of Ray: a bundle of a placement group."""

    group: Any
    bundle: int
    node: str
    """Id of its node."""
    host: str
    """Address of its node."""


class RayPlace:
    """See base.Place."""

    stop_signals: Sequence[signal.Signals] = ()

    def __init__(self, environ: Mapping[str, str]) -> None:
        try:
            ray.cloudpickle.register_pickle_by_value(ray_host)
            ray.init(address="auto", log_to_driver=False, logging_level="error", namespace="pdserve")
        except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
            first = str(error).splitlines()[0]
            raise StartupError(f"--on ray: {first}: start Ray, or set RAY_ADDRESS") from None
        self._rooms: dict[str, _Room] = {}
        """By process."""
        self._running: set[str] = set()
        self._leaving: set[str] = set()
        """Processes whose rooms are given back when they have ended."""

    def submit(self, words: Sequence[str], settings: ClusterSettings) -> str | None:
        """None: the driver runs here. `ray job submit` runs it elsewhere."""
        return None

    def assign(self, demands: Sequence[Demand]) -> Mapping[str, str]:
        """Reserve what those need that have no room, or have lost it. Raises StartupError: Ray has none."""
        for one in demands:
            if one.role in WORKER_ROLES and one.name not in self._running and self._has_lost(one.name):
                room = self._rooms[one.name]  # Ray gives the bundle another node
                self._rooms[one.name] = _rooms(room.group, {one.name: room.bundle})[one.name]
        if new := [one for one in demands if one.name not in self._rooms]:
            self._rooms.update(_reserve(new))
        self._leaving = self._rooms.keys() - {one.name for one in demands}
        for name in self._leaving - self._running:
            self._give_back(name)
        return {one.name: self._rooms[one.name].host for one in demands}

    async def start(self, spec: ProcessSpec, console: Console, *, again: bool) -> Actor:
        """Start it by an actor in its bundle. Raises StartupError, HostLost."""
        room = self._rooms[spec.name]
        if self._has_lost(spec.name):
            raise HostLost(f"{spec.name}: node {room.host} of Ray is lost")
        try:
            log = spec.log_path.open("ab" if again else "wb", buffering=0)
        except OSError as error:
            raise StartupError(f"{spec.log_path}: cannot be written: {error.strerror}") from None
        strategy = PlacementGroupSchedulingStrategy(room.group, room.bundle)
        kind = ray.remote(ray_host.ProcessHost).options(
            name=None, max_restarts=0, max_concurrency=8, scheduling_strategy=strategy, **_share(spec)
        )
        order = order_for(spec, GRACE_S, again=again)
        actor = kind.remote(AGENT, order, str(Path.cwd()))
        self._running.add(spec.name)
        return Actor(spec, actor, log, console, self._ended)

    def taken_away(self) -> None:
        """No engine takes it away."""

    def close(self) -> None:
        """Give all back."""
        for name in list(self._rooms):
            self._give_back(name)
        ray.shutdown()

    def _has_lost(self, name: str) -> bool:
        return name in self._rooms and self._rooms[name].node not in _living()

    def _ended(self, name: str) -> None:
        self._running.discard(name)
        if name in self._leaving:
            self._give_back(name)

    def _give_back(self, name: str) -> None:
        """The group goes with the last of its processes."""
        self._leaving.discard(name)
        group = self._rooms.pop(name).group
        if all(room.group.id != group.id for room in self._rooms.values()):
            remove_placement_group(group)


def _share(spec: ProcessSpec) -> dict[str, Any]:
    """What the actor takes of its bundle."""
    needs = spec.needs
    return {
        "num_cpus": needs.cpus or LITTLE_CPU,
        "num_gpus": needs.gpus,
        "memory": needs.memory_bytes or None,
    }


def _living() -> dict[str, dict[str, Any]]:
    """Nodes by id."""
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}


def _reserve(demands: Sequence[Demand]) -> dict[str, _Room]:
    """A placement group for these. Raises StartupError: there is no room."""
    nodes = list(_living().values())
    wanted = [_bundle(one) for one in demands]
    selectors = [_selector(one, nodes) for one in demands]
    try:
        group = placement_group(wanted, "SPREAD", bundle_label_selector=selectors)
    except (ValueError, ray.exceptions.RayError) as error:
        raise StartupError(f"--on ray: {str(error).splitlines()[0]}") from None
    try:
        return _rooms(group, {one.name: i for i, one in enumerate(demands)})
    except StartupError:
        remove_placement_group(group)
        raise


def _rooms(group: Any, bundles: Mapping[str, int]) -> dict[str, _Room]:
    """Where these processes are, once Ray has found nodes for the group. Raises StartupError: it has not."""
    names = ", ".join(bundles)
    if not group.wait(PLACE_TIMEOUT_S):
        raise StartupError(f"--on ray: no room for {names} within {PLACE_TIMEOUT_S:.0f} s")
    at, nodes = placement_group_table(group)["bundles_to_node_id"], _living()
    if any(at[number] not in nodes for number in bundles.values()):
        raise StartupError(f"--on ray: a node for {names} is lost")
    return {
        name: _Room(group, number, at[number], nodes[at[number]]["NodeManagerAddress"])
        for name, number in bundles.items()
    }


def _bundle(one: Demand) -> dict[str, float]:
    made = {"CPU": one.needs.cpus or LITTLE_CPU}
    if one.needs.gpus:
        made["GPU"] = float(one.needs.gpus)
    if one.needs.memory_bytes:
        made["memory"] = float(math.ceil(one.needs.memory_bytes))
    return made


def _selector(one: Demand, nodes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Which nodes it may be on, by their labels. The router is beside the supervisor, which asks it over
    loopback. Raises StartupError: none has such a name.
    """
    if one.role == "router":
        return {NODE: ray.get_runtime_context().get_node_id()}
    made = dict(one.needs.labels)
    if hosts := set(one.needs.hosts):
        named = [node["NodeID"] for node in nodes if hosts & {node[key] for key in NODE_NAMES}]
        if not named:
            raise StartupError(f"{one.name}: no node of Ray is one of {', '.join(sorted(hosts))}")
        made[NODE] = f"in({','.join(named)})"
    return made


async def _result(reference: Any) -> Any:
    return await asyncio.wrap_future(reference.future())
