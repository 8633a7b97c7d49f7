"""`pdserve bench sweep`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console

from pdserve.bench.commands import load_options as options
from pdserve.bench.commands.options import choices

if TYPE_CHECKING:
    from pdserve.bench.serving.words import Api


def sweep(
    url: Annotated[str, typer.Argument(help="Base URL of a server of OpenAI's API: http://HOST:PORT.")],
    limit_ms: Annotated[float, typer.Option(min=1, help="Time to the first token that is in time.")] = 2000.0,
    share: Annotated[float, typer.Option(min=0.01, max=1, help="Of the asks that must be in time.")] = 0.9,
    start: Annotated[float, typer.Option(min=1e-6, help="Asks a second to begin with.")] = 0.5,
    steps: Annotated[
        int, typer.Option(min=0, help="Rates between the last that held and the first not.")
    ] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="Time that the asks of a rate take to come.")] = 30.0,
    preset: options.Preset = "eic",
    scale: options.Scale = 1.0,
    rounds: options.Rounds = None,
    output_tokens: options.Output = None,
    spread: options.Spread = None,
    seed: options.Seed = 1,
    api: options.TheApi = "completions",
    model: options.ModelName = "",
    api_key: options.ApiKey = "",
    silence: options.Silence = 120.0,
    plot: Annotated[Path | None, typer.Option(help="Draw the rates into this PNG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Origin, then each rate, then the best.")] = False,
) -> None:
    """The highest rate of asks whose first tokens come in time, and what becomes of those above it.

    Conversations arrive at random times, whatever the server does; there are as many as the rate needs.
    Fails when no rate was met.
    """
    import msgspec

    from pdserve.bench.plot import pyplot
    from pdserve.bench.provenance import provenance
    from pdserve.bench.serving import sweep as bench
    from pdserve.bench.serving.report import plot_sweep, sweep_table
    from pdserve.bench.serving.run import Server

    if plot is not None:
        pyplot()  # before the work: is it there?
    given = {"rounds": rounds, "output_tokens": output_tokens, "spread": spread}
    shape = options.shape_of(preset, scale, given)
    chosen = cast("Api", choices("api", api, ("completions", "chat"))[0])
    server = Server(url, api=chosen, model=model, api_key=api_key, silence_s=silence)
    goal = f"first token within {limit_ms:g} ms for {share:.0%}"
    title = f"{preset}, scale {scale:g}, {shape.rounds} rounds: {goal}"
    if as_json:
        typer.echo(json.dumps({**provenance(), "load": title, "seed": seed}))
    tried = []
    say = partial(typer.echo, err=True)
    search = {"limit_s": limit_ms / 1e3, "share": share, "start_s": start, "seconds": seconds}
    for one in bench.sweep(server, shape, seed, say, steps=steps, **search):
        tried.append(one)
        if as_json:
            typer.echo(msgspec.json.encode(one).decode())
    best = bench.best(tried)
    if as_json:
        typer.echo(json.dumps({"best_rate_s": None if best is None else best.rate_s}))
    else:
        Console().print(sweep_table(tried, best, title))
    if plot is not None:
        plot_sweep(plot, tried, limit_ms, title)
    if best is None:
        raise typer.Exit(1)
