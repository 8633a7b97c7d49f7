"""`pdserve pool serve` and `pdserve pool status`."""

from __future__ import annotations

import logging
import time
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from pdserve.command import config_command
from pdserve.errors import PoolRefused
from pdserve.kvpool.config import PoolNodeConfig
from pdserve.kvpool.messages import Fault, Status, StatusReport
from pdserve.kvpool.transports.control import ControlChannel, make_hello

STATUS_TIMEOUT_S = 5.0

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Run a pool node, or ask one how it is.",
)


def _serve(config: PoolNodeConfig) -> None:
    from pdserve.kvpool.node import run_node  # `pool status` needs neither event loop nor UCX

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    run_node(config)


_serve_command = config_command(
    PoolNodeConfig, _serve, help="Run a pool node until SIGTERM. Pages stay in memory for the next start."
).registered_commands[0]
_serve_command.name = "serve"
app.registered_commands.append(_serve_command)


@app.command()
def status(
    address: Annotated[str, typer.Argument(help="Control address: unix:/path or tcp:host:port.")],
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON for programs.")] = False,
) -> None:
    """Ask a pool node how it is."""
    report = fetch_status(address, time.monotonic() + STATUS_TIMEOUT_S)
    if as_json:
        # by field name, though the messages travel as arrays
        namespaces = [msgspec.structs.asdict(namespace) for namespace in report.namespaces]
        whole = {**msgspec.structs.asdict(report), "namespaces": namespaces}
        typer.echo(msgspec.json.encode(whole).decode())
        return
    console = Console()
    console.print(_node_table(report))
    if report.namespaces:
        console.print(_namespace_table(report))


def fetch_status(address: str, deadline: float) -> StatusReport:
    """Raises PoolUnavailable, PoolTimeout, PoolRefused, ConfigError."""
    channel = ControlChannel.connect(address, make_hello("pool status", "", "none"), deadline)
    try:
        reply = channel.call(Status(1), deadline)
    finally:
        channel.close()
    if isinstance(reply, StatusReport):
        return reply
    text = reply.message if isinstance(reply, Fault) else f"unexpected {type(reply).__name__}"
    raise PoolRefused(f"pool node {address}: {text}")


def _node_table(report: StatusReport) -> Table:
    table = Table(title=f"pool node {report.node}, up {_duration(report.uptime_s)}", show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    for name, value in (
        ("capacity", report.capacity_bytes),
        ("free", report.free_bytes),
        ("used", report.used_bytes),
        ("reserved", report.reserved_bytes),
        ("quarantined", report.quarantined_bytes),
    ):
        table.add_row(name, _size(value))
    for name, count in (
        ("pages", report.pages),
        ("pins", report.pins),
        ("waiters", report.waiters),
        ("connections", report.connections),
        *report.counters.items(),
    ):
        table.add_row(name.replace("_", " "), f"{count:,}")
    return table


def _namespace_table(report: StatusReport) -> Table:
    table = Table(title="namespaces")
    table.add_column("name", overflow="fold")
    for heading in ("pages", "bytes", "hits", "misses", "evictions"):
        table.add_column(heading, justify="right")
    for namespace in report.namespaces:
        counts = (namespace.hits, namespace.misses, namespace.evictions)
        table.add_row(
            namespace.name, f"{namespace.pages:,}", _size(namespace.page_bytes), *(f"{n:,}" for n in counts)
        )
    return table


def _size(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def _duration(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"
