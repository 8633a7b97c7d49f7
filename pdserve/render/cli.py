"""`pdserve render kubernetes FILE`, and `pdserve render helm FILE`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

import pdserve
from pdserve.errors import ConfigError
from pdserve.render.kubernetes.chart import chart_of
from pdserve.render.kubernetes.files import files_of, write
from pdserve.render.kubernetes.groups import Cluster, make_cluster
from pdserve.settings.command_line import ExtraArgs
from pdserve.up.cli import SCHEMAS, check_tables
from pdserve.up.config import read_cluster_file

DASHBOARDS = Path(pdserve.__file__).parents[1] / "launch" / "grafana"
"""Of a checkout; a package that was installed has none."""

ClusterFileArgument: TypeAlias = Annotated[
    Path, typer.Argument(metavar="FILE", help="Cluster file (TOML), as of `pdserve up`.")
]
Out: TypeAlias = Annotated[Path, typer.Option(metavar="DIR", help="Where the files are written.")]
ModelOption: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="Model directory of all workers (worker.engine.model_path)."),
]
Dashboards: TypeAlias = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Grafana's dashboards; none: launch/grafana of this checkout."),
]
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback()
def render() -> None:
    """Write a cluster file as files for another engine of processes; starts nothing."""


@app.command()
def kubernetes(
    file: ClusterFileArgument,
    out: Out,
    model: ModelOption = None,
    dashboards: Dashboards = None,
    extra: ExtraArgs = None,
) -> None:
    """Write Kustomize files: base, overlays for CPU and GPU, components for what needs more than Kubernetes.

    Secrets are named and not written. docs/cluster.md says what to put where.
    """
    files = files_of(_cluster(file, model, extra), _dashboards(dashboards))
    write(files, out)
    typer.echo(f"{len(files)} files in {out}; next: {out / 'README.md'}")


@app.command()
def helm(
    file: ClusterFileArgument,
    out: Out,
    model: ModelOption = None,
    dashboards: Dashboards = None,
    extra: ExtraArgs = None,
) -> None:
    """Write the same as a Helm chart. Its values are the image, GPUs, numbers of pods, and components.

    The Secret of `pdserve render kubernetes` has to be there already.
    """
    files = chart_of(_cluster(file, model, extra), _dashboards(dashboards))
    write(files, out)
    typer.echo(f"{len(files)} files in {out}; next: helm install NAME {out}")


def _cluster(file: Path, model: str | None, extra: list[str] | None) -> Cluster:
    made = make_cluster(read_cluster_file(file, {"worker.engine.model_path": model}, {}), list(extra or ()))
    check_tables(made.plan, str(file), SCHEMAS)
    return made


def _dashboards(directory: Path | None) -> dict[str, str]:
    """Text by the name of the file."""
    directory = directory or DASHBOARDS
    found = {path.name: path for path in sorted(directory.glob("*.json"))}
    if not found:
        typer.echo(f"no dashboards: {directory} has none; --dashboards names another directory")
    try:
        return {name: path.read_text(encoding="utf-8") for name, path in found.items()}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dashboards {directory}: {error}") from None
