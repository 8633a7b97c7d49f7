"""`pdserve cert`: a small certificate authority, for those who have none."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdserve.tls.authority import ends_at, make_authority, make_host_certificate

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Make certificates for TLS between router, workers and pool nodes.",
)

Directory = Annotated[Path, typer.Argument(help="Directory of the authority, readable by its owner only.")]


@app.command("ca")
def make_ca(
    directory: Directory,
    days: Annotated[float, typer.Option(min=0.01, help="Lifetime.")] = 3650.0,
) -> None:
    """Make an authority: ca.pem for everybody, ca.key for `pdserve cert host` alone."""
    certificate = make_authority(directory, days)
    typer.echo(f"{certificate}: give it to all parts as tls.ca, and as tls.client_ca to those that listen")


@app.command("host")
def make_host(
    directory: Directory,
    names: Annotated[list[str], typer.Argument(help="Names and IP addresses that others reach the host by.")],
    days: Annotated[float, typer.Option(min=0.01, help="Lifetime; it ends with the authority's.")] = 90.0,
) -> None:
    """Make, or renew, a host's certificate. Running parts use the new one without a restart."""
    certificate, key = make_host_certificate(directory, names, days)
    until = ends_at(certificate).strftime("%Y-%m-%d")
    typer.echo(f"{certificate}: tls.certificate of the parts on this host, until {until}")
    typer.echo(f"{key}: tls.key; keep it on this host, readable by its owner only")
