"""A cluster over three hosts with scripted workers, under faults of network and hosts.

Routers, pool nodes, etcd and the supervisor are the real ones. No answer and no page may be wrong; nothing
may fail while no host is lost; and once all has recovered, requests succeed and pages are found again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import pytest

from tests.support.netns.lab import cannot
from tests.support.netns.scripted.cluster import FAKETIME, HostsCluster, cluster
from tests.support.netns.scripted.talk import Turn
from tests.support.netns.scripted.worker import WRONG
from tests.support.processes import HarnessError

LOSS: Final = 0.02
SLOW_BITS_S: Final = 20_000_000
AHEAD_S: Final = 3600
CLIENTS: Final = 4
WARM_UP_S: Final = 15.0
FAULT_S: Final = 12.0
PAUSE_S: Final = 30.0
FOUND_SHARE: Final = 0.9
"""Of the words of earlier turns, what is found in the pool while no page is lost."""


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


def carry_out(fault: Fault, cluster: HostsCluster) -> tuple[float, float]:
    """Begin and end of it, by CLOCK_MONOTONIC."""
    begun_s = time.monotonic()
    fault.begin(cluster)
    if fault.waits:
        time.sleep(FAULT_S)
    ended_s = time.monotonic()
    fault.end(cluster)
    return begun_s, ended_s


def found_share(turns: Sequence[Turn]) -> float:
    """Of the words of the turns before, in full pages: the share that was found in the pool."""
    known = sum(turn.known_words for turn in turns if not turn.error)
    return sum(turn.cached_words for turn in turns if not turn.error) / known if known else 0.0


@pytest.mark.extended
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ucx", [True, False], ids=["ucx", "tcp"])
def test_faults_of_hosts_and_networks_cost_what_they_must_and_no_more(tmp_path: Path, ucx: bool) -> None:
    spans: list[tuple[Fault, float, float, float]] = []
    try:
        with cluster(tmp_path, CLIENTS, ucx=ucx) as made:
            time.sleep(WARM_UP_S)
            for fault in FAULTS:
                if fault.name != "clock" or FAKETIME:
                    begun_s, ended_s = carry_out(fault, made)
                    time.sleep(PAUSE_S)
                    spans.append((fault, begun_s, ended_s, time.monotonic()))
            made.stop()
            log = made.log()
    except HarnessError as error:
        if "take root" in str(error) or "namespaces" in str(error):
            cannot(error)
        raise
    assert WRONG not in log, "a worker was given a wrong page"
    turns = msgspec.json.Decoder(Turn).decode_lines((tmp_path / "turns.jsonl").read_bytes())
    for fault, begun_s, ended_s, until_s in spans:
        meanwhile = [turn for turn in turns if turn.sent_s < ended_s and turn.done_s > begun_s]
        after = [turn for turn in turns if (ended_s + until_s) / 2 <= turn.sent_s and turn.done_s <= until_s]
        failed = [f"{turn.error}: {turn.detail}" for turn in meanwhile if turn.error]
        print(
            f"{fault.name}: {len(meanwhile)} turns, {len(failed)} failed, {found_share(meanwhile):.1%} found"
        )
        assert after, f"{fault.name}: nothing was answered after it"
        assert all(turn.is_right for turn in meanwhile + after), fault.name
        assert not [turn.detail for turn in after if turn.error], f"{fault.name}: a request failed after it"
        assert found_share(after) >= FOUND_SHARE, f"{fault.name}: pages stayed away"
        if fault.harmless:
            assert not failed, fault.name
            assert found_share(meanwhile) >= FOUND_SHARE, fault.name
