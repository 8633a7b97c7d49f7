"""Ray's nodes: each process has an actor on its node, in which its agent runs.

`python -m pdserve.up.launchers.ray NODE GPUS WORD...` runs a command on a node as `ssh` does on a host: its
standard input goes there, output and status come back. The supervisor starts one for each process, a driver
of Ray. The actor reserves the process's GPUs. When a driver ends, Ray ends its actor; the agent loses its
input then, and ends its process. Ray restarts no actor by itself, and processes of a lost node stay ended:
`pdserve up scale` puts new workers on others.

`RAY_ADDRESS` names the cluster of Ray, as for every driver.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pdserve.errors import StartupError
from pdserve.up.hosts import Demand
from pdserve.up.launchers import ray_host
from pdserve.up.launchers.launcher import SshLauncher
from pdserve.up.launchers.running import AGENT, SHELL_FAILED
from pdserve.up.spec import ProcessSpec

START_TIMEOUT_S: Final = 60.0
NODE_NAMES: Final = ("NodeName", "NodeManagerHostname", "NodeManagerAddress")
LITTLE_CPU: Final = 0.01
"""Processors of a process: it is placed, and takes what is there."""


class RayLauncher(SshLauncher):
    """See this module."""

    _alive: Sequence[Mapping[str, Any]] = ()
    _own = ""

    def hosts(self) -> dict[str, str]:
        """The address of each node by its id."""
        return {node["NodeID"]: node["NodeManagerAddress"] for node in self._alive}

    def own(self, addresses: Mapping[str, str]) -> str:
        """The node of the supervisor, which asks the router over loopback."""
        return self._own

    def assign(self, demands: Sequence[Demand]) -> Mapping[str, str]:
        """Over the nodes that are alive; `place.hosts` names them as Ray does."""
        _connect()
        try:
            self._alive = [node for node in ray.nodes() if node["Alive"]]
            self._own = ray.get_runtime_context().get_node_id()
        finally:
            ray.shutdown()
        self._names = {process: node for process, node in self._names.items() if node in self.hosts()}
        return super().assign([_by_id(one, self._own, self._alive) for one in demands])

    def command(self, spec: ProcessSpec) -> list[str]:
        """A driver of its own."""
        count = str(spec.gpu_count)
        return [sys.executable, "-m", __name__, self._names[spec.name], count, *AGENT]


def _connect() -> None:
    """Raises StartupError: there is no Ray."""
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="error", namespace="pdserve")
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        first = str(error).splitlines()[0]
        raise StartupError(f"--on ray: {first}: start Ray, or set RAY_ADDRESS") from None


def _by_id(one: Demand, own: str, nodes: Sequence[Mapping[str, Any]]) -> Demand:
    """With the ids of the nodes that it may run on; the router is beside the supervisor. Raises StartupError:
    none has such a name.
    """
    if one.role != "router" and not one.hosts:
        return one
    wanted = set(one.hosts)
    ids = [node["NodeID"] for node in nodes if wanted & {node[name] for name in NODE_NAMES}]
    if one.role == "router":
        ids = [own]
    elif not ids:
        raise StartupError(f"{one.name}: no node of Ray is one of {', '.join(sorted(wanted))}")
    return replace(one, hosts=tuple(ids))


def main(node: str, gpus: str, words: Sequence[str]) -> int:
    """Run the words on a node. Gives their exit status; SHELL_FAILED with a line where the node is lost."""
    try:
        _connect()
        there = next((one for one in ray.nodes() if one["NodeID"] == node and one["Alive"]), None)
        if there is None:
            raise StartupError(f"node {node} of Ray is lost")
        ray.cloudpickle.register_pickle_by_value(ray_host)
        kind = ray.remote(ray_host.Host).options(
            max_restarts=0,
            max_concurrency=8,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            num_cpus=LITTLE_CPU,
            num_gpus=int(gpus) if there["Resources"].get("GPU") else 0,
        )
        host = kind.remote(words, str(Path.cwd()))
        ray.get(host.say.remote(b""), timeout=START_TIMEOUT_S)

        def pass_on() -> None:
            with suppress(ray.exceptions.RayError):  # told by what is asked for output
                while data := os.read(0, ray_host.READ_BYTES):
                    ray.get(host.say.remote(data))  # one after the other
            ray.kill(host)  # the supervisor is lost

        threading.Thread(target=pass_on, daemon=True).start()
        status = None
        while status is None:
            data, status = ray.get(host.output.remote())
            os.write(1, data)
    except (StartupError, ray.exceptions.RayError) as error:  # GetTimeoutError: no room for the actor
        print(f"not run by Ray: {(str(error).strip() or type(error).__name__).splitlines()[-1]}", flush=True)
        return SHELL_FAILED
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
