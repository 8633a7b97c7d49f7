"""`python -m benchmarks gaps`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.commands import load_options as options
from benchmarks.commands import options as common
from benchmarks.commands.compare import ModelPath
from benchmarks.commands.output import Output, failed_with, say
from pdserve.settings.command_line import ExtraArgs


def gaps(
    tokens: Annotated[int, typer.Option(min=256, help="Tokens of each conversation asked beside.")] = 8000,
    output_tokens: Annotated[int, typer.Option(min=100, help="Tokens of each stream.")] = 400,
    rounds: Annotated[int, typer.Option(min=1, help="Streams of each kind.")] = 5,
    model: ModelPath = Path(options.DEMO_MODEL),
    pool_capacity: common.PoolCapacity = "4GiB",
    seed: options.Seed = 1,
    silence: options.Silence = 300.0,
    out: common.Out = None,
    as_json: common.AsJson = False,
    extra: ExtraArgs = None,
) -> None:
    """Time between the tokens of a stream while another conversation is pulled from the pool, or written.

    Starts an aggregated worker with a pool node and a router, then plain SGLang, on this machine.
    """
    from benchmarks.serving.contenders import device_tokens
    from benchmarks.serving.gaps import GapSample, Others, figures, measure_gaps
    from benchmarks.tables import table

    options.check_model(model)
    title = f"streams of {output_tokens} tokens beside conversations of {tokens:,}, {model.name}"
    output = Output(as_json, load=title, seed=seed)
    room = device_tokens(0, tokens + 3 * output_tokens, 1.0, 64)  # with the last stream and this one
    samples: list[GapSample] = []

    def keep(sample: GapSample) -> None:
        samples.append(sample)
        output.row(sample)

    others = Others(seed, tokens)
    with options.clusters(model, room, extra, out, pool_capacity=pool_capacity) as setting:
        problems = measure_gaps(setting, others, output_tokens, rounds, say, silence, keep)
    found = figures(samples)
    for line in found:
        output.row(line)
    columns = (
        "server",
        "beside",
        "streams",
        "gaps",
        "mean, ms",
        "p50",
        "p99",
        "p99 / alone",
        "first token, ms",
    )
    rows = [
        (
            one.contender,
            one.beside,
            f"{one.streams}",
            f"{one.gaps:,}",
            f"{one.mean_ms:.1f}",
            f"{one.p50_ms:.1f}",
            f"{one.p99_ms:.1f}",
            f"{one.p99_over_alone:.2f}",
            "" if one.first_token_ms is None else f"{one.first_token_ms:.0f}",
        )
        for one in found
    ]
    output.show(table(title, columns, rows, left=("server", "beside")))
    failed_with(problems)
