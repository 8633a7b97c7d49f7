"""`pdserve weights`: models in the pool."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from msgspec.structs import replace
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from pdserve.errors import ConfigError
from pdserve.kvpool.admin.node_client import (
    Json,
    TlsCa,
    TlsCertificate,
    TlsKey,
    TokenFile,
    chosen_token,
    tls_files,
    with_options_of,
)
from pdserve.kvpool.admin.tables import as_json, make_console, make_table, size
from pdserve.kvpool.client.config import PoolClientConfig, with_pool_secrets
from pdserve.kvpool.namespaces.registry import MAX_COPIES
from pdserve.kvpool.weights import catalog
from pdserve.kvpool.weights.files import alone_in, write_files
from pdserve.kvpool.weights.names import parse_model
from pdserve.kvpool.weights.place import pool_at
from pdserve.kvpool.weights.push import push as push_directory
from pdserve.kvpool.weights.store import NAMESPACE, WeightStore
from pdserve.security.tokens import Secret

Pool: TypeAlias = Annotated[
    str,
    typer.Option(
        "--pool",
        metavar="ADDRESS",
        envvar="PDSERVE_POOL",
        help="Control address of a pool node, unix:/path or tcp:host:port; it names the others.",
    ),
]
Namespace: TypeAlias = Annotated[
    str, typer.Option("--namespace", help="Namespace of weights in the pool.", show_default=True)
]
Name: TypeAlias = Annotated[
    str, typer.Argument(metavar="NAME[@REV]", help="Model; without @REV it is @main.")
]
Step: TypeAlias = Callable[[int, int], None]
Opening: TypeAlias = Callable[[], AbstractContextManager[WeightStore]]
"""Opens the store that the options name. Raises ConfigError, PoolError."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Store models' weights in the pool; list, check and remove them.",
)


def opens(command: Callable[..., None]) -> Callable[..., None]:
    """Make a command line of `command(opening, ...)`: its own options, and those that say which pool."""

    def run(
        pool: Pool,
        namespace: Namespace = NAMESPACE,
        token_file: TokenFile = None,
        tls_ca: TlsCa = None,
        tls_certificate: TlsCertificate = None,
        tls_key: TlsKey = None,
        **own: Any,
    ) -> None:
        @contextmanager
        def opening() -> Iterator[WeightStore]:
            tls = tls_files(tls_ca, tls_certificate, tls_key)
            config = with_pool_secrets(PoolClientConfig(tls=tls), os.environ)
            config = pool_at(pool, replace(config, token=Secret(chosen_token(token_file))))
            with WeightStore(config, namespace) as store:
                yield store

        command(opening, **own)

    return with_options_of(run, command)


@app.command()
@opens
def push(
    opening: Opening,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Model directory, or a hub cache's snapshot.")
    ],
    name: Name,
    weight: Annotated[
        float | None,
        typer.Option(help="Share of a busy node, where KV pages have 1; else as it is, 0.1 at first."),
    ] = None,
    copies: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_COPIES,
            help="Nodes that hold each page, of all weights in the pool; else as it is, 1 at first.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Store the files of a directory as a revision. The same again writes what the pool lacks of it."""
    model = parse_model(name)
    with opening() as store, _bar(json) as step:
        done = push_directory(store, directory, model, weight=weight, copies=copies, progress=step)
    if json:
        row = {"model": str(model), "bytes": done.manifest.size_bytes, "pages": done.pages}
        row |= {"written_pages": done.written_pages, "written_bytes": done.written_bytes}
        typer.echo(as_json({**row, "was_there": done.was_there, "warning": done.warning}))
        return
    files = f"{len(done.manifest.files):,} files, {size(done.manifest.size_bytes)}"
    written = f"{done.written_pages:,} of {done.pages:,} pages were written, {size(done.written_bytes)}"
    make_console().print(f"{model} is in the pool: {files}; {written}")
    if done.warning:
        typer.echo(f"pdserve weights: its pages may be evicted: {done.warning}", err=True)


@app.command()
@opens
def pull(
    opening: Opening,
    name: Name,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where the files go; made if it is missing.")
    ],
) -> None:
    """Write a revision's files into a directory, one pull at a time. Every page is checked."""
    model = parse_model(name)
    with opening() as store:
        manifest = store.manifest(model)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{directory}: {error.strerror or error}") from error
        with alone_in(directory):
            count = write_files(store.reader(model), manifest, directory, lambda file: True)
    make_console().print(f"{count:,} files of {model} are in {directory}, {size(manifest.size_bytes)}")


@app.command()
@opens
def ls(
    opening: Opening,
    json: Json = False,
) -> None:
    """List the models in the pool, and whether they are whole."""
    with opening() as store:
        found = catalog.entries(store)
    if json:
        for one in found:
            whole = one.manifest.size_bytes if one.manifest else None
            row = {"model": str(one.model), "state": one.state, "bytes": whole, "own_bytes": one.own_bytes}
            typer.echo(as_json({**row, "fingerprint": one.manifest.fingerprint if one.manifest else None}))
        return
    table = make_table("models in the pool", "model", "files", "size", "not shared", "state", left=1)
    for one in found:
        files, whole = (len(one.manifest.files), one.manifest.size_bytes) if one.manifest else (0, 0)
        table.add_row(str(one.model), f"{files:,}", size(whole), size(one.own_bytes), one.state)
    make_console().print(table if found else "the pool has no models: `pdserve weights push DIR NAME`")


@app.command()
@opens
def rm(
    opening: Opening,
    name: Name,
) -> None:
    """Remove a revision. Pages that no other revision has are freed at once."""
    model = parse_model(name)
    with opening() as store:
        _say_removed(f"{model} was removed", catalog.remove(store, model))


@app.command()
@opens
def prune(
    opening: Opening,
) -> None:
    """Free pages that no revision has: of pushes that were given up, or of nodes that were away."""
    with opening() as store:
        _say_removed("done", catalog.prune(store))


@app.command()
@opens
def warm(
    opening: Opening,
    name: Name,
) -> None:
    """Read and check every page of a revision, so that pages come up from tiers before workers need them."""
    model = parse_model(name)
    with opening() as store, _bar(False) as step:
        manifest = catalog.warm(store, model, step)
    make_console().print(f"{model} is whole, {size(manifest.size_bytes)} were read")


@contextmanager
def _bar(is_quiet: bool) -> Iterator[Step]:
    """A progress bar on a terminal."""
    console = make_console()
    if is_quiet or not console.is_terminal:
        yield lambda done, total: None
        return
    with Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    ) as bar:
        task = bar.add_task("pages")
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _say_removed(what: str, removed: catalog.Removed) -> None:
    make_console().print(f"{what}: {removed.pages:,} pages were freed")
    if removed.problem:
        typer.echo(f"pdserve weights: {removed.problem}", err=True)
