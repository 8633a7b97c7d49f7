"""The plan of a cluster, made again with other numbers of workers while the cluster runs.

What is asked once and kept: the free ports that were found, and the secrets. So a process that is in both
plans is the same in both, but for the router, which lists the workers.
"""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from pdserve.errors import ConfigError, StartupError
from pdserve.resources.gpus import GpuRequest, assign
from pdserve.resources.machine import Machine, this_machine
from pdserve.security.private_directory import write_private
from pdserve.up.config import ClusterFile, WorkerRole, resized
from pdserve.up.hosts import Site, without_node
from pdserve.up.launchers.launcher import Launcher
from pdserve.up.locks import free_ports, has_ipv6_alone, is_ours, make_run_directory, run_directory
from pdserve.up.plan import demands, make_plan
from pdserve.up.spec import Plan

TOKENS_FILE: Final = "pool-tokens.json"
"""In the run directory, for its owner alone."""


OWN_NODE: Final = {"capacity_bytes": "1GiB"}
"""The pool node of a host for which the file has none."""


class PoolTokens(msgspec.Struct, frozen=True):
    """Secrets of a pool on several hosts. Its namespaces know them, and outlive the cluster in memory."""

    node: str
    page: str


class Planner:
    """Makes the plans of one cluster on one launcher."""

    def __init__(
        self,
        file: ClusterFile,
        launcher: Launcher,
        *,
        source: str,
        program: Sequence[str],
        extra_args: Sequence[str] = (),
        environ: Mapping[str, str] = os.environ,
        machine: Machine | None = None,
    ) -> None:
        """`source`: the file's name, for messages. `extra_args`: flags for SGLang in every worker. `machine`:
        this one where it is None.
        """
        self._source = source
        self._launcher = launcher
        self._program = program
        self._extra_args = extra_args
        self._file = file
        """As it was read, with the numbers of workers of now."""
        self.machine: Final = machine or this_machine(environ)
        self._plan: Plan | None = None
        self._ports: Final = free_ports(file.cluster.host, random.SystemRandom())
        self._cluster_token: Final = environ.get("PDSERVE_CLUSTER_TOKEN") or secrets.token_urlsafe(32)
        self._admin_key: Final = environ.get("PDSERVE_ADMIN_KEY") or secrets.token_urlsafe(32)

    def plan(self) -> Plan:
        """The first plan. Raises ConfigError, StartupError."""
        self._plan = self._made(self._file)
        return self._plan

    def scaled(self, counts: Mapping[WorkerRole, int]) -> Plan:
        """The plan with other numbers of workers. Raises ConfigError, StartupError, and changes nothing
        then.
        """
        file = resized(self._file, counts, self._source)
        if self._plan is None:
            raise StartupError("there is no plan yet")
        plan = self._made(file)
        now = {spec.name: spec for spec in plan.processes}
        for spec in self._plan.processes:
            found = now.get(spec.name, spec)
            is_same = (found.argv, found.config, found.env) == (spec.argv, spec.config, spec.env)
            if spec.role != "router" and found.host == spec.host and not is_same:
                raise ConfigError(f"{spec.name} would have to be started again with another configuration")
        self._file, self._plan = file, plan
        return plan

    def gpus(self, plan: Plan) -> dict[str, tuple[int, ...]]:
        """Numbers of this machine's GPUs by worker, as they are given if all are free: agents take those that
        are. Raises ConfigError: there are too few, or a table names one that is not here.
        """
        workers = [spec for spec in plan.processes if spec.gpu_count and not spec.host]
        if not self.machine.gpus:
            if named := next((spec for spec in workers if spec.needs_gpus), None):
                raise ConfigError(f"'{named.table}.gpus': this machine has no GPU")
            return {}
        return assign(
            self.machine,
            [GpuRequest(one.name, one.gpu_count, one.gpu_numbers or None) for one in workers],
        )

    def _made(self, file: ClusterFile) -> Plan:
        wanted = demands(file)
        hosts = self._launcher.assign(wanted)
        alone = without_node({one.name: one.role for one in wanted}, hosts) if hosts and file.pool else []
        if alone and hosts is not None:  # a worker speaks with the pool node of its own host
            own = [{**OWN_NODE, "name": f"{name}-pool", "place": {"beside": name}} for name in alone]
            file = msgspec.structs.replace(file, pool=[*file.pool, *own])
            hosts = self._launcher.assign(demands(file))
        run_dir = run_directory(Path(file.cluster.run_dir))
        plan = make_plan(
            file,
            program=self._program,
            run_dir=run_dir,
            uid=os.getuid(),
            ports=self._ports,
            extra_args=self._extra_args,
            cluster_token=self._cluster_token,
            admin_key=self._admin_key,
            site=None if hosts is None else _site(hosts, pool_tokens(run_dir)),
            has_gpus=bool(self.machine.gpus),
            before=self._plan,
        )
        self.gpus(plan)
        return plan


def pool_tokens(run_dir: Path) -> PoolTokens:
    """Those of the cluster's last start, whose pages may be in its hosts' memory still, or new ones. Raises
    StartupError.
    """
    make_run_directory(run_dir)  # checked first: a stranger's secrets would be known to him
    file = run_dir / TOKENS_FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=PoolTokens)
    except (FileNotFoundError, msgspec.DecodeError):
        made = PoolTokens(secrets.token_urlsafe(32), secrets.token_urlsafe(32))
    except OSError as error:
        raise StartupError(f"{file}: cannot be read: {error.strerror}") from None
    write_private(file, msgspec.json.encode(made).decode())
    return made


def _site(hosts: Mapping[str, str], tokens: PoolTokens) -> Site:
    far = frozenset(name for name, host in hosts.items() if not is_ours(host))
    ipv6 = frozenset(host for host in set(hosts.values()) if has_ipv6_alone(host))
    return Site(hosts, tokens.node, tokens.page, far, ipv6)
