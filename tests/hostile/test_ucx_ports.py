"""UCX's own ports, which take orders from everyone who reaches them: who finds one open."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from pdserve.errors import PoolRefused
from tests.support.kvpool.connectors import connect
from tests.support.kvpool.nodes import get, keys, open_namespace, put, small_config, soon
from tests.support.kvpool.pools import ProcessPool

ADMIN_TOKEN = "the-token-of-this-pools-operator"


@pytest.fixture
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPool]:
    directory = tmp_path_factory.mktemp("pool")
    config = small_config(name="guarded", admin_token=ADMIN_TOKEN, arena_dir=directory / "arena")
    pool = ProcessPool(config, directory, "ucx")
    try:
        yield pool
    finally:
        pool.close()


def listening(pid: int | None = None) -> set[tuple[str, int]]:
    """Addresses and ports of TCP at which the process listens."""
    found = psutil.Process(pid).net_connections("tcp")
    return {(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN}


def test_no_port_of_ucx_is_open_before_a_token_was_shown(pool: ProcessPool) -> None:
    before = listening(pool.pid)
    for token in ("", "a-token-that-nobody-gave-out"):
        with pytest.raises(PoolRefused):
            connect(pool.address, soon(), "ucx", token=token)
    assert listening(pool.pid) == before


def test_ucx_of_node_and_client_on_one_host_listens_on_loopback(pool: ProcessPool) -> None:
    """But for UCX's listener, which takes no address: it hands over who connects, and writes nothing."""
    before, own_before = listening(pool.pid), listening()
    connection = connect(pool.address, soon(), "ucx", token=ADMIN_TOKEN)
    try:
        assert connection.welcome.ucx is not None
        opened = listening(pool.pid) - before - {("0.0.0.0", connection.welcome.ucx.port)}
        assert opened
        assert {host for host, _ in opened} == {"127.0.0.1"}
        assert {host for host, _ in listening() - own_before} <= {"127.0.0.1"}
        namespace, some = open_namespace(connection, "honest"), keys(4, 1)
        assert put(connection, namespace, some) == some
        assert get(connection, namespace, some) == some
    finally:
        connection.close()
