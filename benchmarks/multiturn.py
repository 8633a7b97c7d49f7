"""Conversations against any server of OpenAI's API: first-token time by turn, throughput, cached tokens by
tier.

In the open loop (`--rate`, one or several) latency counts from the planned time. `--trace` replays requests
of a trace in Mooncake's format in place of a preset. Fails when every request failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec.structs import replace

from benchmarks.lib.figures import Figures, Outcome, outcome_of
from benchmarks.lib.load import PRESETS, Api, Load, Shape, make_load, replay_load, trace_lines
from benchmarks.lib.report import FormatOption, Output, Table, ms, say, script
from benchmarks.lib.run import Server, run_load
from pdserve.errors import ConfigError

FEW = 100  # a p99 of fewer lies between the largest two
COLUMNS = (
    *("turn", "requests", "failed", "first token p50", "p90", "p99 ms", "inter-token p50", "p99 ms"),
    *("prompt tokens/s", "answer tokens/s", "cached", "device", "host", "pool DRAM", "pool SSD", "could be"),
)
PLACES = ("device", "host", "dram", "ssd")

Preset = Annotated[str, typer.Option(help=f"A load by name: {', '.join(PRESETS)}.")]
Scale = Annotated[float, typer.Option(min=1e-6, help="Factor of all lengths of the preset or trace.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of lengths, texts and arrivals.")]
Silence = Annotated[float, typer.Option(min=0.1, help="Longest silence of a server, in seconds.")]


def main(
    url: Annotated[str, typer.Argument(help="Base URL of a server with OpenAI's API: http://HOST:PORT.")],
    preset: Preset = "eic",
    scale: Scale = 1.0,
    users: Annotated[
        int | None, typer.Option(min=1, help="Conversations; this and the next replace the preset's.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Turns of each conversation.")] = None,
    system_tokens: Annotated[
        int | None, typer.Option(min=0, help="Tokens of the common system prompt.")
    ] = None,
    history_tokens: Annotated[
        int | None, typer.Option(min=0, help="Tokens that a user's first turn adds.")
    ] = None,
    turn_tokens: Annotated[int | None, typer.Option(min=1, help="New tokens of every turn.")] = None,
    output_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of every answer.")] = None,
    spread: Annotated[
        float | None, typer.Option(min=0, max=0.99, help="Variation of lengths: 0.5 is ± 50 %.")
    ] = None,
    seed: Seed = 1,
    rate: Annotated[str, typer.Option(help="Open loop: requests/s, or several separated by commas.")] = "",
    concurrency: Annotated[
        int, typer.Option(min=0, help="Closed loop: requests at a time; 0: each user's.")
    ] = 0,
    lockstep: Annotated[
        bool, typer.Option(help="Closed loop: a round begins when the last is answered.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Replay this trace: JSON lines in Mooncake's format.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Number of requests of the trace.")] = 100,
    speed: Annotated[float, typer.Option(min=1e-6, help="Factor of the trace's speed.")] = 1.0,
    max_tokens: Annotated[
        int, typer.Option(min=0, help="Leave out longer requests of the trace; 0: none.")
    ] = 0,
    api: Annotated[
        Api, typer.Option(help="completions: token ids, exact lengths; chat: messages of words.")
    ] = "completions",
    model: Annotated[
        str, typer.Option(help="Model to request; empty: the first that the server lists.")
    ] = "",
    api_key: Annotated[
        str, typer.Option(envvar="OPENAI_API_KEY", help="API key, sent as a bearer token.")
    ] = "",
    silence: Silence = 120.0,
    records: Annotated[
        Path | None, typer.Option(help="Write the times of every request to this file.")
    ] = None,
    format: FormatOption = "text",
) -> None:
    rates = _rates(rate)
    if lockstep and (rate or trace is not None):
        raise ConfigError("--lockstep is for the closed loop: leave out --rate and --trace")
    loads: dict[str, Load] = {}
    if trace is not None:
        load = trace_load(trace, requests, scale, speed, max_tokens, seed)
        loads[f"{trace.stem}, {len(load.sessions)} requests, scale {scale:g}, speed {speed:g}"] = load
    else:
        lengths = {
            "system_tokens": system_tokens,
            "history_tokens": history_tokens,
            "turn_tokens": turn_tokens,
        }
        given = {
            "users": users,
            "rounds": rounds,
            "output_tokens": output_tokens,
            "spread": spread,
            **lengths,
        }
        shape = shape_of(preset, scale, given)
        loads = {load_title(preset, scale, shape, each): make_load(shape, seed, each) for each in rates}
    server = Server(url, api=api, model=model, api_key=api_key, silence_s=silence)
    output = Output(format, load="; ".join(loads), seed=seed)
    kept, answered = [], 0
    for title, load in loads.items():
        run = run_load(server, load, say, concurrency=concurrency, lockstep=lockstep)
        outcome = outcome_of(run)
        kept += run.records
        answered += outcome.all.requests - outcome.all.failed
        output.row(outcome, load=title)
        output.show(turns_table(outcome, f"{title}: {outcome.model} at {server.url}"), *remarks(outcome))
    if records is not None:
        records.write_bytes(msgspec.json.Encoder().encode_lines(kept))
    if not answered:
        raise typer.Exit(1)


def _rates(text: str) -> list[float | None]:
    """Raises ConfigError."""
    try:
        found: list[float | None] = [float(word) for word in text.split(",")] if text else [None]
    except ValueError:
        raise ConfigError(f"--rate {text}: no numbers separated by commas") from None
    if any(each is not None and each <= 0 for each in found):
        raise ConfigError(f"--rate {text}: a rate is above 0")
    return found


def shape_of(preset: str, scale: float, given: dict[str, Any]) -> Shape:
    """A preset, scaled, with what was given in place of its own (not scaled). Raises ConfigError."""
    if preset not in PRESETS:
        raise ConfigError(f"'{preset}' is no preset: {', '.join(PRESETS)}")
    own = {name: value for name, value in given.items() if value is not None}
    return replace(PRESETS[preset].scaled(scale), **own)


def load_title(preset: str, scale: float, shape: Shape, rate_s: float | None = None) -> str:
    title = f"{preset}, scale {scale:g}, {shape.users} users, {shape.rounds} rounds"
    return title if rate_s is None else f"{title}, {rate_s:g} requests/s"


def trace_load(path: Path, requests: int, scale: float, speed: float, max_tokens: int, seed: int) -> Load:
    """The first requests of a trace; those longer than `max_tokens` (0: none) once scaled are left out.
    Raises ConfigError.
    """
    every = trace_lines(path)
    fitting = [
        one for one in every if not max_tokens or (one.input_length + one.output_length) * scale <= max_tokens
    ]
    lines = fitting[:requests]
    if not lines:
        raise ConfigError(
            f"--trace {path}: no request of it has at most {max_tokens} tokens: --scale it down"
        )
    if not all(line.input_length for line in lines):
        raise ConfigError(f"--trace {path}: a line without input_length")
    begin_ms = lines[0].timestamp
    rows = (
        ((one.timestamp - begin_ms) / 1000, one.input_length, one.output_length, one.hash_ids)
        for one in lines
    )
    return replay_load(rows, scale=scale, speed=speed, seed=seed)


def turns_table(outcome: Outcome, title: str) -> Table:
    """A row for each turn, for all turns, and for those from the second on."""
    rows = (
        [(str(number), turn) for number, turn in enumerate(outcome.turns, 1)]
        if len(outcome.turns) > 1
        else []
    )
    rows.append(("all", outcome.all))
    if outcome.later is not None:
        rows.append(("from 2", outcome.later))
    return Table(title, COLUMNS, [(name, *_cells(figures)) for name, figures in rows])


def _cells(figures: Figures) -> Iterator[str]:
    yield from (str(figures.requests), str(figures.failed or "-"))
    first, between = figures.first_token_ms, figures.inter_token_ms
    yield from map(ms, (first.p50, first.p90, first.p99, between.p50, between.p99))
    yield from (
        f"{figures.prompt_tokens_s:,.0f}",
        f"{figures.output_tokens_s:,.1f}",
        f"{figures.cached_share:.1%}",
    )
    for place in PLACES:
        tokens = getattr(figures.cached, place)
        yield "?" if tokens is None else f"{100 * tokens / max(1, figures.prompt_tokens):.1f}"
    yield f"{figures.reusable_share:.1%}"


def remarks(outcome: Outcome) -> Iterator[str]:
    """What to know besides, a line each."""
    for kind, count in outcome.errors.items():
        detail = outcome.first_details.get(kind, "")
        yield f"failed, {kind}: {count}" + (f" (the first: {detail})" if detail else "")
    if outcome.late_requests:
        yield f"{outcome.late_requests} requests were due before their session's last answer; that counts"
    yield (
        f"client: {outcome.client_cpu:.0%} of a core, late by {outcome.client_delay_p99_ms:.1f} ms at p99; "
        f"whole run {outcome.wall_s:.1f} s"
    )
    if 0 < (answered := outcome.all.requests - outcome.all.failed) < FEW:
        yield f"{answered} answers: p99 is about their maximum"
    for warning in outcome.warnings:
        yield f"WARNING: {warning}"


if __name__ == "__main__":
    script(main, __doc__)
