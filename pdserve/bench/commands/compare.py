"""`pdserve bench compare`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console

from pdserve.bench.commands import load_options as options
from pdserve.bench.commands.options import choices

if TYPE_CHECKING:
    from pdserve.bench.serving.compare import Launch, Measured, Summary
    from pdserve.bench.serving.load import Shape
    from pdserve.bench.serving.run import Say

SHARES: Final = {"small": 0.3, "large": 1.1}
"""Device's KV cache over what all sessions have at their end: they do not fit, they do."""

ModelPath = Annotated[Path, typer.Option("--model", help="Model directory: pdserve model demo makes one.")]
ExtraArgs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- SGLANG_FLAGS]", help="Flags passed to SGLang in every worker.", show_default=False
    ),
]


def compare(
    against: Annotated[
        str, typer.Option(help="Contenders, separated by commas; ratios are over the first.")
    ] = "plain,file,agg,disagg",
    sizes: Annotated[
        str, typer.Option(help="Device KV caches: small, the sessions do not fit; large, they do.")
    ] = "small,large",
    repeat: Annotated[int, typer.Option(min=1, help="Rounds; medians are taken over them.")] = 3,
    minutes: Annotated[
        float, typer.Option(min=0, help="No round begins that would not end within this time; 0: all.")
    ] = 0.0,
    preset: options.Preset = "eic",
    scale: options.Scale = 0.1,
    users: options.Users = None,
    rounds: options.Rounds = None,
    spread: options.Spread = None,
    seed: options.Seed = 1,
    concurrency: options.Concurrency = 2,
    model: ModelPath = Path(options.DEMO_MODEL),
    pool_capacity: Annotated[str, typer.Option(help="Memory of the pool node.")] = "2GiB",
    silence: options.Silence = 300.0,
    plot: Annotated[Path | None, typer.Option(help="Draw the medians into this PNG file.")] = None,
    out: Annotated[Path | None, typer.Option(help="Keep logs and configuration in this directory.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Origin, every round, then the medians.")] = False,
    extra: ExtraArgs = None,
) -> None:
    """The same conversations against plain SGLang, SGLang with its file storage, and pdserve.

    Each is started on this machine for every round, one after the other. Fails when any ask failed.
    """
    from pdserve.bench.cluster import stopped_cleanly
    from pdserve.bench.plot import pyplot
    from pdserve.bench.provenance import provenance
    from pdserve.bench.serving import compare as bench
    from pdserve.bench.serving.contenders import NAMES
    from pdserve.bench.serving.report import plot_summaries

    names, chosen = choices("against", against, NAMES), choices("sizes", sizes, tuple(SHARES))
    options.check_model(model)
    if plot is not None:
        pyplot()  # before the work: is it there?
    shape = options.shape_of(preset, scale, {"users": users, "rounds": rounds, "spread": spread})
    title = f"{preset}, scale {scale:g}, {shape.users} users, {shape.rounds} rounds, {model.name}"
    say = partial(typer.echo, err=True)
    measured: list[Measured] = []
    if as_json:
        typer.echo(json.dumps({**provenance(), "load": title, "seed": seed}))
    with stopped_cleanly(), _launching(shape, seed, model, pool_capacity, out, extra or []) as launch:
        for one in bench.compare(
            names,
            chosen,
            repeat,
            shape,
            seed,
            launch,
            say,
            concurrency=concurrency,
            silence_s=silence,
            limit_s=60 * minutes,
        ):
            measured.append(one)
            _show(one, as_json, say)
    found = bench.summaries(measured)
    _print(found, title, as_json)
    if plot is not None:
        plot_summaries(plot, found, title)
    if any(summary.failed for summary in found):
        raise typer.Exit(1)


@contextmanager
def _launching(
    shape: Shape, seed: int, model: Path, pool_capacity: str, out: Path | None, extra: list[str]
) -> Iterator[Launch]:
    """How to start a contender with a device cache of a size; directories of our own until the end."""
    from pdserve.bench.serving.cluster import launched, workplace
    from pdserve.bench.serving.compare import total_tokens
    from pdserve.bench.serving.contenders import Setting, device_tokens
    from pdserve.bench.serving.load import make_load

    load = make_load(shape, seed)
    total, longest = total_tokens(load), load.longest_tokens
    with workplace(out) as (directory, memory):

        def launch(name: str, size: str) -> AbstractContextManager[str]:
            setting = Setting(
                model_path=str(model.resolve()),
                directory=directory,
                device_tokens=device_tokens(total, longest, SHARES[size], 64),
                pool_capacity=pool_capacity,
                arena_directory=memory,
                extra_args=tuple(extra),
            )
            return launched(name, setting)

        yield launch


def _show(one: Measured, as_json: bool, say: Say) -> None:
    import msgspec

    from pdserve.bench.serving.report import remarks

    if as_json:
        typer.echo(msgspec.json.encode(one).decode())
    for line in remarks(one.outcome):
        say(f"{one.contender}, {one.size}: {line}")


def _print(found: list[Summary], title: str, as_json: bool) -> None:
    import msgspec

    from pdserve.bench.serving.report import summaries_table

    if as_json:
        for summary in found:
            typer.echo(msgspec.json.encode(summary).decode())
    else:
        Console().print(summaries_table(found, title))
