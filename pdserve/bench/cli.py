"""`pdserve bench`: measure the pool on this machine, and put it under faults."""

from __future__ import annotations

import typer

from pdserve.bench import offline
from pdserve.bench.commands.chaos import chaos
from pdserve.bench.commands.hot import hot
from pdserve.bench.commands.pool import pool
from pdserve.bench.commands.quiet import quiet
from pdserve.bench.commands.restart import restart
from pdserve.bench.commands.soak import soak
from pdserve.bench.commands.tier import tier

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Measure the pool, and put it under faults.",
)
for command in (pool, tier, offline.policies, offline.index, quiet, hot, restart, soak, chaos):
    app.command()(command)
