"""`python -m benchmarks weights`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.commands import load_options as options
from benchmarks.commands import options as common
from benchmarks.commands.compare import ModelPath
from benchmarks.commands.output import Output, failed_with, say
from pdserve.settings.command_line import ExtraArgs


def weights(
    tokens: Annotated[int, typer.Option(min=1, help="New tokens of each turn.")] = 2048,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each conversation.")] = 2,
    repeat: Annotated[
        int, typer.Option(min=1, help="Number of conversations; results are medians over them.")
    ] = 5,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of every answer.")] = 32,
    pull_step: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens per step of pulling pages while a prompt is computed, for prompts of at "
            "least two steps; none: as configured by default.",
        ),
    ] = None,
    device_tokens: options.DeviceTokens = 16384,
    model: ModelPath = Path(options.DEMO_MODEL),
    pool_capacity: common.PoolCapacity = "2GiB",
    seed: options.Seed = 1,
    silence: options.Silence = 300.0,
    plot: common.Plot = None,
    out: common.Out = None,
    as_json: common.AsJson = False,
    extra: ExtraArgs = None,
) -> None:
    """Where the time to the first token goes when prefill and decode are two workers, one request at a time.

    Starts a pool node, a prefill worker, a decode worker and a router on this machine. Fails when any request
    did.
    """
    from benchmarks.serving.load.plan import Shape
    from benchmarks.serving.parts import weigh
    from benchmarks.serving.report.weights_report import plot_weights, text
    from benchmarks.serving.weights import weights as run

    options.check_model(model)
    title = f"{repeat} conversations of {rounds} turns of {tokens:,} new tokens, one at a time, {model.name}"
    shape = Shape(users=repeat, rounds=rounds, turn_tokens=tokens, output_tokens=output_tokens)
    output = Output(as_json, plot, load=title, seed=seed)
    ours = {"pool_capacity": pool_capacity, "trace_pages": True, "pull_step_tokens": pull_step}
    with options.clusters(model, device_tokens, extra, out, **ours) as setting:
        samples, problems = run(shape, seed, setting, say, silence)
    turns = sorted({one.turn for one in samples})
    found = [weigh([one for one in samples if one.turn == turn]) for turn in turns]
    for line in [*samples, *found]:
        output.row(line)
    for of_turn in found:
        output.show(*text(of_turn))
    if plot is not None and samples:
        plot_weights(plot, samples, title)
    failed_with(problems)
