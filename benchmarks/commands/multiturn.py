"""`python -m benchmarks multiturn`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.commands import load_options as options
from benchmarks.commands import options as common
from benchmarks.commands.output import Output, say
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from benchmarks.serving.load.plan import Load, Shape
    from benchmarks.serving.load.run import Server


def multiturn(
    url: Annotated[str, typer.Argument(help="Base URL of a server with OpenAI's API: http://HOST:PORT.")],
    preset: options.Preset = "eic",
    scale: options.Scale = 1.0,
    users: options.Users = None,
    rounds: options.Rounds = None,
    system_tokens: options.System = None,
    history_tokens: options.History = None,
    turn_tokens: options.New = None,
    output_tokens: options.Output = None,
    spread: options.Spread = None,
    seed: options.Seed = 1,
    rate: options.Rate = None,
    concurrency: options.Concurrency = 0,
    lockstep: Annotated[
        bool, typer.Option(help="Closed loop: start a round when the last one is complete.")
    ] = False,
    trace: options.Trace = None,
    requests: options.Requests = 100,
    speed: options.Speed = 1.0,
    max_tokens: options.MaxTokens = 0,
    api: options.TheApi = "completions",
    model: options.ModelName = "",
    api_key: options.ApiKey = "",
    silence: options.Silence = 120.0,
    plot: common.Plot = None,
    records: Annotated[
        Path | None, typer.Option(help="Write the times of every request to this file.")
    ] = None,
    as_json: common.AsJson = False,
) -> None:
    """Conversations against any server of OpenAI's API: first-token time by turn, throughput, cached tokens.

    In the open loop latency counts from the planned time. Fails when every ask failed.
    """
    from benchmarks.serving.load.plan import make_load
    from benchmarks.serving.load.run import Server

    if lockstep and (rate is not None or trace is not None):
        raise ConfigError("--lockstep is for the closed loop: leave out --rate and --trace")
    if trace is not None:
        load = options.trace_load(trace, requests, scale, speed, max_tokens, seed)
        name = f"{trace.stem}, {len(load.sessions)} requests, scale {scale:g}, speed {speed:g}"
    else:
        lengths = {
            "system_tokens": system_tokens,
            "history_tokens": history_tokens,
            "turn_tokens": turn_tokens,
        }
        given = {"users": users, "rounds": rounds, "output_tokens": output_tokens, "spread": spread}
        shape = options.shape_of(preset, scale, {**given, **lengths})
        load, name = make_load(shape, seed, rate), _name(preset, shape, rate, lockstep)
    (chosen,) = common.choices("api", api, options.APIS)
    server = Server(url, api=chosen, model=model, api_key=api_key, silence_s=silence)
    _run(server, load, name, concurrency, lockstep, plot, records, as_json)


def _name(preset: str, shape: Shape, rate_s: float | None, lockstep: bool) -> str:
    loop = f"{rate_s:g} asks/s" if rate_s is not None else f"closed loop{', lockstep' if lockstep else ''}"
    first = shape.system_tokens + shape.history_tokens
    return (
        f"{preset}, {shape.users} users, {shape.rounds} rounds, {first:,} tokens before, "
        f"{shape.turn_tokens:,} a turn, {shape.output_tokens:,} answered, {loop}"
    )


def _run(
    server: Server,
    load: Load,
    name: str,
    concurrency: int,
    lockstep: bool,
    plot: Path | None,
    records: Path | None,
    as_json: bool,
) -> None:
    """Send it, show what came of it. Raises typer.Exit where nothing did."""
    import msgspec

    from benchmarks.serving.figures import outcome_of
    from benchmarks.serving.load.run import run_load
    from benchmarks.serving.report.tables import plot_turns, remarks, turns_table

    if records is not None:
        _write(records, "ab", b"")  # before the work: can it be written?
    output = Output(as_json, plot, load=name, seed=load.seed)
    run = run_load(server, load, say, concurrency=concurrency, lockstep=lockstep)
    outcome = outcome_of(run)
    output.row(outcome)
    output.show(turns_table(outcome, f"{name}: {outcome.model} at {server.url}"), *remarks(outcome))
    if records is not None:
        _write(records, "wb", msgspec.json.Encoder().encode_lines(run.records))
    if plot is not None:
        plot_turns(plot, outcome, f"{name}: {outcome.model}")
    if outcome.all.failed == outcome.all.asks:
        raise typer.Exit(1)


def _write(path: Path, mode: str, data: bytes) -> None:
    """Raises ConfigError where it cannot be written."""
    try:
        with path.open(mode) as file:
            file.write(data)
    except OSError as error:
        raise ConfigError(f"--records {path}: {error.strerror}") from None
