"""One measured or computed figure, and what the figures are of."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import msgspec

Counted = Literal["nodes", "workers"]


class Figure(msgspec.Struct, frozen=True):
    """`value` of `what`, with so many nodes or workers."""

    what: str
    count: int
    value: float


class Kind(NamedTuple):
    """What a figure is of."""

    title: str
    unit: str
    of: Counted
    limit: float
    """Beyond it something breaks, or a second is not enough for a second's work."""
    why: str
    """What the limit is."""


KINDS: Final[dict[str, Kind]] = {
    "gossip_calm": Kind(
        "gossip while nothing changes", "KB/s of a node", "nodes", 12_500, "1 % of a line of 10 Gbit/s"
    ),
    "gossip_change_mb": Kind(
        "gossip of one change of the ring", "MB of a node", "nodes", 125, "a second of 1 Gbit/s"
    ),
    "gossip_change_s": Kind(
        "processor time for one change of the ring", "s of a node", "nodes", 1.0, "a node's ping time-out"
    ),
    "view_kb": Kind("the view that clients get", "KB", "nodes", 4096, "a frame holds 4 MiB"),
    "view_push_mb": Kind(
        "views that a node sends at a change", "MB", "nodes", 1250, "a second of a line of 10 Gbit/s"
    ),
    "ring_s": Kind("building the ring", "s", "nodes", 1.0, "a node's ping time-out"),
    "ring_mb": Kind(
        "memory of a ring", "MB of a process", "nodes", 1000, "two rings in each worker's process"
    ),
    "prefix_mb": Kind("memory of the prefix table", "MB of a router", "workers", 4096, "4 GiB for a router"),
    "join_s": Kind("all workers join", "s of a router process", "workers", 60.0, "a minute to start"),
    "plan_ms": Kind("planning one request", "ms", "workers", 1.0, "1,000 requests a second of a process"),
    "probe_cores": Kind(
        "health checks", "cores of a router process", "workers", 1.0, "a process has one core"
    ),
    "etcd_list_mb": Kind("list of workers in etcd", "MB", "workers", 4096, "no limit near"),
    "etcd_renewals": Kind(
        "leases renewed in etcd", "requests/s", "workers", 10_000, "what etcd's makers measured of writes"
    ),
}
