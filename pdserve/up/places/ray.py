"""Ray: the supervisor is the driver, and each process has an actor that runs it (ray_host.py).

A placement group reserves processors, GPUs and memory for all processes, before any of them starts. The
actors get the configuration with their start, so hosts need no common directory. Output comes to the driver:
to the console and to the run directory here.

- A process that ends is started again by the supervisor's own rules, in its place in the group. So they are
  the same everywhere, and Ray restarts no actor by itself.
- When the driver dies, Ray ends its actors, and the processes get SIGTERM with them.
- A lost node takes its processes along. They stay ended: Ray might give them another host, and others know
  the addresses of this one.

`RAY_ADDRESS` names the cluster of Ray, as for every driver.
"""

from __future__ import annotations

import asyncio
import math
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pdserve.errors import StartupError
from pdserve.settings.command_line import RESTARTED
from pdserve.settings.toml_text import to_toml
from pdserve.up.config import ClusterSettings
from pdserve.up.console import Console
from pdserve.up.places import ray_host
from pdserve.up.places.process import TAIL_LINES, LineSplitter, dies_with
from pdserve.up.plan import ProcessSpec
from pdserve.up.site import Demand

PLACE_TIMEOUT_S: Final = 60.0
START_TIMEOUT_S: Final = 60.0
ASK_S: Final = 2.0
"""One request for output waits so long."""
LOST: Final = -int(signal.SIGKILL)
"""Status of a process whose actor or node is gone."""
LITTLE_CPU: Final = 0.01
"""Processors of a process that says no number: it is placed, and takes what is there."""


class Actor:
    """A process that an actor of Ray runs."""

    def __init__(self, spec: ProcessSpec, actor: Any, log: Any, console: Console) -> None:
        self.spec = spec
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
            self._actor.signal.remote(int(number))

    async def kill(self) -> None:
        """End the process and its children."""
        if self._following.done():
            return
        try:
            await asyncio.wait_for(_result(self._actor.kill.remote()), ASK_S)
        except (ray.exceptions.RayError, TimeoutError):
            ray.kill(self._actor)  # the process gets SIGTERM with it

    async def finish(self) -> int:
        """The status; the actor goes."""
        await asyncio.shield(self._following)
        ray.kill(self._actor)
        return self._status

    def last_lines(self) -> list[str]:
        """The last lines of output, at most `TAIL_LINES`."""
        return list(self._tail)

    async def _follow(self) -> None:
        lines = LineSplitter()
        with self._log:
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
                    self._status = status
                    return

    def _show(self, lines: list[str]) -> None:
        for line in lines:
            self._tail.append(line)
            self._console.log(self.spec.name, line)


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
        self._group: Any = None
        self._bundles: dict[str, int] = {}

    def submit(self, words: Sequence[str], settings: ClusterSettings) -> str | None:
        """None: the driver runs here. `ray job submit` runs it elsewhere."""
        return None

    def assign(self, demands: Sequence[Demand]) -> Mapping[str, str]:
        """Reserve what all processes need. Raises StartupError: Ray has no room."""
        for one in demands:
            if one.needs.hosts or one.needs.labels:
                raise StartupError(f"{one.name}: place.hosts and place.labels are not for Ray")
        own = ray.util.get_node_ip_address()
        wanted = [_bundle(one, own) for one in demands]
        self._bundles = {one.name: i for i, one in enumerate(demands)}
        self._group = placement_group(wanted, strategy="SPREAD", name="pdserve")
        try:
            ray.get(self._group.ready(), timeout=PLACE_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError:
            remove_placement_group(self._group)
            raise StartupError(f"--on ray: no room for {wanted} within {PLACE_TIMEOUT_S:.0f} s") from None
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        at = placement_group_table(self._group)["bundles_to_node_id"]
        return {name: nodes[at[number]] for name, number in self._bundles.items()}

    async def start(self, spec: ProcessSpec, console: Console, *, again: bool) -> Actor:
        """Start it by an actor in its bundle. Raises StartupError."""
        try:
            log = spec.log_path.open("ab" if again else "wb", buffering=0)
        except OSError as error:
            raise StartupError(f"{spec.log_path}: cannot be written: {error.strerror}") from None
        strategy = PlacementGroupSchedulingStrategy(self._group, self._bundles[spec.name])
        kind = ray.remote(ray_host.ProcessHost).options(
            name=None, max_restarts=0, max_concurrency=8, scheduling_strategy=strategy, **_share(spec)
        )
        environment = {"PYTHONUNBUFFERED": "1", **({RESTARTED: "1"} if again else {}), **spec.env}
        actor = kind.remote(dies_with(spec.argv), environment, str(spec.config_path), to_toml(spec.config))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await _result(actor.process_id.remote())
        except (ray.exceptions.RayError, TimeoutError) as error:
            log.close()
            ray.kill(actor)
            words = str(error).strip().splitlines() or ["its actor did not start in time"]
            raise StartupError(f"{spec.name}: {words[-1]}") from None
        return Actor(spec, actor, log, console)

    def close(self) -> None:
        """Give the placement group back."""
        if self._group is not None:
            remove_placement_group(self._group)
        ray.shutdown()


def _share(spec: ProcessSpec) -> dict[str, Any]:
    """What the actor takes of its bundle."""
    needs = spec.needs
    return {
        "num_cpus": needs.cpus or LITTLE_CPU,
        "num_gpus": needs.gpus,
        "memory": needs.memory_bytes or None,
    }


def _bundle(one: Demand, own: str) -> dict[str, float]:
    made = {"CPU": one.needs.cpus or LITTLE_CPU}
    if one.needs.gpus:
        made["GPU"] = float(one.needs.gpus)
    if one.needs.memory_bytes:
        made["memory"] = float(math.ceil(one.needs.memory_bytes))
    if one.role == "router":  # beside the supervisor, which asks it over loopback
        made[f"node:{own}"] = 0.001
    return made


async def _result(reference: Any) -> Any:
    return await asyncio.wrap_future(reference.future())
