"""What numbers of workers, in different roles, make of a load: the least that keeps a service level is seen.

A simulation of the router's own decisions; nothing is started. Its shares of requests in time were up to 8
points too high beside real workers: take it to compare sizes, not as a promise.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import asdict

from benchmarks.lib.report import FormatOption, Output, Table, numbers, script
from benchmarks.simulate import model
from benchmarks.simulate.model import BLOCK_TOKENS, Rates, Request, Setting
from benchmarks.simulate.simulate import Outcome, outcomes
from pdserve.errors import ConfigError
from pdserve.router.config.limits import ServiceLevel
from pdserve.settings.config_file import build_config

COLUMNS = (
    *("workers", "in time", "part 1", "part 2", "part 3", "part 4", "goodput/s", "late", "slow"),
    *("ttft p50", "p90", "itl p50", "p90", "cached", "twice", "prefill busy"),
)


def main(
    slo: Annotated[
        str, typer.Option(metavar="ttft_ms=MS,itl_ms=MS", help="The service level; one may be left out.")
    ],
    prefill_tokens_s: Annotated[float, typer.Option(min=1, help="Prompt tokens a worker computes a second.")],
    step_ms: Annotated[float, typer.Option(min=0, help="A decode step for nobody, in ms.")],
    step_ms_per_request: Annotated[float, typer.Option(min=0, help="What each request adds to it, in ms.")],
    trace: Annotated[Path | None, typer.Option(help="The load: JSON lines in Mooncake's format.")] = None,
    turning: Annotated[
        bool,
        typer.Option(
            "--turning", help="In place of --trace: a load that turns from long prompts to long answers."
        ),
    ] = False,
    rate: Annotated[float, typer.Option(min=1e-3, help="Requests a second of --turning.")] = 4.0,
    requests: Annotated[
        int, typer.Option(min=1, help="Number of requests, the first ones of a trace.")
    ] = 3000,
    speed: Annotated[float, typer.Option(min=1e-6, help="Factor of the trace's speed.")] = 1.0,
    pool_tokens_s: Annotated[float, typer.Option(min=1, help="Tokens read from the pool a second.")] = 1e6,
    hop_ms: Annotated[float, typer.Option(min=0, help="Time of a hand-over beside reading, in ms.")] = 0.0,
    max_running: Annotated[int, typer.Option(min=1, help="Requests that a worker computes at a time.")] = 128,
    worker_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens whose KV a worker keeps itself.")
    ] = 500_000,
    pool_tokens: Annotated[
        int | None, typer.Option(min=0, help="Tokens whose KV the pool keeps; without it, all.")
    ] = None,
    workers: Annotated[
        str, typer.Option(help="Numbers of workers, separated by commas, each in different roles.")
    ] = "2,4,8,16",
    seed: Annotated[int, typer.Option(help="Seed of what is left to chance.")] = 1,
    format: FormatOption = "text",
) -> None:
    setting = Setting(
        rates=Rates(
            prefill_ms_per_token=1e3 / prefill_tokens_s,
            step_ms=step_ms,
            step_ms_per_request=step_ms_per_request,
            pool_ms_per_token=1e3 / pool_tokens_s,
            hop_ms=hop_ms,
        ),
        level=parse_level(slo),
        max_running=max_running,
        worker_blocks=worker_tokens // BLOCK_TOKENS,
        pool_blocks=None if pool_tokens is None else pool_tokens // BLOCK_TOKENS,
        seed=seed,
    )
    counts = numbers("workers", workers)
    if (trace is None) is not turning:
        raise ConfigError("which load? Give --trace FILE or --turning, one of them")
    load = model.turning(seed, requests, rate) if trace is None else model.read_load(trace, requests, speed)
    rates, level = asdict(setting.rates), asdict(setting.level)
    output = Output(format, seed=seed, load=str(trace or "turning"), rates=rates, level=level)
    output.show(summary(load, setting))
    found = [one for count in counts for one in outcomes(load, count, setting)]
    for one in found:
        output.row(one)
    output.show(
        Table("Parts are quarters of the load", COLUMNS, [_cells(one) for one in found], left=COLUMNS[:1])
    )


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


def summary(load: Sequence[Request], setting: Setting) -> str:
    """The load in a line."""
    seconds = max(1e-3, load[-1].at_s - load[0].at_s)
    prompts, answers = (sum(getattr(one, f"{what}_tokens") for one in load) for what in ("prompt", "output"))
    rates = setting.rates
    return (
        f"{len(load):,} requests in {seconds:,.0f} s: {len(load) / seconds:.2f} requests/s, prompts of "
        f"{prompts / len(load):,.0f} tokens and answers of {answers / len(load):,.0f} on average. "
        f"A worker computes {1e3 / rates.prefill_ms_per_token:,.0f} prompt tokens/s, and has a step of "
        f"{rates.step_ms:g} ms and {rates.step_ms_per_request:g} ms for each request."
    )


def _cells(one: Outcome) -> Sequence[str]:
    return (
        *(str(one.size), f"{one.in_time:.1%}"),
        *(f"{part:.0%}" for part in (*one.in_time_by_part, 0, 0, 0, 0)[:4]),
        *(f"{one.goodput_s:.2f}", f"{one.late:.1%}", f"{one.slow:.1%}"),
        *(f"{one.ttft_ms.get(p, 0.0):,.0f}" for p in ("p50", "p90")),
        *(f"{one.itl_ms.get(p, 0.0):.1f}" for p in ("p50", "p90")),
        *(f"{one.cached:.0%}", f"{one.computed_twice:.1%}"),
        ", ".join(f"{share:.0%}" for role, share in one.busy.items() if role != "decode"),
    )


if __name__ == "__main__":
    script(main, __doc__)
