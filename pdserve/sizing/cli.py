"""`pdserve plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdserve.errors import ConfigError
from pdserve.router.config.slo import ServiceLevel
from pdserve.settings.config_file import build_config

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def plan(
    slo: Annotated[
        str, typer.Option(metavar="ttft_ms=MS,itl_ms=MS", help="The service level; one of the two may be left out.")
    ],
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The load: JSON lines in Mooncake's format.")
    ] = None,
    turning: Annotated[
        bool,
        typer.Option("--turning", help="A generated load in place of --trace, that turns from long prompts to long answers."),
    ] = False,
    rate: Annotated[float, typer.Option(min=1e-3, help="Requests a second of --turning.")] = 4.0,
    requests: Annotated[int, typer.Option(min=0, help="Number of requests; 0: the whole trace.")] = 3000,
    speed: Annotated[float, typer.Option(min=1e-6, help="Factor of the trace's speed.")] = 1.0,
    weights: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Raw lines of `pdserve bench weights --json`: measured rates."),
    ] = None,
    prefill_tokens_s: Annotated[
        float | None, typer.Option(min=1e-3, help="Prompt tokens that a worker computes a second.")
    ] = None,
    pool_tokens_s: Annotated[
        float | None, typer.Option(min=1e-3, help="Tokens whose KV a worker reads from the pool a second.")
    ] = None,
    hop_ms: Annotated[
        float | None, typer.Option(min=0, help="Time of a hand-over beside reading, in ms.")
    ] = None,
    step_ms: Annotated[float | None, typer.Option(min=0, help="A decode step for nobody, in ms.")] = None,
    step_ms_per_request: Annotated[
        float | None, typer.Option(min=0, help="What each request adds to a decode step, in ms.")
    ] = None,
    max_running: Annotated[int, typer.Option(min=1, help="Requests that a worker computes at a time.")] = 128,
    worker_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens whose KV a worker keeps in its own memory.")
    ] = 500_000,
    kv_bytes_per_token: Annotated[
        int, typer.Option(min=0, help="Bytes of KV of a token, to say the pool's size in GiB; 0: unknown.")
    ] = 0,
    goal: Annotated[float, typer.Option(min=0, max=1, help="Share of requests to be within the level.")] = 0.9,
    max_workers: Annotated[int, typer.Option(min=2, help="Largest number of workers that is tried.")] = 64,
    workers: Annotated[
        int | None,
        typer.Option(min=2, help="Only compare so many workers: half prefill and half decode, elastic, aggregated."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of what is left to chance.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Results as JSON lines.")] = False,
) -> None:
    """How many prefill, decode, elastic or aggregated workers and how much pool a load needs, and what each step more
    brings: a simulation of the router's own decisions. Nothing is started.
    """
    from msgspec.structs import asdict

    from pdserve.bench.commands.output import Output
    from pdserve.sizing import report
    from pdserve.sizing.advise import KINDS, Adviser
    from pdserve.sizing.load import BLOCK_TOKENS, read_load
    from pdserve.sizing.load import turning as turning_load
    from pdserve.sizing.rates import Given, combine, read_samples
    from pdserve.sizing.size import Setting, Size

    given = Given(
        prefill_tokens_s=prefill_tokens_s,
        pool_tokens_s=pool_tokens_s,
        hop_ms=hop_ms,
        step_ms=step_ms,
        step_ms_per_request=step_ms_per_request,
    )
    level = parse_level(slo)
    setting = Setting(
        rates=combine(given, [] if weights is None else read_samples(weights)),
        level=level,
        max_running=max_running,
        worker_blocks=worker_tokens // BLOCK_TOKENS,
        seed=seed,
    )
    if (trace is None) is not turning:
        raise ConfigError("which load? Give --trace FILE or --turning, one of them")
    load = turning_load(seed, requests or 3000, rate) if trace is None else read_load(trace, requests, speed)
    output = Output(as_json, load=str(trace or "turning"), seed=seed, rates=asdict(setting.rates), level=asdict(level))
    output.show(report.summary(load, setting))
    adviser = Adviser(load, setting)
    if workers is not None:
        outcomes = adviser.compared(workers)
        for one in outcomes:
            output.row(one, what="compared")
        output.show(report.compared(outcomes))
        return
    counts = {}
    for kind in KINDS:
        advice = adviser.advise(kind, goal, max_workers)
        counts[kind] = advice.chosen.size.total
        output.row(advice, what="advice")
        output.show(report.advised(advice, goal))
    outcomes = adviser.compared(max(2, counts["elastic"]))
    for one in outcomes:
        output.row(one, what="compared")
    output.show(report.compared(outcomes))
    sizes = list(adviser.pools(Size(elastic=counts["elastic"])))
    for blocks, one in sizes:
        output.row(one, what="pool", pool_tokens=blocks * BLOCK_TOKENS)
    output.show(report.pools(sizes, kv_bytes_per_token))


def parse_level(text: str) -> ServiceLevel:
    """`ttft_ms=2000,itl_ms=50` as a service level. Raises ConfigError."""
    found = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        try:
            found[name.strip()] = float(number)
        except ValueError:
            raise ConfigError(f"--slo {text}: {part!r} is not of the form ttft_ms=MS or itl_ms=MS") from None
    level = build_config(ServiceLevel, found, source="--slo")
    if not level.is_set or not found.keys() <= {"ttft_ms", "itl_ms"}:
        raise ConfigError(f"--slo {text}: give ttft_ms, itl_ms, or both")
    return level
