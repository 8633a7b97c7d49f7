"""`pdserve dynamo ROLE`: a worker of NVIDIA Dynamo with its pages in the pool."""

from __future__ import annotations

from functools import partial
from typing import Final

import typer

from pdserve.engine.config import Role
from pdserve.integrations.dynamo.config import DynamoConfig
from pdserve.settings.command_line import config_command

_HELP: Final[dict[Role, str]] = {
    "agg": "Run a worker that computes prompts and answers.",
    "prefill": "Run a worker that computes prompts, and sends their KV to a decode worker.",
    "decode": "Run a worker that computes answers.",
}


def run(config: DynamoConfig, *, role: Role) -> int:
    """Serve as a worker of Dynamo until stopped; the exit status."""
    from pdserve.integrations.dynamo.worker import run as run_worker

    return run_worker(config, role)


app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Run a worker of NVIDIA Dynamo with its pages in the pool. Dynamo's own options are its environment "
    "variables.",
)
for _role, _help in _HELP.items():
    _command = config_command(
        DynamoConfig, partial(run, role=_role), help=_help, extra_args_key="engine.extra_args"
    )
    [_registered] = _command.registered_commands
    _registered.name = _role
    app.registered_commands.append(_registered)
