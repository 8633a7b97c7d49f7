"""`pdserve up scale|restart|status FILE`: what a running cluster is asked by its control socket."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias, cast, get_args

import msgspec
import typer

from pdserve.errors import ConfigError, StartupError
from pdserve.settings.config_file import load_config
from pdserve.up.config import ClusterFile, WorkerRole
from pdserve.up.control import Answer, Request, ask

STATUS_TIMEOUT_S = 30.0

File: TypeAlias = Annotated[
    Path, typer.Argument(metavar="FILE", help="The cluster file that `pdserve up` runs.")
]
RunDir: TypeAlias = Annotated[
    Path | None, typer.Option("--run-dir", help="Directory that `pdserve up` was given (cluster.run_dir).")
]
Timeout: TypeAlias = Annotated[
    float,
    typer.Option("--timeout-s", min=1.0, help="Longest time to wait; the cluster goes on with it."),
]

scale_app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
restart_app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
status_app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@scale_app.command()
def scale(
    file: File,
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
def restart(file: File, run_dir: RunDir = None, timeout_s: Timeout = 3600.0) -> None:
    """Restart all processes of a running cluster, each once the one before is ready again.

    Workers finish their requests first; pool nodes go on as the version installed now, with their pages.
    """
    _ask(file, run_dir, Request("restart"), timeout_s)
    typer.echo("all processes have been restarted")


@status_app.command()
def status(
    file: File,
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
