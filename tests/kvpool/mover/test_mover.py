"""A page mover: a real process, over a real node; killed, paused, orphaned, and of another version."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from msgspec.structs import replace

from pdserve.errors import PoolRefused, PoolUnavailable, StartupError
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.hicache.page_access import ByMover, host_pages, host_parts
from pdserve.kvpool.hicache.page_access import HostPool as AccessPool
from pdserve.kvpool.mover import client as mover_client
from pdserve.kvpool.mover import supervisor
from pdserve.kvpool.mover.client import MoverClient
from pdserve.kvpool.mover.host_pages import HostPart
from pdserve.kvpool.mover.supervisor import MAX_PAUSE_S, Pauses
from pdserve.pages import KV
from tests.support.kvpool.faulty import keys
from tests.support.kvpool.host_pool import PAGE_TOKENS, HostPool, indices
from tests.support.kvpool.nodes import small_config
from tests.support.kvpool.pools import ProcessPool, arena_dir, running_node
from tests.support.suite.extended import extended
from tests.support.up.cluster import wait_until

GEOMETRY = {"test": "mover"}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPool]:
    config = replace(small_config(arena_dir=arena_dir()), lease_s=2.0)
    with running_node(config, tmp_path_factory.mktemp("node")) as pool:
        yield pool


class Rank:
    """A scheduler's host pool and its mover."""

    def __init__(self, node: ProcessPool, namespace: str, layout: str, **options: float) -> None:
        refs = [PoolNodeRef(node=node.config.name, address=node.address)]
        self.config = replace(PoolClientConfig(nodes=refs), **options)
        self.host = HostPool(layout, shared=True)
        pages = host_pages(self.host)
        assert pages is not None
        self.mover = MoverClient(self.config, namespace, GEOMETRY, {KV: HostPart(pages)})
        self.access = ByMover(self.mover, {KV: self.host.page_size})

    @property
    def process(self) -> psutil.Process:
        assert self.mover.pid is not None
        return psutil.Process(self.mover.pid)


@pytest.fixture
def rank(node: ProcessPool, request: pytest.FixtureRequest) -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []

    def make(layout: str = "page_first", **options: float) -> Rank:
        made.append(Rank(node, request.node.name, layout, **options))
        return made[-1]

    yield make
    for one in made:
        one.mover.close()
        os.close(one.host.fd)
    left = [child.pid for child in psutil.Process().children() if "kvpool.mover" in " ".join(child.cmdline())]
    assert not left


def names(count: int) -> list[str]:
    return [key.hex() for key in keys(count)]


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_pages_come_back_into_other_host_pages(rank: Callable[..., Rank], layout: str) -> None:
    writer, reader = rank(layout), rank(layout)
    sources, targets = list(range(20)), list(range(99, 79, -1))
    writer.host.fill(sources, seed=1)
    assert writer.access.put(KV, names(20), indices(sources)).done == [True] * 20
    assert reader.access.present(names(30), [KV]) == [[True] * 20 + [False] * 10]
    assert reader.access.get(KV, names(21), indices([*targets, 5])).done == [True] * 20 + [False]
    for source, target in zip(sources, targets, strict=True):
        pairs = zip(writer.host.segments(source), reader.host.segments(target), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs)
    untouched = set(range(len(reader.host.kv[0]))) - set(targets) if layout == "page_first" else set()
    assert not any(segment.any() for page in untouched for segment in reader.host.segments(page))
    assert writer.access.clear() == 20
    assert reader.access.present(names(1), [KV]) == [[False]]


def test_parts_of_pages_move_between_their_own_host_pools(node: ProcessPool) -> None:
    ours, windows = HostPool("page_first", shared=True), HostPool("page_first", shared=True, layers=7)
    parts = host_parts({KV: AccessPool(ours, (b"",)), "swa": AccessPool(windows, (b".swa",))})
    assert parts is not None
    refs = [PoolNodeRef(node=node.config.name, address=node.address)]
    mover = MoverClient(PoolClientConfig(nodes=refs), "parts", GEOMETRY, parts)
    try:
        access = ByMover(mover, {KV: PAGE_TOKENS, "swa": PAGE_TOKENS})
        windows.fill([0, 1], seed=1)
        assert access.put("swa", names(2), indices([0, 1])).done == [True] * 2
        assert access.put(KV, names(3), indices([0, 1, 2])).done == [True] * 3
        assert access.present(names(4), [KV, "swa"]) == [[True] * 3 + [False], [True] * 2 + [False] * 2]
        assert access.get("swa", names(3), indices([9, 8, 7])).done == [True, True, False]
        assert np.array_equal(windows.segments(0)[1], windows.segments(9)[1])
        assert not ours.kv.any()
        with pytest.raises(PoolUnavailable, match="KeyError"):
            mover.present(names(1), ["mamba"])
    finally:
        mover.close()
        os.close(ours.fd)
        os.close(windows.fd)


def test_a_host_pool_that_cannot_be_shared_keeps_all_in_the_scheduler() -> None:
    shared = HostPool("page_first", shared=True)
    own = HostPool("page_first")
    assert host_parts({KV: AccessPool(shared, b""), "swa": AccessPool(own, b"")}) is None
    os.close(shared.fd)


def test_a_mover_that_was_killed_costs_a_batch_and_starts_again(rank: Callable[..., Rank]) -> None:
    one = rank()
    one.host.fill([0, 1], seed=1)
    assert one.access.put(KV, names(2), indices([0, 1])).done == [True] * 2
    first = one.process
    first.kill()
    with pytest.raises(PoolUnavailable):
        one.access.get(KV, names(2), indices([4, 5]))
    assert one.access._metrics._mover_failures._value.get() == 1
    wait_until(lambda: one.mover.pid is not None, "another mover runs")
    assert one.mover.pid != first.pid
    assert one.mover.restarts == 1
    assert one.access.get(KV, names(2), indices([4, 5])).done == [True] * 2
    assert np.array_equal(one.host.segments(0)[0], one.host.segments(4)[0])


@pytest.mark.parametrize("write", [False, True])
def test_a_mover_that_hangs_is_dead_when_the_call_ends(rank: Callable[..., Rank], write: bool) -> None:
    """Else it could go on later, and write into host pages that SGLang has given to another prompt."""
    one = rank(get_timeout_s=0.1, put_timeout_s=0.1, restart_wait_s=0.0)
    hung = one.process
    hung.suspend()
    with pytest.raises(PoolUnavailable, match="did not answer"):
        (one.access.put if write else one.access.get)(KV, names(2), indices([0, 1]))
    assert not hung.is_running()
    wait_until(lambda: one.mover.pid is not None, "another mover runs")
    assert one.access.put(KV, names(2), indices([0, 1])).done == [True] * 2


def test_calls_without_a_mover_end_at_once(
    rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rank()
    monkeypatch.setattr(supervisor, "MoverProcess", _unstartable)
    one.process.kill()
    for _ in range(3):
        with pytest.raises(PoolUnavailable):
            one.access.present(names(1), [KV])
    assert one.mover.pid is None


def _unstartable(*_: object) -> None:
    raise StartupError("no more processes")


def test_a_closed_mover_takes_no_calls(rank: Callable[..., Rank]) -> None:
    one = rank()
    process = one.process
    one.mover.close()
    one.mover.close()
    assert not process.is_running()
    with pytest.raises(PoolUnavailable):
        one.access.present(names(1), [KV])


def test_a_page_outside_of_the_host_pool_is_refused_and_the_mover_lives(rank: Callable[..., Rank]) -> None:
    one = rank()
    with pytest.raises(PoolUnavailable, match="outside of the host pool"):
        one.access.get(KV, names(1), indices([100_000]))
    with pytest.raises(PoolUnavailable, match="non-hexadecimal"):
        one.access.present(["not hex"], [KV])
    assert one.access.present(names(1), [KV]) == [[False]]
    assert one.mover.restarts == 0


def test_a_node_that_refuses_is_told_from_one_that_is_gone(
    node: ProcessPool, rank: Callable[..., Rank]
) -> None:
    one = rank()
    [outcome] = one.access.check().values()
    assert outcome is None
    other = Rank(node, "test_a_node_that_refuses", "page_first")
    try:
        client = PoolClient(other.config, "squatted", {"other": "geometry"})
        assert client.exists([b"k"]) == [False]
        client.close()
        pages = host_pages(other.host)
        assert pages is not None
        misfit = MoverClient(other.config, "squatted", GEOMETRY, {KV: HostPart(pages)})
        [error] = misfit.check().values()
        assert isinstance(error, PoolRefused)
        misfit.close()
        gone = [PoolNodeRef(node="gone", address="unix:/nowhere/at/all")]
        absent = MoverClient(replace(other.config, nodes=gone), "ns", GEOMETRY, {KV: HostPart(pages)})
        [error] = absent.check().values()
        assert isinstance(error, PoolUnavailable)
        assert not isinstance(error, PoolRefused)
        absent.close()
    finally:
        other.mover.close()
        os.close(other.host.fd)


def test_a_mover_of_another_version_is_refused(node: ProcessPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover_client, "VERSION", 99)
    with pytest.raises(StartupError, match="restart the worker"):
        Rank(node, "ns", "page_first")


def test_a_mover_ends_with_its_scheduler(node: ProcessPool, tmp_path: Path) -> None:
    """Also when the scheduler is killed in the middle of a call."""
    code = (
        "import sys, time\n"
        "from msgspec.structs import replace\n"
        "from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef\n"
        "from pdserve.kvpool.hicache.page_access import host_pages\n"
        "from pdserve.kvpool.mover.client import MoverClient\n"
        "from pdserve.kvpool.mover.host_pages import HostPart\n"
        "from tests.support.kvpool.host_pool import HostPool\n"
        f"refs = [PoolNodeRef(node={node.config.name!r}, address={node.address!r})]\n"
        "pages = host_pages(HostPool('page_first', shared=True))\n"
        "mover = MoverClient(PoolClientConfig(nodes=refs), 'ns', {}, {'kv': HostPart(pages)})\n"
        "print(mover.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    scheduler = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert scheduler.stdout is not None
        mover = psutil.Process(int(scheduler.stdout.readline()))
        mover.send_signal(signal.SIGTERM)  # meant for the scheduler: it ends its mover itself
        mover.send_signal(signal.SIGINT)
    finally:
        scheduler.kill()
        scheduler.communicate(timeout=30)
    with suppress(psutil.NoSuchProcess):
        mover.wait(30)


def test_pauses_grow_with_failures_in_a_row_and_are_bounded() -> None:
    pauses = Pauses()
    grown = [pauses.after(0.0) for _ in range(12)]
    assert grown[:4] == [0.1, 0.2, 0.4, 0.8]
    assert grown[-1] == MAX_PAUSE_S
    assert pauses.after(3600.0) == 0.1
    assert pauses.after(1.0) == 0.2


@pytest.mark.parametrize("turns", [4, extended(12)])
def test_nothing_reads_or_writes_the_host_pool_after_a_call_that_ended_early(
    rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """Movers are paused and killed at random moments of reads; host pages stay as they are afterwards."""
    monkeypatch.setattr(supervisor, "MAX_PAUSE_S", 0.0)
    one = rank(get_timeout_s=0.05, restart_wait_s=0.0)
    rng = np.random.default_rng(5)
    sources = list(range(100))
    one.host.fill(sources, seed=1)
    assert all(one.access.put(KV, names(100), indices(sources)).done)
    kept = one.host.kv.copy()
    failed = 0
    for turn in range(turns):
        wait_until(lambda: one.mover.pid is not None, "a mover runs")
        process, action = one.process, ("suspend", "kill")[turn % 2]
        delay_s = float(rng.uniform(0, 0.004))

        def strike(process: psutil.Process = process, action: str = action, delay_s: float = delay_s) -> None:
            end_s = time.monotonic() + delay_s
            while time.monotonic() < end_s:
                pass
            with suppress(psutil.NoSuchProcess):
                getattr(process, action)()

        striker = supervisor.threading.Thread(target=strike)
        striker.start()
        targets = indices(list(range(199, 99, -1)))
        try:
            while all(one.access.get(KV, names(100), targets).done):
                pass
        except PoolUnavailable:
            failed += 1
        striker.join()
        one.host.kv[:] = kept
        wait_until(lambda: one.mover.pid is not None, "a mover runs")
        assert np.array_equal(one.host.kv, kept)
    assert failed == turns
