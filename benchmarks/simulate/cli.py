"""`pdserve plan`. What takes long to import is imported in the commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from pdserve.errors import ConfigError
from pdserve.router.config.slo import ServiceLevel
from pdserve.settings.config_file import build_config

if TYPE_CHECKING:
    from benchmarks.commands.output import Output
    from benchmarks.simulate.advise import Adviser

Slo: TypeAlias = Annotated[
    str,
    typer.Option(metavar="ttft_ms=MS,itl_ms=MS", help="The service level; one of the two may be left out."),
]
Trace: TypeAlias = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The load: JSON lines in Mooncake's format.")
]
Turning: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--turning",
        help="In place of --trace: a generated load that turns from long prompts to long answers.",
    ),
]
Rate: TypeAlias = Annotated[float, typer.Option(min=1e-3, help="Requests a second of --turning.")]
Requests: TypeAlias = Annotated[
    int, typer.Option(min=1, help="Number of requests, the first ones of a trace.")
]
Speed: TypeAlias = Annotated[float, typer.Option(min=1e-6, help="Factor of the trace's speed.")]
WeightsFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Raw lines of `python -m benchmarks weights --json`: measured rates."),
]
PrefillRate: TypeAlias = Annotated[
    float | None, typer.Option(min=1e-3, help="Prompt tokens that a worker computes a second.")
]
PoolRate: TypeAlias = Annotated[
    float | None, typer.Option(min=1e-3, help="Tokens whose KV a worker reads from the pool a second.")
]
Hop: TypeAlias = Annotated[
    float | None, typer.Option(min=0, help="Time of a hand-over beside reading, in ms.")
]
Step: TypeAlias = Annotated[float | None, typer.Option(min=0, help="A decode step for nobody, in ms.")]
StepOfRequest: TypeAlias = Annotated[
    float | None, typer.Option(min=0, help="What each request adds to a decode step, in ms.")
]
MaxRunning: TypeAlias = Annotated[int, typer.Option(min=1, help="Requests that a worker computes at a time.")]
WorkerTokens: TypeAlias = Annotated[
    int, typer.Option(min=0, help="Tokens whose KV a worker keeps in its own memory.")
]
PoolTokens: TypeAlias = Annotated[
    int | None, typer.Option(min=0, help="Tokens whose KV the pool keeps; without it, all.")
]
KvBytes: TypeAlias = Annotated[
    int, typer.Option(min=0, help="Bytes of KV of a token, to say the pool's size in GiB; 0: unknown.")
]
Goal: TypeAlias = Annotated[
    float, typer.Option(min=0, max=1, help="Share of requests to be within the level.")
]
KnowsPlaces: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--knows-places",
        help="As if the router knew what workers and the pool have of each prompt.",
    ),
]
MaxWorkers: TypeAlias = Annotated[int, typer.Option(min=2, help="Largest number of workers that is tried.")]
Workers: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=2, help="Only compare so many workers: half prefill and half decode, elastic, aggregated."
    ),
]

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def plan(
    slo: Slo,
    trace: Trace = None,
    turning: Turning = False,
    rate: Rate = 4.0,
    requests: Requests = 3000,
    speed: Speed = 1.0,
    weights: WeightsFile = None,
    prefill_tokens_s: PrefillRate = None,
    pool_tokens_s: PoolRate = None,
    hop_ms: Hop = None,
    step_ms: Step = None,
    step_ms_per_request: StepOfRequest = None,
    max_running: MaxRunning = 128,
    worker_tokens: WorkerTokens = 500_000,
    pool_tokens: PoolTokens = None,
    kv_bytes_per_token: KvBytes = 0,
    goal: Goal = 0.9,
    max_workers: MaxWorkers = 64,
    workers: Workers = None,
    knows_places: KnowsPlaces = False,
    seed: Annotated[int, typer.Option(help="Seed of what is left to chance.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Results as JSON lines.")] = False,
) -> None:
    """How many workers of which role and how much pool a load needs, and what each step more brings.

    A simulation of the router's own decisions. Nothing is started.
    """
    from msgspec.structs import asdict

    from benchmarks.commands.output import Output
    from benchmarks.simulate import load as loads
    from benchmarks.simulate import report
    from benchmarks.simulate.advise import Adviser
    from benchmarks.simulate.rates import Given, combine, read_samples
    from benchmarks.simulate.size import Setting

    given = Given(
        prefill_tokens_s=prefill_tokens_s,
        pool_tokens_s=pool_tokens_s,
        hop_ms=hop_ms,
        step_ms=step_ms,
        step_ms_per_request=step_ms_per_request,
    )
    setting = Setting(
        rates=combine(given, [] if weights is None else read_samples(weights)),
        level=parse_level(slo),
        max_running=max_running,
        worker_blocks=worker_tokens // loads.BLOCK_TOKENS,
        pool_blocks=None if pool_tokens is None else pool_tokens // loads.BLOCK_TOKENS,
        knows_places=knows_places,
        seed=seed,
    )
    if (trace is None) is not turning:
        raise ConfigError("which load? Give --trace FILE or --turning, one of them")
    load = loads.turning(seed, requests, rate) if trace is None else loads.read_load(trace, requests, speed)
    origin: dict[str, Any] = {
        "load": str(trace or "turning"),
        "rates": asdict(setting.rates),
        "level": asdict(setting.level),
    }
    output = Output(as_json, None, seed=seed, **origin)
    output.show(report.summary(load, setting))
    adviser = Adviser(load, setting)
    if workers is not None:
        _compare(output, adviser, workers)
    else:
        _advise(output, adviser, goal, max_workers, kv_bytes_per_token)


def _compare(output: Output, adviser: Adviser, workers: int) -> None:
    """So many workers in different roles."""
    from benchmarks.simulate.report import compared

    outcomes = adviser.compared(workers)
    for one in outcomes:
        output.row(one, what="compared")
    output.show(compared(outcomes), width=120)


def _advise(output: Output, adviser: Adviser, goal: float, max_workers: int, kv_bytes_per_token: int) -> None:
    """The least workers of each kind, the kinds beside each other, and sizes of the pool."""
    from benchmarks.simulate.advise import KINDS
    from benchmarks.simulate.load import BLOCK_TOKENS
    from benchmarks.simulate.report import advised, pools
    from benchmarks.simulate.size import Size

    counts = {}
    for kind in KINDS:
        advice = adviser.advise(kind, goal, max_workers)
        counts[kind] = advice.chosen.size.total
        output.row(advice, what="advice")
        output.show(advised(advice, goal), width=120)
    _compare(output, adviser, max(2, counts["elastic"]))
    sizes = list(adviser.pools(Size(elastic=counts["elastic"])))
    for blocks, one in sizes:
        output.row(one, what="pool", pool_tokens=blocks * BLOCK_TOKENS)
    output.show(pools(sizes, kv_bytes_per_token))


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
