"""`python -m benchmarks compare`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from benchmarks.commands import load_options as options
from benchmarks.commands import options as common
from benchmarks.commands.output import Output, failed_with, say
from pdserve.settings.command_line import ExtraArgs

if TYPE_CHECKING:
    from benchmarks.serving.load.plan import Shape
    from benchmarks.serving.summary import Measured, Summary

PAGE_SIZE: Final = 64
SHARES: Final = {"small": 0.3, "large": 1.1}
"""Device's KV cache over what all sessions have at their end: they do not fit, they do; the smallest load and
the largest counts."""

Against = Annotated[
    str,
    typer.Option(
        help="Contenders, separated by commas; ratios are over the first. Empty: plain, file, "
        "mooncake (if installed), agg, disagg. Also possible: agg-once (no pages in host memory, and "
        "the pool larger by as much), disagg-direct, agg-mooncake and disagg-mooncake (Mooncake Store in "
        "place of the pool node), agg-two and elastic (two workers), dead (agg with a "
        "killed pool, R13); dynamo and dynamo-disagg; vllm, and with LMCache vllm-cpu, vllm-disk and "
        "vllm-pool."
    ),
]
ModelPath = Annotated[Path, typer.Option("--model", help="Model directory: pdserve model demo makes one.")]


def compare(
    against: Against = "",
    sizes: Annotated[
        str,
        typer.Option(help="Sizes of the device KV cache: small (sessions do not fit), large (they fit)."),
    ] = "small,large",
    repeat: Annotated[int, typer.Option(min=1, help="Rounds; results are medians over them.")] = 3,
    minutes: options.Minutes = 0.0,
    load: Annotated[
        list[str] | None,
        typer.Option(help="PRESET,scale=S,users=N,rounds=N instead of --preset; several run in turn."),
    ] = None,
    preset: options.Preset = "eic",
    scale: options.Scale = 0.1,
    users: options.Users = None,
    rounds: options.Rounds = None,
    spread: options.Spread = None,
    seed: options.Seed = 1,
    concurrency: options.Concurrency = 2,
    rate: options.Rate = None,
    model: ModelPath = Path(options.DEMO_MODEL),
    pool_capacity: common.PoolCapacity = "2GiB",
    silence: options.Silence = 300.0,
    plot: common.Plot = None,
    out: common.Out = None,
    as_json: common.AsJson = False,
    extra: ExtraArgs = None,
) -> None:
    """Compare plain SGLang, SGLang with file storage or Mooncake, and pdserve, with the same conversations.

    All servers are started on this machine and take turns. The command fails if a server could not be
    measured or a request failed; it shows the other results nevertheless.
    """
    from msgspec.structs import replace

    from benchmarks.serving.cluster import environments_of, launched
    from benchmarks.serving.compare import compare as run
    from benchmarks.serving.contenders import cache_tokens
    from benchmarks.serving.report.tables import plot_summaries
    from benchmarks.serving.summary import summaries

    names, chosen = _contenders(against), common.choices("sizes", sizes, tuple(SHARES))
    options.check_model(model)
    given = {"users": users, "rounds": rounds, "spread": spread}
    loads = options.loads_of(load or [], preset, scale, given, rate)
    tokens = {size: cache_tokens(loads.values(), SHARES[size], concurrency, PAGE_SIZE) for size in chosen}
    more = {"against": names, "device_tokens": tokens, "environments": environments_of(names)}
    output = Output(as_json, plot, load="; ".join(loads), model=model.name, seed=seed, **more)
    for line in _unfit(loads, tokens):
        say(f"WARNING: {line}")
    measured: list[Measured] = []
    keep = partial(_keep, measured, output)
    ours = {"pool_capacity": pool_capacity, "kv_token_bytes": _kv_token_bytes(model, extra or [])}
    with options.clusters(model, min(tokens.values()), extra, out, page_size=PAGE_SIZE, **ours) as setting:

        def launch(name: str, size: str) -> AbstractContextManager[str]:
            return launched(name, replace(setting, device_tokens=tokens[size]))

        problems = run(
            *(names, chosen, repeat, loads, seed, launch, keep, say),
            concurrency=concurrency,
            silence_s=silence,
            rate_s=rate,
            limit_s=60 * minutes,
        )
    found = summaries(measured, names[0])
    _print(found, model.name, output)
    if plot is not None and found:
        plot_summaries(plot, found, model.name)
    failed_with(problems)


def _contenders(against: str) -> list[str]:
    from benchmarks.peers.mooncake import is_installed
    from benchmarks.serving.contenders import ASKED_FOR, NAMES
    from benchmarks.serving.foreign import FOREIGN

    there = [name for name in NAMES if name not in ASKED_FOR and (name != "mooncake" or is_installed())]
    return common.choices("against", against, (*NAMES, *FOREIGN)) if against else there


def _kv_token_bytes(model: Path, flags: list[str]) -> int:
    """What a token takes in the device's KV cache, with the number type that the flags name."""
    import json

    from pdserve.engine.kv_bytes import token_bytes

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return token_bytes(config, "float32" if "float32" in flags else "auto")


def _keep(measured: list[Measured], output: Output, one: Measured) -> None:
    from benchmarks.serving.report.tables import remarks

    measured.append(one)
    output.row(one)
    for line in remarks(one.outcome):
        say(f"{one.contender}, {one.size}: {line}")


def _print(found: list[Summary], model: str, output: Output) -> None:
    """As JSON lines, or a table for each load."""
    from benchmarks.serving.report.tables import summaries_table

    for summary in found:
        output.row(summary)
    for load in dict.fromkeys(summary.load for summary in found):
        its = [summary for summary in found if summary.load == load]
        output.show(summaries_table(its, f"{load}, {model}"))


def _unfit(loads: dict[str, Shape], tokens: dict[str, int]) -> Iterator[str]:
    """Loads that the small cache holds after all."""
    from benchmarks.serving.load.plan import first_turn_tokens, make_load

    for title, shape in loads.items():
        held = first_turn_tokens(make_load(shape, 0))
        if shape.keeps_history and shape.rounds > 1 and held <= tokens.get("small", 0):
            yield (
                f"{title}: the small device cache of {tokens['small']:,} tokens holds all {held:,} of the "
                "first turn: take more users"
            )
