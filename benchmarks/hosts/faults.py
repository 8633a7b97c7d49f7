"""What befalls the hosts, one after the other, and how each is done."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from benchmarks.hosts.cluster import FAKETIME, HostsCluster

LOSS: Final = 0.02
SLOW_BITS_S: Final = 20_000_000
AHEAD_S: Final = 3600


@dataclass(frozen=True)
class Fault:
    """One of them."""

    name: str
    what: str
    begin: Callable[[HostsCluster], None]
    end: Callable[[HostsCluster], None]
    waits: bool = True
    """It lasts as long as all do; else until `begin` has returned."""
    harmless: bool = False
    """No request may fail."""


def _nothing(_: HostsCluster) -> None:
    pass


def _heal(cluster: HostsCluster) -> None:
    cluster.network.heal()


def _isolate(cluster: HostsCluster) -> None:
    cluster.network.partition("c", "a")
    cluster.network.partition("c", "b")


def _c_is_back(cluster: HostsCluster) -> None:
    cluster.hosts.on("c")
    cluster.start_etcd()


FAULTS: Final[tuple[Fault, ...]] = (
    Fault("calm", "nothing happens", _nothing, _nothing, harmless=True),
    Fault(
        "partition",
        "no packet passes between a (router, prefill) and b (router, decode)",
        lambda cluster: cluster.network.partition("a", "b"),
        _heal,
    ),
    Fault("isolation", "c reaches only the clients' host, neither a nor b", _isolate, _heal),
    Fault(
        "loss",
        f"{LOSS:.0%} of the packets to and from b are lost",
        lambda cluster: cluster.network.lose("b", LOSS),
        _heal,
    ),
    Fault(
        "slow link",
        f"b's cable carries {SLOW_BITS_S // 1_000_000} Mbit/s",
        lambda cluster: cluster.network.slow("b", SLOW_BITS_S),
        _heal,
    ),
    Fault(
        "clock",
        "b's clock is an hour ahead",
        lambda cluster: cluster.set_clock("b", AHEAD_S),
        lambda cluster: cluster.set_clock("b", 0),
        harmless=True,
    ),
    Fault(
        "host b gone",
        "a power cut: router, pool node, decode worker",
        lambda cluster: cluster.hosts.off("b"),
        lambda cluster: cluster.hosts.on("b"),
    ),
    Fault(
        "host c gone",
        "a power cut: pool node, both workers, etcd",
        lambda cluster: cluster.hosts.off("c"),
        _c_is_back,
    ),
    Fault(
        "upgrade",
        "every process is restarted, host by host",
        HostsCluster.upgrade,
        _nothing,
        waits=False,
        harmless=True,
    ),
)


def possible() -> list[Fault]:
    """Those that can be done here: the clock takes libfaketime."""
    return [fault for fault in FAULTS if fault.name != "clock" or FAKETIME]


def carry_out(fault: Fault, cluster: HostsCluster, length_s: float) -> tuple[float, float]:
    """Begin and end of it, by CLOCK_MONOTONIC."""
    begun_s = time.monotonic()
    fault.begin(cluster)
    if fault.waits:
        time.sleep(length_s)
    ended_s = time.monotonic()
    fault.end(cluster)
    return begun_s, ended_s
