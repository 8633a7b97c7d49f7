"""Ray: the supervisor is the driver, and each process has an actor that runs it (ray_host.py).

Processes are spread over Ray's nodes before any of them starts, since they must know each other's addresses.
Each actor then reserves the GPUs of its process on its node. The actors get the configuration with their
start, so hosts need no common directory. Output comes to the driver: to the console and to the run directory
here.

- A process that ends is started again by the supervisor's own rules, on its node. So they are the same
  everywhere, and Ray restarts no actor by itself.
- When the driver dies, Ray ends its actors. However an actor ends, its process is asked to end then, and is
  killed with its children after `GRACE_S`. One that is started again on that host waits for this.
- Processes of a lost node stay ended. `pdserve up scale` puts new workers on others.

`RAY_ADDRESS` names the cluster of Ray, as for every driver.
"""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import ray
from msgspec.structs import replace
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pdserve.errors import StartupError
from pdserve.up.config import ClusterSettings
from pdserve.up.console import Console
from pdserve.up.hosts import Demand, spread
from pdserve.up.launchers import ray_host
from pdserve.up.launchers.agent import KILL
from pdserve.up.launchers.process import TAIL_LINES, LineSplitter
from pdserve.up.launchers.remote import AGENT, exit_status, order_for
from pdserve.up.launchers.sessions import GRACE_S
from pdserve.up.plan import ProcessSpec

START_TIMEOUT_S: Final = 60.0
ASK_S: Final = 2.0
"""One request for output waits so long."""
LOST: Final = -int(signal.SIGKILL)
"""Status of a process whose actor or node is gone."""
NODE_NAMES: Final = ("NodeName", "NodeManagerHostname", "NodeManagerAddress")
LITTLE_CPU: Final = 0.01
"""Processors of a process: it is placed, and takes what is there."""


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
                words = str(error).strip().splitlines() or ["its node has no room for its actor"]
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


class RayLauncher:
    """See base.Launcher."""

    def __init__(self, environ: Mapping[str, str], settings: ClusterSettings) -> None:
        try:
            ray.cloudpickle.register_pickle_by_value(ray_host)
            ray.init(address="auto", log_to_driver=False, logging_level="error", namespace="pdserve")
        except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
            first = str(error).splitlines()[0]
            raise StartupError(f"--on ray: {first}: start Ray, or set RAY_ADDRESS") from None
        self._ids: dict[str, str] = {}
        """Of the node of each process."""

    def assign(self, demands: Sequence[Demand]) -> Mapping[str, str]:
        """Over Ray's nodes. Raises StartupError."""
        nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        own = ray.get_runtime_context().get_node_id()
        wanted = [_by_id(one, own, nodes) for one in demands]
        kept = {name: node for name, node in self._ids.items() if node in nodes}
        self._ids = spread(wanted, list(nodes), own, kept)
        return {name: nodes[node]["NodeManagerAddress"] for name, node in self._ids.items()}

    async def start(self, spec: ProcessSpec, console: Console, *, again: bool) -> Actor:
        """Start it by an actor on its node. Raises StartupError."""
        node = self._ids[spec.name]
        there = next((one for one in ray.nodes() if one["NodeID"] == node and one["Alive"]), None)
        if there is None:
            raise StartupError(f"{spec.name}: node {spec.host} of Ray is lost")
        try:
            log = spec.log_path.open("ab" if again else "wb", buffering=0)
        except OSError as error:
            raise StartupError(f"{spec.log_path}: cannot be written: {error.strerror}") from None
        kind = ray.remote(ray_host.ProcessHost).options(
            name=None,
            max_restarts=0,
            max_concurrency=8,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            num_cpus=LITTLE_CPU,
            num_gpus=spec.gpu_count if there["Resources"].get("GPU") else 0,
        )
        order = order_for(spec, GRACE_S, again=again)
        return Actor(spec, kind.remote(AGENT, order, str(Path.cwd())), log, console)

    def close(self) -> None:
        """Give all back."""
        ray.shutdown()


def _by_id(one: Demand, own: str, nodes: Mapping[str, Mapping[str, Any]]) -> Demand:
    """With the ids of the nodes that it may run on. The router is beside the supervisor, which asks it over
    loopback. Raises StartupError: none has such a name.
    """
    if one.role == "router":
        return Demand(one.name, one.role, replace(one.needs, hosts=[own]))
    if not one.needs.hosts:
        return one
    wanted = set(one.needs.hosts)
    ids = [key for key, node in nodes.items() if wanted & {node[name] for name in NODE_NAMES}]
    if not ids:
        raise StartupError(f"{one.name}: no node of Ray is one of {', '.join(sorted(wanted))}")
    return Demand(one.name, one.role, replace(one.needs, hosts=ids))


async def _result(reference: Any) -> Any:
    return await asyncio.wrap_future(reference.future())
