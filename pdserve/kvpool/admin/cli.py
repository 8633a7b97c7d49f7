"""`pdserve pool`: run a node, look at the nodes there are, manage them."""

from __future__ import annotations

import typer

from pdserve.kvpool.admin import ns
from pdserve.kvpool.admin.drain import drain
from pdserve.kvpool.admin.ls import ls
from pdserve.kvpool.admin.status import status
from pdserve.kvpool.admin.upgrade import upgrade
from pdserve.kvpool.node import cli

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Run a pool node; show and manage running nodes.",
)


_serve = cli.command.registered_commands[0]
_serve.name = "serve"
app.registered_commands.append(_serve)

app.command("status")(status)
app.command("ls")(ls)
app.command("drain")(drain)
app.add_typer(ns.app, name="ns")
app.command("upgrade")(upgrade)
app.command("tenants")(ns.tenants)
app.command("delete")(ns.delete)
