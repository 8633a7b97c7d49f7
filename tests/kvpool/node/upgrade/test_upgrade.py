"""A running node is replaced by a new program in the same process, under load, and nothing is lost."""

from __future__ import annotations

import errno
import gc
import os
import random
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pdserve.kvpool.admin.upgrade import upgrade
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.node.config import TierConfig
from pdserve.kvpool.node.upgrade import upgrader
from pdserve.kvpool.node.upgrade.upgrader import Start
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import Drain, Upgrade
from pdserve.kvpool.transports.base import Connection
from pdserve.kvpool.transports.control import ControlChannel, make_hello
from tests.support.command import pdserve_here
from tests.support.kvpool.moving_nodes import Nodes
from tests.support.kvpool.node_model import key
from tests.support.kvpool.nodes import StartProcess
from tests.support.kvpool.pools import KIB, ProcessPool
from tests.support.suite.extended import extended
from tests.support.waiting import soon, until

pytestmark = pytest.mark.long

PAGE_BYTES = 64 * KIB
ROOM_BYTES = 64 << 20
SOON_S = 60.0


def client_of(node: ProcessPool) -> PoolClient:
    """With generous bounds: these tests are not about speed, and others use the machine."""
    refs = [PoolNodeRef(node=node.name, address=node.address)]
    bounds = {f"{what}_timeout_s": SOON_S for what in ("connect", "exists", "get", "put")}
    config = PoolClientConfig(nodes=refs, data_path=node.data_path, restart_wait_s=SOON_S, **bounds)
    return PoolClient(config, "ns", {"page_size": "64"})


def page_of(n: int) -> list[np.ndarray[Any, Any]]:
    return [np.frombuffer((key(n) * (PAGE_BYTES // 32))[:PAGE_BYTES], np.uint8)]


def empty() -> list[np.ndarray[Any, Any]]:
    return [np.zeros(PAGE_BYTES, np.uint8)]


class Load:
    """Threads that write new pages and read all that they wrote before, until stopped; any that fails, or has
    wrong bytes, is noted.
    """

    def __init__(self, client: PoolClient, threads: int = 3, window: int = 60) -> None:
        self.client = client
        self.window = window  # pages of each thread that are kept in mind
        self.failures: list[str] = []
        self.rounds = [0] * threads
        self.written: list[list[int]] = [[] for _ in range(threads)]
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        mine = self.written[number]
        while not self._stop.is_set():
            fresh = [number * 1_000_000 + len(mine) + i for i in range(2)] if len(mine) < self.window else []
            if fresh and self.client.put([key(n) for n in fresh], [page_of(n) for n in fresh]) != [True] * 2:
                self.failures.append(f"put {fresh}")
            mine += fresh
            wanted = mine[-8:]
            if not all(self.client.exists([key(n) for n in wanted])):
                self.failures.append(f"exists {wanted}")
            self._read(mine[-8:])
            self.rounds[number] += 1

    def _read(self, wanted: list[int]) -> None:
        pages = [empty() for _ in wanted]
        found = self.client.get([key(n) for n in wanted], pages)
        for n, hit, page in zip(wanted, found, pages, strict=True):
            if not hit:
                self.failures.append(f"get {n}")
            elif not np.array_equal(page[0], page_of(n)[0]):
                self.failures.append(f"wrong bytes {n}")

    def progress(self) -> None:
        """Wait until every thread has made two more rounds."""
        wanted = [then + 2 for then in self.rounds]
        until(
            lambda: all(now >= then for now, then in zip(self.rounds, wanted, strict=True)), within_s=SOON_S
        )

    def end(self) -> None:
        """Stop, and read everything once more."""
        self._stop.set()
        for thread in self._threads:
            thread.join(SOON_S)
            assert not thread.is_alive()
        for mine in self.written:
            self._read(mine)


class Newcomers:
    """Clients that come, look for a page that is there, and go: until stopped."""

    def __init__(self, node: ProcessPool, page: int) -> None:
        self.found: list[bool] = []
        self._node = node
        self._page = page
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.01):  # between clients
            client = client_of(self._node)
            self.found += client.exists([key(self._page)])
            client.close()

    def end(self) -> None:
        self._stop.set()
        self._thread.join(SOON_S)
        assert not self._thread.is_alive()


def upgrade_by_signal(node: ProcessPool, client: PoolClient) -> None:
    """UCX, left to itself, takes SIGHUP as the wish to trace all that it does."""
    before = client.status()["node"].incarnation
    for _ in range(3):  # those that come meanwhile ask for nothing more
        os.kill(node.pid, signal.SIGHUP)
    until(lambda: client.status()["node"].incarnation != before, within_s=SOON_S)


@pytest.mark.parametrize(
    ("data_path", "ways"), [("shm", ["command", "signal"]), ("tcp", ["command"]), extended("ucx", ["signal"])]
)
def test_upgrades_under_load_fail_no_operation_of_old_and_new_clients_and_lose_no_page(
    start_process: StartProcess, data_path: str, ways: list[str]
) -> None:
    node = start_process(data_path, capacity_bytes=ROOM_BYTES)
    pid, incarnations = node.pid, set()
    client = client_of(node)
    assert client.put([key(9_000_000)], [page_of(9_000_000)]) == [True]
    load, newcomers = Load(client), Newcomers(node, 9_000_000)
    try:
        for way in ways:
            load.progress()
            if way == "signal":
                upgrade_by_signal(node, client)
            else:
                upgrade(node.address, deadline_s=SOON_S)
            report = client.status()["node"]
            incarnations.add(report.incarnation)
            assert report.counters["recovered_pages"] > 0
        load.progress()
    finally:
        newcomers.end()
        load.end()
    assert load.failures == []
    assert newcomers.found
    assert all(newcomers.found)
    assert len(incarnations) == len(ways)
    assert sum(map(len, load.written)) > 20
    assert client.counters.failures == client.counters.pages_lost == client.counters.pages_corrupt == 0
    assert (node.runs, node.pid) == (True, pid)
    assert Path(f"/proc/{pid}/status").read_text().count("Name:") == 1
    client.close()
    node.close()


@pytest.fixture
def slow_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A kind of tier, installed for nodes that are started: an SSD that takes long to tell what it has."""
    return install_tier(
        tmp_path,
        monkeypatch,
        "slow",
        "import time\n"
        "from pdserve.kvpool.tiers.ssd.tier import SegmentTier\n"
        "class Installed(SegmentTier):\n"
        "    def scan(self, known):\n"
        "        time.sleep(0.3)\n"
        "        yield from super().scan(known)\n",
    )


def install_tier(directory: Path, monkeypatch: pytest.MonkeyPatch, kind: str, code: str) -> str:
    """For nodes that are started from now on: the class `Installed` of this code. The kind's name."""
    (directory / f"{kind}_tier.py").write_text(code)
    installed = directory / f"{kind}_tier-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {kind}-tier\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(f"[pdserve.kvpool.tiers]\n{kind} = {kind}_tier:Installed\n")
    monkeypatch.setenv("PYTHONPATH", f"{directory}:{os.environ.get('PYTHONPATH', '')}")
    return kind


@pytest.fixture
def hung_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """As `slow_tier`: an SSD that never comes back from its first write. Its node hardly waits for it."""
    return install_tier(
        tmp_path,
        monkeypatch,
        "hung",
        "import threading\n"
        "from pdserve.kvpool.node.tiers import node_tiers\n"
        "from pdserve.kvpool.tiers.ssd.tier import SegmentTier\n"
        "node_tiers.STOP_TIMEOUT_S = 0.2\n"
        "class Installed(SegmentTier):\n"
        "    def put(self, pages, data):\n"
        "        threading.Event().wait()\n",
    )


@pytest.mark.extended
def test_a_node_with_a_tier_that_hangs_is_upgraded_all_the_same(
    start_process: StartProcess,
    tmp_path: Path,
    hung_tier: str,
) -> None:
    tier = TierConfig(kind=hung_tier, path=tmp_path / "ssd", capacity_bytes=64 << 20, write="all")
    node = start_process(capacity_bytes=ROOM_BYTES, tiers=[tier])
    client = client_of(node)
    assert client.put([key(1)], [page_of(1)]) == [True]
    upgrade(node.address, deadline_s=SOON_S)
    assert "it was upgraded" in node.log()
    assert len(client.status()["node"].tiers) == 1
    page = empty()
    assert client.get([key(1)], [page]) == [True]
    assert np.array_equal(page[0], page_of(1)[0])
    client.close()
    node.close()


def test_pages_that_are_only_on_ssd_are_found_throughout_an_upgrade(
    start_process: StartProcess, tmp_path: Path, slow_tier: str
) -> None:
    tier = TierConfig(kind=slow_tier, path=tmp_path / "ssd", capacity_bytes=64 << 20, write="all")
    node = start_process(capacity_bytes=4 << 20, tiers=[tier], promotion_timeout_s=SOON_S)
    client = client_of(node)
    known = list(range(160))
    for first in range(0, len(known), 20):
        some = known[first : first + 20]
        assert all(client.put([key(n) for n in some], [page_of(n) for n in some]))
        # nothing leaves memory before it is below
        until(lambda first=first: client.status()["node"].tiers[0].pages >= first + 20)  # type: ignore[misc]
    upgrading = threading.Thread(target=upgrade, args=(node.address,), kwargs={"deadline_s": SOON_S})
    upgrading.start()
    missed, dice = [], random.Random(5)
    while upgrading.is_alive():
        keys = [key(n) for n in dice.sample(known, 8)]
        missed.append(client.exists(keys).count(False))
        missed.append(client.get(keys, [empty() for _ in keys]).count(False))
    assert sum(missed) == 0
    assert len(missed) > 10
    until(lambda: client.exists([key(0)]) == [True])
    report = client.status()["node"]
    assert report.pages < len(known) == report.tiers[0].pages
    client.close()
    node.close()


def starting(directory: Path) -> list[str]:
    """A command that says that it would start node a there."""
    start = msgspec.json.encode(Start(name="a", arena_dir=str(directory))).decode()
    return ["sh", "-c", f"echo '{start}'"]


def test_a_node_is_not_drained_while_it_is_upgraded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(tmp_path)
    nodes.start("a")
    nodes.start("b")
    monkeypatch.setattr(upgrader, "command", lambda: ["sh", "-c", f"exec sleep {SOON_S}"])
    channel = ControlChannel.connect(f"unix:{tmp_path}/a.sock", make_hello("test", "", "none"), soon(5))
    channel.post(Upgrade(1))  # type: ignore[arg-type]
    reply = channel.call(Drain(2), soon(5))
    assert isinstance(reply, m.Fault)
    assert reply.code == "upgrade_under_way"
    reply = channel.call(Upgrade(3), soon(5))
    assert isinstance(reply, m.Fault)
    assert "under way already" in reply.message
    channel.close()
    nodes.close()


def no_descriptor(*_: object, **__: object) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize(
    ("what", "instead", "why"),
    [
        ("node.Arena.pass_lock", no_descriptor, "Too many open files"),
        ("upgrade.upgrader.asyncio.create_subprocess_exec", no_descriptor, "Too many open files"),
        ("upgrade.upgrader.command", lambda: ["sh", "-c", "echo '{}'"], "starts no node"),
        ("upgrade.upgrader.command", lambda: ["sh", "-c", "exit 3"], "exit status 3"),
    ],
)
def test_an_upgrade_for_which_something_is_lacking_is_refused_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, instead: Any, why: str
) -> None:
    nodes = Nodes(tmp_path)
    nodes.start("a")
    monkeypatch.setattr(upgrader, "command", lambda: starting(tmp_path))
    monkeypatch.setattr(f"pdserve.kvpool.node.{what}", instead)
    channel = ControlChannel.connect(f"unix:{tmp_path}/a.sock", make_hello("test", "", "none"), soon(5))
    gc.collect()  # of earlier tests
    before = set(Path("/proc/self/fd").iterdir())
    for number in range(1, 3):
        reply = channel.call(Upgrade(number), soon(5))
        assert isinstance(reply, m.Fault)
        assert reply.code == "upgrade_failed"
        assert why in reply.message
    assert set(Path("/proc/self/fd").iterdir()) <= before
    channel.close()
    nodes.close()


def until_it_continues(node: ProcessPool) -> None:
    """Wait until the node's process executes its next program."""
    until(lambda: "continues as" in node.log(), within_s=SOON_S)


def until_signals_are_held(node: ProcessPool) -> None:
    """By the node's main thread."""

    def held() -> int:
        (mask,) = re.findall(r"SigBlk:\t(\w+)", Path(f"/proc/{node.pid}/status").read_text())
        return int(mask, 16) >> (signal.SIGTERM - 1) & 1

    until(held, within_s=SOON_S)


def with_reservation(node: ProcessPool) -> Connection:
    """A connection of a client that is about to write a page."""
    connection = node.connect()
    opened = connection.call(m.OpenNamespace(1, "ns", {"page_size": "64"}), soon(SOON_S))
    assert isinstance(opened, m.Opened)
    asked = m.Reserve(2, opened.namespace, [key(1)], [PAGE_BYTES])
    assert isinstance(connection.call(asked, soon(SOON_S)), m.Reserved)
    return connection


def begin_upgrade(node: ProcessPool) -> None:
    channel = node.connect()
    assert isinstance(channel.call(Upgrade(1), soon(SOON_S)), m.Done)
    channel.close()


def test_a_process_that_dies_while_it_is_upgraded_leaves_its_pages_to_the_next_start(
    start_process: StartProcess,
) -> None:
    node = start_process(capacity_bytes=ROOM_BYTES)
    client = client_of(node)
    client.put([key(1)], [page_of(1)])
    begin_upgrade(node)
    until_it_continues(node)
    node.kill()
    node.restart()
    until(lambda: client.exists([key(1)]) == [True])  # the client took the node for dead meanwhile
    client.close()
    node.close()


@pytest.mark.parametrize("moment", [until_signals_are_held, until_it_continues])
def test_a_node_that_is_told_to_stop_while_it_is_upgraded_stops_afterwards_and_leaves_nothing(
    start_process: StartProcess, moment: Callable[[ProcessPool], None]
) -> None:
    """Its main thread blocks signals then; others of its threads do not."""
    node = start_process(capacity_bytes=ROOM_BYTES)
    unfinished = with_reservation(node)  # the node waits for it
    begin_upgrade(node)
    if moment is until_it_continues:
        unfinished.close()
    moment(node)
    node.process.terminate()
    unfinished.close()
    assert node.process.wait(SOON_S) == 0, node.log()
    node.close()
    assert not node.arena_path.parent.exists()


def test_a_new_version_that_would_not_start_leaves_the_node_as_it_is(
    start_process: StartProcess,
) -> None:
    node = start_process(capacity_bytes=ROOM_BYTES)
    client = client_of(node)
    assert client.put([key(1)], [page_of(1)]) == [True]
    before = client.status()["node"].incarnation
    good = node.file.read_text()
    for bad, why in (
        ('nonsense = "x"\n' + good, "nonsense"),
        (
            good.replace(f"capacity_bytes = {ROOM_BYTES}", f"capacity_bytes = {32 << 20}"),
            "made for other sizes",
        ),
        (good.replace("page_bytes = 0", "page_bytes = 2500000"), "capacity_bytes, page_bytes"),
    ):
        assert bad != good
        node.file.write_text(bad)
        done = pdserve_here("pool", "upgrade", node.address)
        assert done.returncode == 1
        assert "is not upgraded" in done.stderr
        assert why in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
        assert client.get([key(1)], [empty()]) == [True]
    assert client.status()["node"].incarnation == before
    assert client.counters.failures == 0
    assert "fresh = false" in good
    node.file.write_text(good.replace("fresh = false", "fresh = true"))  # its pages stay all the same
    done = pdserve_here("pool", "upgrade", node.address)
    assert (done.returncode, "was upgraded in" in done.stdout) == (0, True), done.stderr
    page = empty()
    assert client.get([key(1)], [page]) == [True]
    assert np.array_equal(page[0], page_of(1)[0])
    client.close()
    node.close()
