"""`pdserve up FILE`: start and supervise a whole cluster. `pdserve up scale|restart|status FILE`: what a
running one is asked by its control socket.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, TypeAlias, cast, get_args

import msgspec
import typer

from pdserve.errors import ConfigError, StartupError
from pdserve.resources.gpus import described, node_count
from pdserve.resources.machine import read_machine
from pdserve.resources.memory import GB, host_pool_gb
from pdserve.settings.command_line import ExtraArgs
from pdserve.settings.config_file import build_config, load_config
from pdserve.up.config import WORKER_ROLES, ClusterFile, Role, WorkerRole, read_cluster_file
from pdserve.up.console import Console
from pdserve.up.control import Answer, Request, ask
from pdserve.up.launchers.launcher import Launcher, open_launcher
from pdserve.up.locks import check_ports, claimed
from pdserve.up.planner import Planner
from pdserve.up.spec import ConnectReady, Plan
from pdserve.up.supervisor import Supervisor

PROGRAM = (sys.executable, "-m", "pdserve")

SCHEMAS: Mapping[Role, str] = {
    "pool": "pdserve.kvpool.node.config:PoolNodeConfig",
    **dict.fromkeys(WORKER_ROLES, "pdserve.engine.worker:WorkerConfig"),
    "router": "pdserve.router.config.router:RouterConfig",
}
"""Each process's configuration struct, so that a mistyped key is found before anything is started."""

STATUS_TIMEOUT_S = 30.0

ClusterPath: TypeAlias = Annotated[
    Path, typer.Argument(metavar="FILE", help="The cluster file that `pdserve up` runs.")
]
RunDir: TypeAlias = Annotated[
    Path | None, typer.Option("--run-dir", help="Directory that `pdserve up` was given (cluster.run_dir).")
]
Timeout: TypeAlias = Annotated[
    float,
    typer.Option("--timeout-s", min=1.0, help="Longest time to wait; the cluster goes on with it."),
]


def _count(role: WorkerRole, name: str) -> Any:
    return typer.Option(f"--{role}", metavar="N", help=f"Number of {name} workers.")


def _app() -> typer.Typer:
    return typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


app, scale_app, restart_app, status_app = _app(), _app(), _app(), _app()


@app.command()
def up(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Cluster file (TOML); see launch/disagg.toml.")
    ],
    model: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Model directory of all workers (worker.engine.model_path)."),
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port of the router; 0 takes a free one.")] = None,
    host: Annotated[str | None, typer.Option(help="Address the router listens on.")] = None,
    prefill: Annotated[int | None, _count("prefill", "prefill")] = None,
    decode: Annotated[int | None, _count("decode", "decode")] = None,
    agg: Annotated[int | None, _count("agg", "aggregated")] = None,
    elastic: Annotated[int | None, _count("elastic", "elastic")] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Directory of logs and sockets (cluster.run_dir).")
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Hosts for --on ssh (cluster.hosts).")
    ] = None,
    on: Annotated[
        str,
        typer.Option(
            metavar="PLACE",
            help="Where processes run: local (this host), ssh (cluster.hosts), slurm (a job's hosts), ray.",
        ),
    ] = "local",
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what would be started, where and on which GPUs; start nothing."),
    ] = False,
    machine: Annotated[
        Path | None,
        typer.Option("--machine", metavar="FILE", help="With --dry-run: another machine, described in TOML."),
    ] = None,
    extra: ExtraArgs = None,
) -> None:
    """Start a cluster, wait until each process is ready, and supervise it until Ctrl-C.

    Pool nodes start first, then the workers, then the router; flags win over FILE. A running cluster is
    asked by `pdserve up scale`, `pdserve up restart` and `pdserve up status`.
    """
    if machine is not None and not dry_run:
        raise ConfigError("--machine goes with --dry-run")
    overrides = {
        "worker.engine.model_path": model,
        "router.port": port,
        "router.host": host,
        "cluster.run_dir": None if run_dir is None else str(run_dir),
        "cluster.hosts": None if hosts is None else hosts.split(","),
    }
    counts: dict[WorkerRole, int | None] = {"prefill": prefill, "decode": decode, "agg": agg}
    counts["elastic"] = elastic
    cluster = read_cluster_file(file, overrides, counts)
    launcher = open_launcher(on, os.environ, cluster.cluster)
    planner = Planner(
        cluster,
        launcher,
        source=str(file),
        program=PROGRAM,
        extra_args=extra or (),
        machine=None if machine is None else read_machine(machine),
    )
    plan = planner.plan()
    check_tables(plan, str(file), SCHEMAS)
    _refuse_several_hosts(plan)
    if dry_run:
        typer.echo("\n".join((*process_lines(plan), *gpu_lines(planner, plan))))
        return
    raise typer.Exit(run_plan(plan, launcher, planner.scaled))


def _refuse_several_hosts(plan: Plan) -> None:
    for spec in plan.processes:
        if spec.role in WORKER_ROLES and node_count(spec.config["engine"].get("extra_args", ())) > 1:
            raise ConfigError(f"'{spec.table}': --nnodes: only Kubernetes runs a worker on several hosts")


def gpu_lines(planner: Planner, plan: Plan) -> list[str]:
    """What workers on this host get of it, for people; none where they run on CPUs."""
    machine, gpus = planner.machine, planner.gpus(plan)
    if not gpus:
        return []
    share_gb = host_pool_gb(machine.memory_bytes, [gpu.memory_bytes for gpu in machine.gpus])
    return [
        *(described(machine, name, numbers) for name, numbers in gpus.items()),
        f"host memory: {machine.memory_bytes / GB:,.0f} GB, of which each rank takes {share_gb:,} GB "
        "unless engine.hicache_size_gb says otherwise",
    ]


def process_lines(plan: Plan) -> list[str]:
    """The processes in the order of their start: name, host, where it listens."""
    found = []
    for spec in plan.processes:
        listens = [f"{place.host}:{place.port}" for place in spec.listening]
        if isinstance(spec.ready, ConnectReady):
            listens = listens or [spec.ready.address]
        found.append(f"{spec.name}: {spec.role} on {spec.host or 'this host'}, at {', '.join(listens)}")
    return found


def check_tables(plan: Plan, source: str, schemas: Mapping[Role, str]) -> None:
    """Check each process's configuration against its struct. Raises ConfigError: file, table, key."""
    for spec in plan.processes:
        if spec.role not in schemas:  # a command: its own program checks it
            continue
        module, _, name = schemas[spec.role].partition(":")
        type_: type[Any] = getattr(importlib.import_module(module), name)
        build_config(type_, spec.config, source=f"{source}: [{spec.table}]")


def run_plan(plan: Plan, launcher: Launcher, scaled: Callable[[Mapping[WorkerRole, int]], Plan]) -> int:
    """Run a plan in the foreground until it is stopped; gives the exit status. `scaled`: the plan with other
    numbers of workers.
    """
    check_ports(plan)
    names = [spec.name for spec in plan.processes]
    with claimed(plan.run_dir), closing(Console(sys.stdout, names)) as console:
        return asyncio.run(Supervisor(plan, console, launcher, scaled).run())


@scale_app.command()
def scale(
    file: ClusterPath,
    numbers: Annotated[
        list[str], typer.Argument(metavar="ROLE=N...", help="Wanted workers, like decode=2 prefill=1.")
    ],
    run_dir: RunDir = None,
    timeout_s: Timeout = 900.0,
) -> None:
    """Start further workers of a running cluster, or end some. Those that leave finish their requests.

    The last workers of a role leave first.
    """
    _ask(file, run_dir, Request("scale", read_counts(numbers)), timeout_s)
    typer.echo(f"{' '.join(numbers)}: done")


@restart_app.command()
def restart(file: ClusterPath, run_dir: RunDir = None, timeout_s: Timeout = 3600.0) -> None:
    """Restart all processes of a running cluster, each once the one before is ready again.

    Workers finish their requests first; pool nodes go on as the version installed now, with their pages.
    """
    _ask(file, run_dir, Request("restart"), timeout_s)
    typer.echo("all processes have been restarted")


@status_app.command()
def status(
    file: ClusterPath,
    run_dir: RunDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON for programs.")] = False,
) -> None:
    """Show the processes of a running cluster: name, role, host, phase and restarts."""
    answer = _ask(file, run_dir, Request("status"), STATUS_TIMEOUT_S)
    if as_json:
        typer.echo(msgspec.json.encode(answer.processes))
        return
    width = max((len(one.name) for one in answer.processes), default=0)
    for one in answer.processes:
        restarts = f", restarted {one.restarts} times" if one.restarts else ""
        typer.echo(f"{one.name:{width}}  {one.role:8}  {one.host or 'this host'}  {one.phase}{restarts}")


def read_counts(numbers: list[str]) -> dict[WorkerRole, int]:
    """Numbers by role. Raises ConfigError."""
    counts: dict[WorkerRole, int] = {}
    for word in numbers:
        role, _, number = word.partition("=")
        if role not in get_args(WorkerRole) or not number.isdecimal() or role in counts:
            roles = ", ".join(get_args(WorkerRole))
            raise ConfigError(f"{word!r} is not ROLE=N, each role once; the roles are {roles}")
        counts[cast("WorkerRole", role)] = int(number)
    return counts


def _ask(file: Path, run_dir: Path | None, request: Request, timeout_s: float) -> Answer:
    """Raises StartupError: it is not so."""
    answer = ask(run_dir or load_config(ClusterFile, file, {}).cluster.run_dir, request, timeout_s)
    if answer.problem:
        raise StartupError(answer.problem)
    return answer
