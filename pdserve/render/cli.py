"""`pdserve render kubernetes FILE`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import pdserve
from pdserve.errors import ConfigError
from pdserve.render.kubernetes.files import files_of, write
from pdserve.render.kubernetes.groups import make_cluster
from pdserve.settings.command_line import ExtraArgs
from pdserve.up.cli import SCHEMAS, check_tables
from pdserve.up.config import read_cluster_file

DASHBOARDS = Path(pdserve.__file__).parents[1] / "launch" / "grafana"
"""Of a checkout; a package that was installed has none."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback()
def render() -> None:
    """Write a cluster file as files for another engine of processes; starts nothing."""


@app.command()
def kubernetes(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Cluster file (TOML), as of `pdserve up`.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the files are written.")],
    model: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Model directory of all workers (worker.engine.model_path)."),
    ] = None,
    dashboards: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Grafana's dashboards; none: launch/grafana of this checkout."),
    ] = None,
    extra: ExtraArgs = None,
) -> None:
    """Write Kustomize files: base, overlays for CPU and GPU, components for monitoring and scaling.

    Secrets are named and not written. docs/cluster.md says what to put where.
    """
    cluster = make_cluster(
        read_cluster_file(file, {"worker.engine.model_path": model}, {}), list(extra or ())
    )
    check_tables(cluster.plan, str(file), SCHEMAS)
    dashboards = dashboards or DASHBOARDS
    found = {path.name: path for path in sorted(dashboards.glob("*.json"))}
    try:
        texts = {name: path.read_text(encoding="utf-8") for name, path in found.items()}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dashboards {dashboards}: {error}") from None
    files = files_of(cluster, texts)
    write(files, out)
    if not found:
        typer.echo(f"no dashboards: {dashboards} has none; --dashboards names another directory")
    typer.echo(f"{len(files)} files in {out}; next: {out / 'README.md'}")
