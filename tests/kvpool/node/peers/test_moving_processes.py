"""Pages that move between node processes: joined, drained, killed and paused under a real client."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.errors import PoolError
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.protocol.cluster_messages import ACTIVE, DEAD
from pdserve.kvpool.protocol.messages import StatusReport
from tests.support.command import pdserve_here
from tests.support.kvpool import faulty
from tests.support.kvpool.node_processes import NodeProcess
from tests.support.kvpool.nodes import keys as some_keys
from tests.support.suite.extended import extended

DEADLINE_S = 30.0
BATCH = 32


class Pool:
    """Processes by name that find each other through n0 and n1."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.nodes: dict[str, NodeProcess] = {}

    def start(self, *names: str, **settings: Any) -> None:
        whole = {
            "capacity_bytes": 48 << 20,
            "keep": False,
            "cluster": {
                "peers": [f"unix:{self.directory}/n{i}.sock" for i in (0, 1)],
                "ping_timeout_s": 0.5,
            },
            "moving": {"bytes_s": "5MB"},
        } | settings
        for name in names:
            self.nodes[name] = NodeProcess(name, self.directory, whole)
            self.nodes[name].spawn()
        for name in names:
            self.nodes[name].await_ready()

    def client(self) -> PoolClient:
        """It is told of one node, which drains or is killed later, and finds the others by itself."""
        refs = [PoolNodeRef(node="n0", address=self.nodes["n0"].address)]
        client = PoolClient(PoolClientConfig(nodes=refs), "ns", {"a": "b"})
        client.exists(some_keys(1))  # and is told of them
        return client

    def reports(self) -> dict[str, StatusReport]:
        found = {}
        for name, node in self.nodes.items():
            try:
                found[name] = node.status()
            except PoolError:
                continue
        return found

    def wait_for(self, what: Callable[[dict[str, StatusReport]], bool], said: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not what(self.reports()):
            assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {said}"
            time.sleep(0.02)  # between looks

    def settled(self, *names: str) -> None:
        """Wait until exactly these own the ring and nothing moves."""

        def done(reports: dict[str, StatusReport]) -> bool:
            if not reports.keys() >= set(names) or len({reports[name].epoch for name in names}) > 1:
                return False
            owners = [[m for m in reports[name].members if m.status == ACTIVE] for name in names]
            return all(
                sorted(member.node for member in members) == sorted(names)
                and all(member.settled >= reports[names[0]].epoch for member in members)
                for members in owners
            )

        self.wait_for(done, f"{names} have settled")

    def start_joining(self, name: str) -> None:
        """Start one, and wait until it has some pages of the others."""
        self.start(name)
        self.wait_for(lambda found: name in found and found[name].pages > 10, f"{name} gets pages")

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    found = Pool(tmp_path)
    yield found
    logs = "".join(node.log() for node in found.nodes.values())
    found.close()
    assert "Traceback" not in logs, logs


def put(client: PoolClient, keys: list[bytes]) -> None:
    for start in range(0, len(keys), BATCH):
        assert all(faulty.put(client, keys[start : start + BATCH]))


def get(client: PoolClient, keys: list[bytes]) -> list[bytes]:
    """Those found. Fails when a page has wrong bytes."""
    batches = [keys[start : start + BATCH] for start in range(0, len(keys), BATCH)]
    return [key for some in batches for key, hit in zip(some, faulty.get(client, some), strict=True) if hit]


class Load:
    """A client that reads all the time, and counts what it misses."""

    def __init__(self, client: PoolClient, keys: list[bytes]) -> None:
        self.reads = self.misses = 0
        self._client = client
        self._keys = keys
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        rng = np.random.default_rng(1)
        try:
            while not self._stopping.is_set():
                some = [self._keys[i] for i in rng.choice(len(self._keys), BATCH, replace=False)]
                found = get(self._client, some)
                self.reads += len(some)
                self.misses += len(some) - len(found)
        except BaseException as error:  # boundary: this thread; `stop` raises it
            self._failure = error

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "a read hangs"
        if self._failure is not None:
            raise self._failure


def conserved(report: StatusReport) -> bool:
    used = report.free_bytes + report.used_bytes + report.reserved_bytes + report.quarantined_bytes
    return used == report.capacity_bytes


def test_a_node_joins_and_another_drains_under_load(pool: Pool) -> None:
    pool.start("n0", stop_when_drained=True)
    pool.start("n1", "n2")
    pool.settled("n0", "n1", "n2")
    client = pool.client()
    keys = some_keys(900)
    put(client, keys)
    load = Load(client, keys)
    pool.start("n3")
    pool.settled("n0", "n1", "n2", "n3")
    moved = sum(report.counters["pages_pushed"] for report in pool.reports().values())
    assert 0 < moved <= 1.1 / 4 * len(keys) * 1.1  # test_ring holds the ring itself to it
    assert load.misses <= 0.01 * load.reads
    pool.wait_for(
        lambda found: sum(r.pages - r.counters["replicas"] for r in found.values()) == len(keys),
        "foreign pages are dropped",
    )
    assert get(client, keys) == keys
    drained = pdserve_here("pool", "drain", pool.nodes["n0"].address, "--json")
    assert drained.returncode == 0, drained.stderr
    pool.settled("n1", "n2", "n3")
    pool.wait_for(lambda _: not pool.nodes["n0"].runs, "the node that left stops by itself")
    load.stop()
    get(client, keys[:1])  # the client notices that its node is gone, and asks another
    assert load.misses <= 0.01 * load.reads
    assert get(client, keys) == keys, "no page is lost"
    assert all(conserved(report) for report in pool.reports().values())
    client.close()


@pytest.mark.parametrize("victim", ["n0", extended("n3")])
def test_killed_in_the_middle_of_a_move_nothing_hangs(pool: Pool, victim: str) -> None:
    pool.start("n0", "n1", "n2", lease_s=3.0, moving={"bytes_s": "200KB"})
    pool.settled("n0", "n1", "n2")
    client = pool.client()
    keys = some_keys(500, seed=2)
    put(client, keys)
    before = {name: report.pages for name, report in pool.reports().items()}
    load = Load(client, keys)
    pool.start_joining("n3")
    pool.nodes[victim].kill()
    survivors = [name for name in ("n0", "n1", "n2", "n3") if name != victim]
    pool.settled(*survivors)
    load.stop()
    lost = len(keys) - len(get(client, keys))
    assert lost <= (before["n0"] if victim == "n0" else 0)
    for name in survivors:
        report = pool.nodes[name].status()
        assert conserved(report)
        assert any(member.node == victim and member.status == DEAD for member in report.members)
    pool.wait_for(
        lambda found: all(found[n].reserved_bytes + found[n].quarantined_bytes == 0 for n in survivors),
        "no slot stays reserved",
    )
    client.close()
