"""`python -m benchmarks`: measure serving, router and pool, and put the pool under faults."""

from __future__ import annotations

import typer

from benchmarks.commands.compare import compare
from benchmarks.commands.endurance import chaos, hosts, soak
from benchmarks.commands.gaps import gaps
from benchmarks.commands.gpu_check import gpu_check
from benchmarks.commands.multiturn import multiturn
from benchmarks.commands.nodes import hostile, quiet, restart
from benchmarks.commands.offline import index, policies, scale
from benchmarks.commands.pool import codec, pool, tier
from benchmarks.commands.router import router
from benchmarks.commands.sweep import sweep
from benchmarks.commands.weights import weights
from benchmarks.commands.weights_load import weights_load

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
    restart,
    scale,
    soak,
    chaos,
    hosts,
)
for command in (*SERVING, *POOL):
    app.command()(command)
