"""`pdserve scale FILE decode=2`: other numbers of workers in a running cluster, wherever it runs."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Annotated, Final, cast, get_args

import typer

from pdserve.errors import ConfigError, StartupError
from pdserve.settings.config_file import load_config
from pdserve.up.config import ClusterFile, WorkerRole
from pdserve.up.scale.requests import Request, asking, read_answer, withdraw, write_request

TAKEN_TIMEOUT_S: Final = 60.0
"""A supervisor looks twice a second; a network file system may show it the request later."""
POLL_S: Final = 0.2

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def scale(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The cluster file that `pdserve up` runs.")],
    numbers: Annotated[
        list[str], typer.Argument(metavar="ROLE=N...", help="Wanted workers, like decode=2 prefill=1.")
    ],
    run_dir: Annotated[
        Path | None, typer.Option(help="Directory that `pdserve up` was given (cluster.run_dir).")
    ] = None,
    timeout_s: Annotated[
        float, typer.Option(min=1.0, help="Longest time to wait until it is so; the cluster goes on with it.")
    ] = 900.0,
) -> None:
    """Start further workers of a running cluster, or end some. Those that leave finish their requests.

    The last workers of a role leave first.
    """
    counts = read_counts(numbers)
    folder = run_dir or load_config(ClusterFile, file, {}).cluster.run_dir
    request = Request(secrets.token_hex(8), counts)
    with asking(folder):
        write_request(folder, request)
        _wait(folder, request, timeout_s)
    typer.echo(f"{' '.join(numbers)}: done")


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


def _wait(folder: Path, request: Request, timeout_s: float) -> None:
    """Until it is so. Raises StartupError."""
    asked_s = time.monotonic()
    while True:
        answer = read_answer(folder, request.id)
        waited_s = time.monotonic() - asked_s
        if answer is not None and answer.state == "done":
            return
        if answer is not None and answer.state == "failed":
            raise StartupError(answer.text)
        if answer is None and waited_s > min(timeout_s, TAKEN_TIMEOUT_S):
            withdraw(folder)
            raise StartupError(f"{folder}: no cluster that runs from here has answered")
        if waited_s > timeout_s:
            raise StartupError(f"not done within {timeout_s:.0f} s; the cluster goes on with it")
        time.sleep(POLL_S)
