"""`pdserve pool top`: what the nodes are doing now, per node and per namespace.

Rates are the growth of counters between two samples. A node that restarted in between has none.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import msgspec
import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table

from pdserve.errors import PoolError
from pdserve.kvpool.commands.asking import (
    TIMEOUT_S,
    Address,
    Json,
    NodeClient,
    Timeout,
    Token,
    TokenFile,
    all_nodes,
    chosen_token,
    in_parallel,
)
from pdserve.kvpool.commands.tables import as_json, make_console, make_table, rate, share, size
from pdserve.kvpool.messages import NamespaceStatus, NodeAddress, StatusReport

COUNTED = ("operations", "read_bytes", "written_bytes")


class Rates(msgspec.Struct, frozen=True):
    """Of one node or one namespace. `hit_rate` is None where nothing was read."""

    name: str
    operations_s: float = 0.0
    read_bytes_s: float = 0.0
    written_bytes_s: float = 0.0
    hits_s: float = 0.0
    misses_s: float = 0.0
    evictions_s: float = 0.0

    @property
    def hit_rate(self) -> float | None:
        asked = self.hits_s + self.misses_s
        return self.hits_s / asked if asked else None


def top(
    address: Address,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.05, help="Time between two samples.")
    ] = 1.0,
    namespaces: Annotated[int, typer.Option("--namespaces", min=1, help="Busiest namespaces shown.")] = 10,
    once: Annotated[bool, typer.Option("--once", help="Take two samples, print, and end.")] = False,
    as_json_: Json = False,
    token: Token = "",
    token_file: TokenFile = None,
    timeout: Timeout = TIMEOUT_S,
) -> None:
    """Show operations, bytes and hits a second of every node and of the busiest namespaces."""
    secret = chosen_token(token, token_file)
    seen = Nodes([address], secret, timeout)
    console = make_console()
    seen.sample()
    if once or as_json_ or not console.is_terminal:
        while True:
            time.sleep(interval)
            rows = seen.sample()
            if as_json_:
                typer.echo(as_json(json_rows(rows, namespaces)))
            else:
                console.print(view(rows, namespaces))
            if once:
                return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            live.update(view(seen.sample(), namespaces), refresh=True)


class Row(msgspec.Struct, frozen=True):
    """One node in one interval: `report` is None where it did not answer, `error` says why."""

    node: NodeAddress
    report: StatusReport | None
    error: str
    total: Rates
    namespaces: list[Rates]


class Nodes:
    """Samples every node that those at some addresses know; who that is is asked anew each time."""

    def __init__(self, addresses: Sequence[str], token: str, timeout_s: float) -> None:
        self._addresses = list(addresses)
        self._seeds = self._addresses
        self._names: dict[str, str] = {}  # of nodes seen before, by address
        self._token = token
        self._timeout_s = timeout_s
        self._last: dict[str, tuple[float, StatusReport]] = {}

    def sample(self) -> list[Row]:
        """Raises PoolError when no node answers."""
        nodes = self._nodes()
        samples = in_parallel(nodes, self._ask)
        rows = []
        for node, sample in zip(nodes, samples, strict=True):
            if isinstance(sample, PoolError):
                self._last.pop(node.node, None)
                rows.append(Row(node, None, str(sample), Rates(node.node), []))
                continue
            at_s, report = sample
            before_s, before = self._last.get(node.node, (at_s, report))
            rows.append(_row(node, before, report, at_s - before_s))
            self._last[node.node] = (at_s, report)
        return rows

    def _nodes(self) -> list[NodeAddress]:
        """Those that answer, those that these know, and under their addresses those that nobody knows."""
        found: dict[str, NodeAddress] = {}
        answered: list[str] = []
        errors: dict[str, PoolError] = {}
        for some in (self._seeds[:1], self._seeds[1:]):  # mostly the first knows all the others
            known = {node.address for node in found.values()}
            unknown = [NodeAddress(seed, seed) for seed in some if seed not in known]
            for seed, nodes in zip(unknown, in_parallel(unknown, self._known_to), strict=True):
                if isinstance(nodes, PoolError):
                    errors[seed.address] = nodes
                else:
                    answered.append(seed.address)
                    found |= {node.node: node for node in nodes}
        if not found:
            raise errors[self._seeds[0]]
        self._names |= {node.address: node.node for node in found.values()}
        others = [node.address for node in found.values() if node.address not in errors]
        self._seeds = list(dict.fromkeys([*answered, *others, *self._addresses]))
        lost = [seed for seed in errors if seed in self._addresses and self._names.get(seed) not in found]
        return [
            *sorted(found.values(), key=lambda node: node.node),
            *(NodeAddress(self._names.get(seed, seed), seed) for seed in lost),
        ]

    def _known_to(self, node: NodeAddress) -> list[NodeAddress]:
        return all_nodes(node.address, self._token, self._timeout_s)

    def _ask(self, node: NodeAddress) -> tuple[float, StatusReport]:
        with NodeClient(node.address, self._token, self._timeout_s) as client:
            report = client.status()
        return report.uptime_s, report  # its own clock: no error from ours or the way


def _row(node: NodeAddress, before: StatusReport, now: StatusReport, seconds: float) -> Row:
    if before.incarnation != now.incarnation or seconds <= 0:
        return Row(node, now, "", Rates(node.node), [])
    earlier = {space.name: space for space in before.namespaces}
    spaces = [rates(earlier.get(space.name), space, seconds) for space in now.namespaces]
    return Row(node, now, "", add(node.node, spaces), spaces)


def rates(before: NamespaceStatus | None, now: NamespaceStatus, seconds: float) -> Rates:
    """The growth of a namespace's counters; all of them where it is new."""

    def grown(of_now: Mapping[str, int], of_before: Mapping[str, int], name: str) -> float:
        growth = of_now.get(name, 0) - of_before.get(name, 0)
        return max(0, growth) / seconds  # less where it was dropped and made again

    counters_then = before.counters if before is not None else {}
    plain_now = {"hits": now.hits, "misses": now.misses, "evictions": now.evictions}
    plain_then = (
        {"hits": before.hits, "misses": before.misses, "evictions": before.evictions} if before else {}
    )
    counted = {f"{name}_s": grown(now.counters, counters_then, name) for name in COUNTED}
    plain = {f"{name}_s": grown(plain_now, plain_then, name) for name in plain_now}
    return Rates(now.name, **counted, **plain)


def add(name: str, parts: Iterable[Rates]) -> Rates:
    """The sum."""
    listed = list(parts)
    numbers = [field for field in Rates.__struct_fields__ if field != "name"]
    return Rates(name, **{field: sum(getattr(part, field) for part in listed) for field in numbers})


def busiest(rows: list[Row], count: int) -> list[Rates]:
    """The namespaces with most bytes, then operations, over all nodes."""
    by_name: dict[str, list[Rates]] = {}
    for row in rows:
        for space in row.namespaces:
            by_name.setdefault(space.name, []).append(space)
    sums = [add(name, parts) for name, parts in by_name.items()]
    sums.sort(key=lambda r: (-(r.read_bytes_s + r.written_bytes_s), -r.operations_s, r.name))
    return sums[:count]


def json_rows(rows: list[Row], namespaces: int) -> dict[str, object]:
    """For programs."""
    return {
        "nodes": [{**_fields(row.total), "error": row.error or None} for row in rows],
        "namespaces": [_fields(each) for each in busiest(rows, namespaces)],
    }


def _fields(one: Rates) -> dict[str, object]:
    return {**msgspec.structs.asdict(one), "hit_rate": one.hit_rate}


def view(rows: list[Row], namespaces: int) -> Group:
    """For people."""
    columns = ("ops/s", "read/s", "written/s", "hits", "evicted/s")
    nodes = make_table("pool nodes", "node", *columns, "used", "pages", "clients")
    for row in rows:
        if row.report is None:
            nodes.add_row(row.node.node, *["-"] * 8)
            continue
        report = row.report
        used = share(report.used_bytes + report.reserved_bytes, report.capacity_bytes)
        nodes.add_row(*_cells(row.total), used, f"{report.pages:,}", f"{report.connections:,}")
    if len(rows) > 1:
        nodes.add_section()
        nodes.add_row(*_cells(add("all", [row.total for row in rows])), "", "", "")
    errors = [row.error for row in rows if row.error]
    found = busiest(rows, namespaces)
    return Group(nodes, *errors, *([_namespaces(found, columns)] if found else []))


def _namespaces(found: list[Rates], columns: tuple[str, ...]) -> Table:
    table = make_table("busiest namespaces", "name", *columns)
    for space in found:
        table.add_row(*_cells(space))
    return table


def _cells(one: Rates) -> tuple[str, ...]:
    hit_rate = one.hit_rate
    return (
        one.name,
        rate(one.operations_s),
        size(one.read_bytes_s),
        size(one.written_bytes_s),
        "-" if hit_rate is None else share(hit_rate, 1.0),
        rate(one.evictions_s),
    )
