"""`pdserve top`: the frames of the live page, shown in a terminal (see `live_frames`)."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Final

import httpx
import msgspec
import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdserve.errors import ConfigError, PdserveError
from pdserve.kvpool.admin.tables import make_console, make_table, rate, share, size
from pdserve.router.admin.live_frames import (
    Frame,
    NodeView,
    Point,
    Problem,
    SpaceView,
    WorkerView,
)
from pdserve.router.metrics.names import PARTS, TIERS
from pdserve.security.log_text import printable
from pdserve.security.tls import Certificates, TlsConfig
from pdserve.security.tokens import read_token

TIMEOUT_S: Final = 15.0  # longest time without a frame; a frame arrives every two seconds
BAR_CELLS: Final = 60
COLOURS: Final = {
    **dict(zip(PARTS, ("grey70", "magenta", "dark_orange", "yellow", "cyan", "blue", "grey50"), strict=True)),
    "device": "cyan",
    "host": "green",
    "pool": "blue",
    "computed": "dark_orange",
    "ready": "green",
    "draining": "yellow",
    "warning": "yellow",
    **dict.fromkeys(("down", "refused", "failing", "error", "critical"), "red"),
}

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class NoRouter(PdserveError):
    """The router's admin port does not answer, or not as expected."""


@app.command()
def top(
    url: Annotated[str, typer.Argument(help="The router's admin port.")] = "http://127.0.0.1:8001",
    key_file: Annotated[
        Path | None,
        typer.Option("--key-file", help="File with the admin key; it may be in PDSERVE_ADMIN_KEY too."),
    ] = None,
    tls_ca: Annotated[
        Path | None, typer.Option("--tls-ca", help="Authority of the router's certificate, for https.")
    ] = None,
    tls_certificate: Annotated[
        Path | None,
        typer.Option("--tls-certificate", help="Our certificate, for a router that asks for one."),
    ] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="Its key.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print frames as JSON, one per line.")] = False,
) -> None:
    """Show workers, requests, caches, pool and errors of a router's cluster, until Ctrl-C."""
    secret = read_token(key_file) if key_file else os.environ.get("PDSERVE_ADMIN_KEY", "").strip()
    if not secret:
        raise ConfigError("the admin key is needed: --key-file, or PDSERVE_ADMIN_KEY")
    console = make_console()
    tls = Certificates(TlsConfig(ca=tls_ca, certificate=tls_certificate, key=tls_key)).client_context
    seen = frames(url.rstrip("/"), secret, tls)
    if once or as_json or not console.is_terminal:
        for frame in seen:
            if as_json:
                typer.echo(msgspec.json.encode(frame))
            else:
                console.print(view(frame))
            if once:
                return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for frame in seen:
            live.update(view(frame), refresh=True)


def frames(url: str, key: str, tls: ssl.SSLContext | None = None) -> Iterator[Frame]:
    """A router's frames from now on, without the first, which may be old. Raises NoRouter."""
    headers = {"authorization": f"Bearer {key}"}
    try:
        with (
            httpx.Client(headers=headers, timeout=TIMEOUT_S, trust_env=False, verify=tls or True) as client,
            client.stream("GET", f"{url}/live/events") as answer,
        ):
            if answer.status_code != 200:
                what = {401: "the admin key is not right", 404: "it is no admin port"}
                raise NoRouter(f"{url}: {what.get(answer.status_code, f'status {answer.status_code}')}")
            found = decode(answer.iter_lines())
            next(found, None)
            yield from found
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NoRouter(f"{url} does not answer: {error or type(error).__name__}") from None
    except msgspec.MsgspecError as error:
        raise NoRouter(f"{url} says what this version does not understand ({error}): upgrade both") from None
    raise NoRouter(f"{url}: the router has ended")


def decode(lines: Iterable[str]) -> Iterator[Frame]:
    """The frames in the lines of server-sent events. Raises msgspec.MsgspecError."""
    decoder, event = msgspec.json.Decoder(Frame), ""
    for line in lines:
        name, _, value = line.partition(": ")
        if not line or name == "event":  # an empty line is the end of an event
            event = value
        elif name == "data" and event == "frame":
            yield decoder.decode(value)


def view(frame: Frame) -> Group:
    """The frame as text and tables for a terminal."""
    parts: list[RenderableType] = [_head(frame), Text()]
    parts += _bar("first token", frame.point.parts_s, PARTS, lambda spent_s: f"{1e3 * spent_s:,.1f} ms")
    total = sum(frame.point.tokens_s.values())
    parts += _bar("prompt tokens", frame.point.tokens_s, TIERS, lambda tokens: share(tokens, total))
    parts += [_workers(frame.workers)]
    parts += [Text(printable(f"{one.id}: {one.says}"), "red") for one in frame.workers if one.says]
    parts += [_nodes(frame.nodes)] if frame.nodes else []
    parts += [_namespaces(frame.namespaces)] if frame.namespaces else []
    return Group(*parts, *(_problem(problem) for problem in frame.problems[:10]))


def _head(frame: Frame) -> Text:
    point = frame.point
    return Text(
        f"{time.strftime('%H:%M:%S', time.localtime(point.at_s))}  {rate(point.requests_s)} requests/s, "
        f"{rate(point.failed_s)} failed/s, {point.in_flight:,} in flight, {frame.waiting:,} waiting, "
        f"{frame.sessions:,} sessions, first byte {_first_byte(point)}"
    )


def _first_byte(point: Point) -> str:
    if point.first_byte_p50_s is None or point.first_byte_p90_s is None:
        return "-"
    return f"p50 {1e3 * point.first_byte_p50_s:,.1f} ms, p90 {1e3 * point.first_byte_p90_s:,.1f} ms"


def _bar(
    title: str, values: dict[str, float], keys: Iterable[str], text: Callable[[float], str]
) -> list[Text]:
    """A stacked bar and its legend. Empty if all values are 0."""
    total = sum(values.values())
    if not total:
        return []
    bar, legend = Text(f"{title:15}"), Text(" " * 15)
    for key in keys:
        if values.get(key):
            bar.append("█" * max(1, round(BAR_CELLS * values[key] / total)), COLOURS[key])
            legend.append("█ ", COLOURS[key]).append(f"{key} {text(values[key])}  ")
    return [bar, legend, Text()]


def _workers(workers: Iterable[WorkerView]) -> Table:
    table = make_table("workers", "worker", "role", "state", "requests", "queued tokens", "free KV", left=3)
    for one in workers:
        requests = "?" if one.in_flight is None else str(one.in_flight)
        if one.elsewhere:
            requests += f" + {one.elsewhere}"
        free = "-" if one.free_kv_tokens is None else f"{one.free_kv_tokens:,}"
        state = Text(one.state, COLOURS[one.state])
        table.add_row(one.id, one.role, state, requests, f"{one.queued_tokens:,}", free)
    return table


def _nodes(nodes: Iterable[NodeView]) -> Table:
    table = make_table(
        "pool nodes", "node", "memory", "pages", "hits", "ops/s", "read/s", "written/s", "clients"
    )
    for one in nodes:
        if one.error:
            table.add_row(Text(printable(f"{one.node}: {one.error}"), "red"), *["-"] * 7)
            continue
        table.add_row(
            one.node,
            share(one.used_bytes, one.capacity_bytes),
            f"{one.pages:,}",
            _rate_of_hits(one.hit_rate),
            rate(one.operations_s),
            size(one.read_bytes_s),
            size(one.written_bytes_s),
            f"{one.clients:,}",
        )
    return table


def _namespaces(spaces: Iterable[SpaceView]) -> Table:
    table = make_table("namespaces", "name", "of quota", "pages", "bytes", "hits", "evicted", "evicted/s")
    for one in spaces:
        table.add_row(
            one.name,
            share(one.slot_bytes, one.quota_bytes),
            f"{one.pages:,}",
            size(one.page_bytes),
            _rate_of_hits(one.hit_rate),
            f"{one.evictions:,}",
            rate(one.evictions_s),
        )
    return table


def _rate_of_hits(hit_rate: float | None) -> str:
    return "-" if hit_rate is None else share(hit_rate, 1.0)


def _problem(problem: Problem) -> Text:
    again = f" ({problem.count} times)" if problem.count > 1 else ""
    at = time.strftime("%H:%M:%S ", time.localtime(problem.at_s))
    level = Text(at).append(problem.level, COLOURS.get(problem.level, ""))
    return level.append(printable(f" {problem.text}{again}"))
