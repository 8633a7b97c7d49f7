"""A store's client in a process of its own, over the example of docs/extending/store.md."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest

from pdserve.errors import PoolError
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.kvpool.mover.beside import SLOTS, open_beside
from pdserve.kvpool.protocol.page_bytes import Bytes1D
from pdserve.kvpool.stores.client import PageClient
from tests.support.kvpool.clients import until
from tests.support.kvpool.page_stores import GEOMETRY, install

PAGE_BYTES = 256
KEYS = [number.to_bytes(32, "big") for number in range(SLOTS + 10)]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PoolClientConfig:
    """The example is installed for processes that start now."""
    install("example", "docs.examples.store:DirectoryStore", tmp_path, monkeypatch)
    pages = tmp_path / "pages"
    pages.mkdir()
    # a call that hangs is ended after the time-out and a second
    return PoolClientConfig(
        engine="example",
        options={"path": str(pages)},
        exists_timeout_s=0.5,
        restart_wait_s=0.0,
        retry_after_s=0.02,
    )


@pytest.fixture
def store(config: PoolClientConfig) -> Iterator[PageClient]:
    with closing(open_beside(config, "ns", GEOMETRY, name="test", page_bytes=PAGE_BYTES)) as client:
        until(lambda: client.check() == {"directory": None})
        yield client


def page(fill: int) -> list[Bytes1D]:
    return [np.full(PAGE_BYTES, fill, np.uint8)]


def mover() -> psutil.Process:
    [found] = [one for one in psutil.Process().children() if "pdserve.kvpool.mover" in one.cmdline()]
    return found


def test_pages_go_there_and_back_in_portions(store: PageClient, config: PoolClientConfig) -> None:
    written = [page(number) for number in range(len(KEYS))]
    assert store.put(KEYS, written) == [True] * len(KEYS)
    read = [page(255) for _ in range(len(KEYS))]
    assert store.get([*KEYS[:-1], bytes(31) + b"\xff"], read) == [True] * (len(KEYS) - 1) + [False]
    assert all((one[0] == other[0]).all() for one, other in zip(read[:-1], written, strict=False))
    assert store.exists([KEYS[3], bytes(31) + b"\xff"]) == [True, False]
    with closing(open_beside(config, "ns", GEOMETRY, name="other", page_bytes=PAGE_BYTES)) as other:
        assert other.exists(KEYS[:2]) == [True, True]
    assert store.clear() == len(KEYS)


def test_pages_of_another_size_are_neither_stored_nor_found(store: PageClient) -> None:
    store.put(KEYS[:1], [page(1)])
    longer = [[np.zeros(2 * PAGE_BYTES, np.uint8)]]
    assert store.get(KEYS[:1], longer) == store.put(KEYS[1:2], longer) == [False]
    halves = [[np.zeros(PAGE_BYTES // 2, np.uint8)] * 2]
    assert store.get(KEYS[:1], halves) == [False]


def has_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_dies_or_hangs_costs_misses_and_is_replaced(store: PageClient, number: int) -> None:
    store.put(KEYS[:1], [page(7)])
    first = mover()
    first.send_signal(number)
    until(lambda: has_stopped(first))  # it may answer until then
    assert store.exists(KEYS[:1]) == [False]
    assert isinstance(store.check()["example"], PoolError)
    until(lambda: store.exists(KEYS[:1]) == [True])
    read = page(0)
    assert store.get(KEYS[:1], [read]) == [True]
    assert (read[0] == 7).all()
    assert not first.is_running()


def test_nothing_is_left_behind(store: PageClient) -> None:
    process = mover()
    store.close()
    assert not process.is_running()
    assert store.exists(KEYS[:1]) == [False]


def test_pool_nodes_need_no_process_beside() -> None:
    with closing(open_beside(PoolClientConfig(), "ns", GEOMETRY, name="test")) as client:
        assert isinstance(client, PoolClient)
