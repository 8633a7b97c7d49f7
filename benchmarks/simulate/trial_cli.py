"""`pdserve trial`. What takes long to import is imported in the command."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from benchmarks.commands import load_options as options
from benchmarks.commands import options as common
from benchmarks.simulate.cli import Slo, Trace, Turning, parse_level
from pdserve.settings.command_line import ExtraArgs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.commands.output import Output
    from benchmarks.serving.contenders import Setting
    from benchmarks.simulate.load import Request
    from benchmarks.simulate.real import Compared, Trial

SHORT_TOKENS: Final = 128
CALIBRATED_TOKENS: Final = 512
"""Prompts that the workers' rates are measured with."""
PAGE_SIZE: Final = 64
DEVICE_TOKENS: Final = 8_192
"""Six workers run at a time, on 24 GB: so their caches are small."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def trial(
    slo: Slo,
    trace: Trace = None,
    turning: Turning = False,
    scale: Annotated[float, typer.Option(min=1e-6, help="Factor of all lengths of the load.")] = 0.1,
    rate: Annotated[float, typer.Option(min=1e-3, help="Requests a second of --turning.")] = 0.5,
    requests: Annotated[int, typer.Option(min=1, help="Number of requests, the first ones of a trace.")] = 40,
    speed: Annotated[float, typer.Option(min=1e-6, help="Factor of the trace's speed.")] = 1.0,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds; results are means over them.")] = 3,
    min_prefill_tokens: Annotated[
        int, typer.Option(min=0, help="Shorter prompts have no prefill stage, as the router's option says.")
    ] = 64,
    seed: options.Seed = 1,
    model: Annotated[
        Path, typer.Option("--model", help="Model directory: pdserve model demo makes one.")
    ] = Path(options.DEMO_MODEL),
    device_tokens: options.DeviceTokens = DEVICE_TOKENS,
    pool_capacity: common.PoolCapacity = "512MiB",
    silence: options.Silence = 300.0,
    out: common.Out = None,
    as_json: common.AsJson = False,
    extra: ExtraArgs = None,
) -> None:
    """Serve a load with two real workers on this machine, in fixed, elastic and aggregated roles, beside what
    `pdserve plan` says of it.

    The workers' rates are measured first. The command fails if a request failed.
    """
    from msgspec.structs import asdict

    from benchmarks.commands.output import Output, failed_with, say
    from benchmarks.simulate import load as loads
    from benchmarks.simulate.real import Trial, rows
    from benchmarks.simulate.report import tried
    from pdserve.errors import ConfigError

    if (trace is None) is not turning:
        raise ConfigError("which load? Give --trace FILE or --turning, one of them")

    def make(of_seed: int) -> Sequence[Request]:
        if trace is not None:
            return loads.read_load(trace, requests, speed)
        return loads.turning(of_seed, requests, rate)

    level = parse_level(slo)
    mine = Trial(make, scale, level, min_prefill_tokens, say, silence_s=silence)
    output = Output(as_json, None, seed=seed, load=str(trace or "turning"), scale=scale, level=asdict(level))
    ours: dict[str, Any] = {"page_size": PAGE_SIZE, "pool_capacity": pool_capacity}
    with options.clusters(model, device_tokens, extra, out, **ours) as setting:
        found, problems = _measured(mine, setting, repeat, seed, output)
    for row in rows(found):
        output.row(row, what="kind")
    if found:
        output.show(tried(rows(found)), width=120)
    failed = sum(one.failed for one in found)
    failed_with([*problems, *([f"{failed} requests failed"] if failed else [])])


def _measured(
    mine: Trial, setting: Setting, rounds: int, seed: int, output: Output
) -> tuple[list[Compared], list[str]]:
    """All rounds of all kinds, each shown as it was, and what ended them early."""
    from msgspec.structs import asdict, replace

    from benchmarks.commands.output import say
    from benchmarks.serving.cluster import launched
    from benchmarks.simulate.rates import Rates
    from benchmarks.stores import BenchError

    def launch(name: str, router: Mapping[str, Any]) -> AbstractContextManager[str]:
        say(f"starting {name}")
        return launched(name, replace(setting, router=router))

    found: list[Compared] = []
    try:
        rates = mine.rates(launch, CALIBRATED_TOKENS)
        for one in mine.run(launch, rates, (SHORT_TOKENS, CALIBRATED_TOKENS), rounds, seed):
            if isinstance(one, Rates):
                output.row(one, what="rates")
                output.show(f"measured: {asdict(one)}")
            else:
                found.append(one)
                output.row(one, what="round")
    except BenchError as error:
        return found, [str(error)]
    return found, []
