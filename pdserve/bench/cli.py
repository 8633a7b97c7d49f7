"""`pdserve bench`: measure serving, router and pool, and put the pool under faults."""

from __future__ import annotations

import typer

from pdserve.bench.commands.compare import compare
from pdserve.bench.commands.endurance import chaos, hosts, soak
from pdserve.bench.commands.gaps import gaps
from pdserve.bench.commands.gpu_check import gpu_check
from pdserve.bench.commands.multiturn import multiturn
from pdserve.bench.commands.nodes import hostile, hot, quiet, restart
from pdserve.bench.commands.offline import index, policies, scale
from pdserve.bench.commands.pool import codec, pool, tier
from pdserve.bench.commands.router import router
from pdserve.bench.commands.sweep import sweep
from pdserve.bench.commands.weights import weights
from pdserve.bench.commands.weights_load import weights_load

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Measure serving, router and pool, and put the pool under faults.",
)
SERVING = (multiturn, compare, sweep, weights, gaps, router, gpu_check)
POOL = (
    pool,
    tier,
    codec,
    weights_load,
    policies,
    index,
    quiet,
    hostile,
    hot,
    restart,
    scale,
    soak,
    chaos,
    hosts,
)
for command in (*SERVING, *POOL):
    app.command()(command)
