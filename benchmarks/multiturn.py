"""Conversations against any server of OpenAI's API: first-token time by turn, throughput, cached tokens by
tier.

In the open loop (`--rate`, one or several) latency counts from the planned time. `--trace` replays requests
of a trace in Mooncake's format in place of a preset. Fails when every request failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from benchmarks.lib.figures import Figures, Outcome, outcome_of
from benchmarks.lib.load import PRESETS, Load, make_load, replay_load, shapes_of, trace_lines
from benchmarks.lib.report import FormatOption, Output, Table, ms, say, script
from benchmarks.lib.run import Server, run_load
from pdserve.errors import ConfigError

FEW = 100  # a p99 of fewer lies between the largest two
COLUMNS = (
    *("turn", "requests", "failed", "first token p50", "p90", "p99 ms", "inter-token p50", "p99 ms"),
    *("prompt tokens/s", "answer tokens/s", "cached", "device", "host", "storage", "could be"),
)
PLACES = ("device", "host", "storage")

LoadOption = Annotated[
    list[str] | None,
    typer.Option(
        "--load", help=f"PRESET,scale=S,users=N,rounds=N, ...; several run in turn. {', '.join(PRESETS)}."
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of lengths, texts and arrivals.")]
Silence = Annotated[float, typer.Option(min=0.1, help="Longest silence of a server, in seconds.")]


def main(
    url: Annotated[str, typer.Argument(help="Base URL of a server with OpenAI's API: http://HOST:PORT.")],
    load: LoadOption = None,
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
    scale: Annotated[float, typer.Option(min=1e-6, help="Factor of the trace's lengths.")] = 1.0,
    requests: Annotated[int, typer.Option(min=1, help="Number of requests of the trace.")] = 100,
    speed: Annotated[float, typer.Option(min=1e-6, help="Factor of the trace's speed.")] = 1.0,
    max_tokens: Annotated[
        int, typer.Option(min=0, help="Leave out longer requests of the trace; 0: none.")
    ] = 0,
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
        replayed = trace_load(trace, requests, scale, speed, max_tokens, seed)
        loads[f"{trace.stem}, {len(replayed.sessions)} requests, scale {scale:g}, speed {speed:g}"] = replayed
    else:
        for title, shape in shapes_of(load or ["eic"]).items():
            for rate_s in rates:
                loop = "" if rate_s is None else f", {rate_s:g} requests/s"
                loads[title + loop] = make_load(shape, seed, rate_s)
    server = Server(url, model=model, api_key=api_key, silence_s=silence)
    output = Output(format, load="; ".join(loads), seed=seed)
    kept, answered = [], 0
    for title, each in loads.items():
        run = run_load(server, each, say, concurrency=concurrency, lockstep=lockstep)
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
