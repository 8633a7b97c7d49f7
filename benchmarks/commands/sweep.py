"""`python -m benchmarks sweep`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.commands import load_options as options
from benchmarks.commands import options as common
from benchmarks.commands.output import Output, failed_with, say
from pdserve.settings.command_line import ExtraArgs

if TYPE_CHECKING:
    from benchmarks.serving.load.plan import Shape
    from benchmarks.serving.load.run import Server
    from benchmarks.serving.sweep import Tried


def sweep(
    url: Annotated[
        str,
        typer.Argument(
            help="Base URL of a server with OpenAI's API: http://HOST:PORT; or plain, file, agg or "
            "disagg, which are started on this machine."
        ),
    ],
    limit_ms: Annotated[
        float, typer.Option(min=1, help="Longest time to the first token that counts as in time.")
    ] = 2000.0,
    share: Annotated[
        float, typer.Option(min=0.01, max=1, help="Share of requests that must be in time.")
    ] = 0.9,
    start: Annotated[float, typer.Option(min=1e-6, help="First rate, in requests per second.")] = 0.5,
    steps: Annotated[
        int,
        typer.Option(
            min=0, help="Rates to try between the last one that held and the first one that did not."
        ),
    ] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of arrivals at each rate.")] = 30.0,
    minutes: options.Minutes = 0.0,
    preset: options.Preset = "eic",
    scale: options.Scale = 1.0,
    rounds: options.Rounds = None,
    output_tokens: options.Output = None,
    seed: options.Seed = 1,
    api: options.TheApi = "completions",
    model: Annotated[
        str,
        typer.Option(
            help="Model to request; empty: the first one that the server lists. For a started "
            "server: the model's directory."
        ),
    ] = "",
    device_tokens: options.DeviceTokens = 16384,
    api_key: options.ApiKey = "",
    silence: options.Silence = 120.0,
    plot: common.Plot = None,
    as_json: common.AsJson = False,
    extra: ExtraArgs = None,
) -> None:
    """The highest rate of asks whose first tokens come in time, and what becomes of those above it.

    Conversations arrive at random times, whatever the server does; there are as many as the rate needs.
    Fails when no rate was met, every ask of one failed, or the server was lost; what was measured before is
    shown.
    """
    from benchmarks.serving.load.run import Server
    from benchmarks.serving.report.tables import plot_sweep, sweep_table
    from benchmarks.serving.sweep import best as best_of

    shape = options.shape_of(preset, scale, {"rounds": rounds, "output_tokens": output_tokens})
    (chosen,) = common.choices("api", api, options.APIS)
    title = f"{preset}, scale {scale:g}, first token within {limit_ms:g} ms for {share:.0%}"
    output = Output(as_json, plot, load=title, seed=seed)
    search = {"limit_s": limit_ms / 1e3, "share": share, "start_s": start, "steps": steps, "seconds": seconds}
    search["time_limit_s"] = 60 * minutes
    with _served(url, model, device_tokens, extra or []) as (at, name):
        server = Server(at, api=chosen, model=name, api_key=api_key, silence_s=silence)
        tried, problems = _search(server, shape, seed, at != url, output, search)
    best = best_of(tried)
    output.row({"best_rate_s": None if best is None else best.rate_s})
    output.show(sweep_table(tried, best, title))
    if plot is not None and tried:
        plot_sweep(plot, tried, limit_ms, title)
    failed_with([*problems, *(["no rate was met"] if best is None else [])])


def _search(
    server: Server, shape: Shape, seed: int, warm: bool, output: Output, search: dict[str, Any]
) -> tuple[list[Tried], list[str]]:
    """All rates tried, each shown as it was, and what ended the search early; `warm`: warm the server up."""
    from benchmarks.serving.compare import warm_up
    from benchmarks.serving.sweep import sweep as rates
    from benchmarks.stores import BenchError

    tried = []
    try:
        if warm:
            warm_up(server, shape)
        for one in rates(server, shape, seed, say, **search):
            tried.append(one)
            output.row(one)
    except BenchError as error:
        return tried, [str(error)]
    return tried, []


@contextmanager
def _served(url: str, model: str, device_tokens: int, extra: list[str]) -> Iterator[tuple[str, str]]:
    """(where to ask, for which model); a contender of `python -m benchmarks compare` runs until the block ends."""
    from benchmarks.serving.cluster import launched
    from benchmarks.serving.contenders import NAMES

    if url not in NAMES:
        yield url, model
        return
    with (
        options.clusters(Path(model or options.DEMO_MODEL), device_tokens, extra) as setting,
        launched(url, setting) as started,
    ):
        yield started, ""
