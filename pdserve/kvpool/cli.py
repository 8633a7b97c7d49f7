"""`pdserve pool`: run a node, look at the nodes there are, manage them. A module in `commands/` each."""

from __future__ import annotations

import typer

from pdserve.command import config_command
from pdserve.kvpool.commands import ns
from pdserve.kvpool.commands.drain import drain
from pdserve.kvpool.commands.ls import ls
from pdserve.kvpool.commands.status import status
from pdserve.kvpool.commands.top import top
from pdserve.kvpool.commands.upgrade import upgrade
from pdserve.kvpool.config import PoolNodeConfig
from pdserve.logs import configure_logs

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Run a pool node, look at the nodes there are, manage them.",
)


def _serve(config: PoolNodeConfig) -> None:
    # the other words need neither event loop nor UCX
    from pdserve.kvpool.process import run_node

    configure_logs(config.log_format, config.log_level, node=config.name)
    run_node(config)


_serve_command = config_command(
    PoolNodeConfig,
    _serve,
    help="Run a pool node until SIGTERM. Pages stay in memory for the next start.",
).registered_commands[0]
_serve_command.name = "serve"
app.registered_commands.append(_serve_command)

app.command("status")(status)
app.command("ls")(ls)
app.command("top")(top)
app.command("drain")(drain)
app.add_typer(ns.app, name="ns")
app.command("upgrade")(upgrade)
