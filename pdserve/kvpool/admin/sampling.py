"""What nodes do in a second: the growth of their counters between two samples. For the router's live page."""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from pdserve.errors import PoolError
from pdserve.kvpool.admin.node_client import (
    NodeClient,
    all_nodes,
    in_parallel,
)
from pdserve.kvpool.protocol.messages import NamespaceStatus, NodeAddress, StatusReport

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


class Row(msgspec.Struct, frozen=True):
    """One node in one interval: `report` is None where it did not answer, `error` says why."""

    node: NodeAddress
    report: StatusReport | None
    error: str
    total: Rates
    namespaces: list[Rates]


class Nodes:
    """Samples every node of the pools at some addresses. Each sample asks anew which nodes there are."""

    def __init__(
        self, addresses: Sequence[str], token: str, timeout_s: float, tls: ssl.SSLContext | None = None
    ) -> None:
        self._addresses = list(addresses)
        self._seeds = self._addresses
        self._names: dict[str, str] = {}  # of nodes seen before, by address
        self._token = token
        self._timeout_s = timeout_s
        self._tls = tls
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
        """The nodes that answer, the nodes that these know, and the other addresses as they were given."""
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
        return all_nodes(node.address, self._token, self._timeout_s, self._tls)

    def _ask(self, node: NodeAddress) -> tuple[float, StatusReport]:
        with NodeClient(node.address, self._token, self._timeout_s, self._tls) as client:
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
