"""`pdserve pool`: run a node, look at the nodes there are, manage them. A module in `commands/` each."""

from __future__ import annotations

import typer

from pdserve.kvpool import serve_cli
from pdserve.kvpool.commands import ns
from pdserve.kvpool.commands.drain import drain
from pdserve.kvpool.commands.ls import ls
from pdserve.kvpool.commands.status import status
from pdserve.kvpool.commands.top import top
from pdserve.kvpool.commands.upgrade import upgrade

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Run a pool node, look at the nodes there are, manage them.",
)


_serve = serve_cli.command.registered_commands[0]
_serve.name = "serve"
app.registered_commands.append(_serve)

app.command("status")(status)
app.command("ls")(ls)
app.command("top")(top)
app.command("drain")(drain)
app.add_typer(ns.app, name="ns")
app.command("upgrade")(upgrade)
