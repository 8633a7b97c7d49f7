"""`pdserve key`: a new API key of a tenant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdserve.router.tenants.api_keys import append_line, key_line, new_key

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def key(
    tenant: Annotated[str, typer.Argument(help="Name of the tenant.")],
    file: Annotated[
        Path | None, typer.Option(help="Keys file (access.keys_file) to add the key's digest to.")
    ] = None,
) -> None:
    """Make an API key and print it, once: only its digest is kept."""
    made = new_key()
    line = key_line(tenant, made)
    if file is not None:
        append_line(file, line)
    typer.echo(made)
    if file is None:
        typer.echo(f"for the keys file: {line}", err=True, nl=False)
