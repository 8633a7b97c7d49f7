"""`pdserve top`: what a router's `/metrics` says of its workers and requests, in a terminal.

A rate is the growth between two moments. A counter that fell (its process was replaced) counts from 0.
"""

from __future__ import annotations

import math
import os
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Final

import httpx
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdserve.errors import ConfigError, PdserveError
from pdserve.kvpool.admin.tables import make_console, make_table, rate, share, size
from pdserve.router.metrics.names import PARTS, PREFIX, TIERS
from pdserve.security.log_text import printable
from pdserve.security.tls import Certificates, TlsConfig
from pdserve.security.tokens import read_token

NO_PORT: Final = "it is no router's admin port"
EVERY_S: Final = 2.0
TIMEOUT_S: Final = 15.0
BAR_CELLS: Final = 60
MOST_TENANTS: Final = 10
COLOURS: Final = {
    **dict(zip(PARTS, ("grey70", "magenta", "dark_orange", "yellow", "cyan", "blue", "grey50"), strict=True)),
    "device": "cyan",
    "host": "green",
    "pool": "blue",
    "computed": "dark_orange",
    "ready": "green",
    "draining": "yellow",
    **dict.fromkeys(("down", "refused", "failing"), "red"),
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
    once: Annotated[bool, typer.Option("--once", help="Print what is now and exit.")] = False,
) -> None:
    """Show workers, requests and caches of a router's cluster, until Ctrl-C."""
    secret = read_token(key_file) if key_file else os.environ.get("PDSERVE_ADMIN_KEY", "").strip()
    if not secret:
        raise ConfigError("the admin key is needed: --key-file, or PDSERVE_ADMIN_KEY")
    console = make_console()
    tls = Certificates(TlsConfig(ca=tls_ca, certificate=tls_certificate, key=tls_key)).client_context
    seen = views(samples(url.rstrip("/"), secret, tls))
    if once or not console.is_terminal:
        for shown in seen:
            console.print(shown)
            if once:
                return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for shown in seen:
            live.update(shown, refresh=True)


class Sample:
    """What `/metrics` said at one moment. Names are without their prefix."""

    def __init__(self, text: str, at_s: float, pool: Mapping[str, Mapping[str, int]] | None = None) -> None:
        """`pool`: bytes of tenants' pages by place. Raises ValueError for what is no exposition."""
        self.at_s = at_s
        self.pool = pool or {}
        self._values: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for one in family.samples:
                self._values.setdefault(one.name.removeprefix(PREFIX), []).append((one.labels, one.value))

    def of(self, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
        """(labels, value) of those that have these labels."""
        found = self._values.get(name, [])
        return [one for one in found if labels.items() <= one[0].items()] if labels else found

    def total(self, name: str, **labels: str) -> float:
        """Their sum."""
        return sum(value for _, value in self.of(name, **labels))

    def grown(self, before: Sample, name: str, label: str) -> dict[str, float]:
        """The growth of a counter since `before`, by the values of one label."""
        then = {tuple(labels.items()): value for labels, value in before.of(name)}
        found: dict[str, float] = {}
        for labels, value in self.of(name):
            was = then.get(tuple(labels.items()), 0.0)
            found[labels[label]] = found.get(labels[label], 0.0) + (value - was if value >= was else value)
        return found


def samples(url: str, key: str, tls: ssl.SSLContext | None = None) -> Iterator[Sample]:
    """What the router says, every `EVERY_S`. Raises NoRouter."""
    headers = {"authorization": f"Bearer {key}"}
    try:
        with httpx.Client(headers=headers, timeout=TIMEOUT_S, trust_env=False, verify=tls or True) as client:
            while True:
                answer = client.get(f"{url}/metrics")
                if answer.status_code != 200:
                    what = {401: "the admin key is not right"}.get(answer.status_code, NO_PORT)
                    raise NoRouter(f"{url}: {what} (status {answer.status_code})")
                sample = Sample(answer.text, time.time(), _pool_of(client.get(f"{url}/tenants")))
                if not sample.of("requests_in_flight"):
                    raise NoRouter(f"{url}: {NO_PORT}")
                yield sample
                time.sleep(EVERY_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NoRouter(f"{url} does not answer: {error or type(error).__name__}") from None
    except ValueError as error:
        raise NoRouter(f"{url}: its answer cannot be read ({error})") from None


def _pool_of(answer: httpx.Response) -> dict[str, dict[str, int]]:
    """Empty where the router does not say. Raises ValueError."""
    told = answer.json()["tenants"] if answer.status_code == 200 else []
    return {str(one["name"]): one["pool"] for one in told if one.get("pool")}


def views(seen: Iterator[Sample]) -> Iterator[Group]:
    """A view for each sample but the first."""
    before = next(seen)
    for now in seen:
        yield view(before, now)
        before = now


def view(before: Sample, now: Sample) -> Group:
    """What happened between two samples, as text and tables for a terminal."""
    streams = now.grown(before, "first_token_seconds_count", "part").get("router", 0)
    spent = now.grown(before, "first_token_seconds_sum", "part") if streams else {}
    parts = {part: of_part / streams for part, of_part in spent.items()}
    tiers = now.grown(before, "turn_tokens_total", "tier")
    tokens = sum(tiers.values())
    shown: list[RenderableType] = [_head(before, now), Text()]
    shown += _bar("first token", parts, PARTS, lambda spent_s: f"{1e3 * spent_s:,.1f} ms")
    shown += _bar("prompt tokens", tiers, TIERS, lambda of_tier: share(of_tier, tokens))
    return Group(*shown, _workers(now), *([_tenants(now)] if now.pool else []))


def _head(before: Sample, now: Sample) -> Text:
    seconds = max(now.at_s - before.at_s, 1e-3)
    statuses = now.grown(before, "requests_total", "status")
    failed = sum(count for status, count in statuses.items() if status.startswith("5"))
    failed += sum(now.grown(before, "stream_errors_total", "reason").values())
    buckets = now.grown(before, "time_to_first_byte_seconds_bucket", "le")
    quantiles = {of: quantile(buckets, of) for of in (0.5, 0.9)}
    first_byte = ", ".join(f"p{100 * of:.0f} {1e3 * s:,.1f} ms" for of, s in quantiles.items() if s) or "-"
    silent = "; a router process does not answer" if now.total("processes_silent") else ""
    return Text(
        f"{time.strftime('%H:%M:%S', time.localtime(now.at_s))}  "
        f"{rate(sum(statuses.values()) / seconds)} requests/s, {rate(failed / seconds)} failed/s, "
        f"{now.total('requests_in_flight'):,.0f} in flight, {now.total('tenant_waiting'):,.0f} waiting, "
        f"{now.total('sessions'):,.0f} sessions, first byte {first_byte}{silent}"
    )


def quantile(buckets: dict[str, float], of: float) -> float | None:
    """The quantile `of` of cumulative buckets (bound → count), as Prometheus has it. None: they are empty."""
    counts = sorted((float(bound), count) for bound, count in buckets.items())
    wanted, low, below = of * (counts[-1][1] if counts else 0), 0.0, 0.0
    for bound, count in counts:
        if wanted and count >= wanted:
            return low if math.isinf(bound) else low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    return None


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


def _workers(now: Sample) -> Table:
    table = make_table("workers", "worker", "role", "state", "requests", left=3)
    for labels, requests in now.of("worker_requests_in_flight"):
        state = _state(now, labels)
        worker, role = printable(labels["worker"]), labels["role"]
        table.add_row(Text(worker), role, Text(state, COLOURS[state]), f"{requests:,.0f}")
    return table


def _tenants(now: Sample) -> Table:
    table = make_table("tenants in the pool", "tenant", "memory", "tiers")
    largest = sorted(now.pool.items(), key=lambda one: -sum(one[1].values()))[:MOST_TENANTS]
    for name, held in largest:
        table.add_row(Text(printable(name)), size(held["memory_bytes"]), size(held["tier_bytes"]))
    return table


def _state(now: Sample, labels: dict[str, str]) -> str:
    if now.total("worker_refused", **labels):
        return "refused"
    if not now.total("worker_healthy", **labels):
        return "down"
    if now.total("worker_circuit_open", **labels):
        return "failing"
    return "draining" if now.total("worker_draining", **labels) else "ready"
