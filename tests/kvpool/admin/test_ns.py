"""Namespaces of real nodes: tokens at every door, a drop that all nodes know of, the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.errors import PoolRefused
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.transports.control import ControlChannel, make_hello
from pdserve.security.tokens import digest
from tests.support.command import Done, pdserve_here
from tests.support.kvpool.clustered import QUIET, Pool
from tests.support.kvpool.connectors import fetch_status
from tests.support.kvpool.faulty import get, keys, put
from tests.support.kvpool.local_node import LocalNode
from tests.support.kvpool.nodes import Start
from tests.support.kvpool.pools import ProcessPool, arena_dir
from tests.support.waiting import soon, until

ROOT, NEW = "root-token", "the-new-token-to-read"


def client(pool: ProcessPool | LocalNode, namespace: str, token: str = "", **options: object) -> PoolClient:
    node = PoolNodeRef(node=pool.config.name, address=pool.address)
    config = PoolClientConfig(nodes=[node], token=token, **options)  # type: ignore[arg-type]
    return PoolClient(config, namespace, {"layout": "test"})


def ns(*words: str, token: str = "", status: int = 0) -> Done:
    """Run `pdserve pool ns ...` in this process."""
    done = pdserve_here("pool", "ns", *words, PDSERVE_POOL_TOKEN=token, COLUMNS="140")
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.fixture
def guarded(start: Start) -> LocalNode:
    """A node with an administrator and a namespace with tokens, r, w and a."""
    node = start(name="guarded", admin_token=f"sha256:{digest(ROOT)}")
    ns(
        *("create", node.address, "tenant", "quota_bytes=1MiB"),
        *(f"read_token=sha256:{digest('r')}", f"write_token=sha256:{digest('w')}"),
        *(f"admin_token=sha256:{digest('a')}",),
        token=ROOT,
    )
    return node


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    made = Pool(tmp_path, LocalNode)
    yield made
    made.close()
    arena_dir().rmdir()


def test_each_token_opens_its_doors_and_a_reader_keeps_its_connection(guarded: LocalNode) -> None:
    writer, reader, stranger = (client(guarded, "tenant", token) for token in ("w", "r", ""))
    some = keys(4)
    assert put(writer, some) == [True] * 4
    assert get(reader, some) == [True] * 4
    assert put(reader, keys(8)[4:]) == [False] * 4
    assert reader.clear() == 0
    assert get(reader, some) == [True] * 4, "what it may not do costs it nothing of what it may"
    [error] = stranger.check().values()
    assert get(stranger, some) == [False] * 4
    assert isinstance(error, PoolRefused)
    assert "read token" in str(error)
    guesser = client(guarded, "tenant", "a guess")
    [error] = guesser.check().values()
    assert isinstance(error, PoolRefused)
    assert "does not know the token" in str(error)
    assert "a guess" not in str(error)
    for each in (writer, reader, stranger, guesser):
        each.close()


def test_after_a_drop_on_one_node_no_node_serves_the_namespace(pool: Pool) -> None:
    """The others are told at once: they would not ask by themselves within the test (R5)."""
    pool.start("a", **QUIET)  # first: nobody looks for it a second time
    pool.start("b", "c", **QUIET)
    pool.until("abc")
    worker = client(pool.nodes["a"], "shared")
    assert list(worker.check().values()) == [None]
    some = keys(100)
    assert all(put(worker, some))
    held = [fetch_status(node.address, soon()).pages for node in pool.nodes.values()]
    assert held[0] == 100  # the client's own node has all, and the owners what they own
    assert min(held) > 0
    readers = {name: open_on(node, "shared") for name, node in pool.nodes.items()}
    channel = ControlChannel.connect(pool.nodes["a"].address, make_hello("x", "", "none"), soon())
    assert isinstance(channel.call(m.DropNamespace(1, "shared"), soon()), m.Done)
    until(lambda: not any(present(*reader, some) for reader in readers.values()))
    assert [fetch_status(node.address, soon()).pages for node in pool.nodes.values()] == [0, 0, 0]
    assert not any(get(worker, some))
    worker.close()
    channel.close()
    for reader, _ in readers.values():
        reader.close()


def open_on(node: LocalNode, name: str) -> tuple[ControlChannel, int]:
    channel = ControlChannel.connect(node.address, make_hello("reader", "", "none"), soon())
    opened = channel.call(m.OpenNamespace(1, name, {"layout": "test"}), soon())
    assert isinstance(opened, m.Opened)
    return channel, opened.namespace


def present(channel: ControlChannel, namespace: int, some: list[bytes]) -> int:
    reply = channel.call(m.Exists(2, namespace, some), soon())
    return sum(reply.mask) if isinstance(reply, m.Present) else 0


def test_a_node_that_was_away_when_a_namespace_was_dropped_does_not_serve_it(pool: Pool) -> None:
    pool.start("a", "b")
    pool.until("ab")
    worker = client(pool.nodes["a"], "shared")
    some = keys(60)
    worker.check()
    assert all(put(worker, some))
    worker.close()
    away = pool.nodes["b"]
    away.kill()
    dropped = ns("drop", pool.nodes["a"].address, "shared", "--timeout", "0.5")
    assert "node b does not know it yet" in dropped.stderr
    away.restart()
    reader = open_on(away, "shared")
    until(lambda: not present(*reader, some))
    reader[0].close()


def test_a_replacement_tells_workers_of_the_old_revision_what_replaced_it(pool: Pool) -> None:
    pool.start("a", "b")
    pool.until("ab")
    a, b = pool.nodes["a"].address, pool.nodes["b"].address
    ns("create", a, "model@1", "weight=3")
    assert json.loads(ns("replace", a, "model@1", "model@2", "--json").stdout)["nodes_behind"] == []
    old = client(pool.nodes["b"], "model@1")
    [error] = old.check().values()
    assert isinstance(error, PoolRefused)
    assert "replaced by 'model@2'" in str(error)
    old.close()
    [shown] = [json.loads(line) for line in ns("list", b, "--json").stdout.splitlines()]
    assert (shown["name"], shown["settings"]["weight"]) == ("model@2", 3.0)


def test_the_command_line_makes_changes_and_lists_namespaces(guarded: LocalNode, tmp_path: Path) -> None:
    address = guarded.address
    assert "access_denied" not in ns("list", address, token="a").stdout
    text = ns("list", address, token=ROOT).stdout
    assert "tenant" in text
    assert "read write admin" in text
    (tmp_path / "new").write_text(f"{NEW}\n")
    ns("set", address, "tenant", f"read_token_file={tmp_path}/new", token="a")
    ns("set", address, "tenant", "weight=2", token=ROOT)
    [shown] = [json.loads(line) for line in ns("list", address, "--json", token="a").stdout.splitlines()]
    assert (shown["settings"]["weight"], shown["settings"]["quota_bytes"]) == (2.0, 1 << 20)
    for token in ("a", NEW):  # who may only read does not open it first
        reader = client(guarded, "tenant", token)
        assert list(reader.check().values()) == [None]
        reader.close()
    for words, said in [
        (("list", address), "admin token"),
        (("create", address, "tenant"), "is there already"),
        (("set", address, "none"), "pool ns create"),
        (("set", address, "tenant", "quota_bytes=9TiB"), "cannot be larger"),
        (("set", address, "tenant", "policy=lrv"), "lru"),
        (("drop", address, "none"), "no namespace 'none'"),
    ]:
        token = "" if words[0] == "list" else ROOT
        line = ns(*words, token=token, status=1).stderr
        assert said in line
        assert len(line.splitlines()) == 1
    assert "not a size" in ns("set", address, "tenant", "quota_bytes=lots", token=ROOT, status=2).stderr
    for word, said in [("media=tape", "media"), ("quota=1", "quota_bytes"), ("weight", "SETTING=VALUE")]:
        assert said in ns("set", address, "tenant", word, token=ROOT, status=2).stderr
    assert NEW not in ns("set", address, "tenant", f"read_token={NEW}", token=ROOT, status=2).stderr
