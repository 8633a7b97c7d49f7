"""Real nodes among each other: as processes that are killed and paused, and in this process."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from pdserve.errors import NodeFailed, PoolRefused, StartupError
from pdserve.kvpool.admin.node_client import ask
from pdserve.kvpool.admin.upgrade import upgrade
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.node.config import ClusterConfig, MovingConfig
from pdserve.kvpool.node.node import PoolNode
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import (
    ACTIVE,
    DEAD,
    LEAVING,
    LEFT,
    ClusterState,
    Drain,
    GetView,
    Gossip,
    NamespaceRecord,
    ProbePeer,
    View,
)
from pdserve.kvpool.transports.async_control import AsyncControl
from pdserve.kvpool.transports.control import make_hello
from tests.support.command import pdserve_here
from tests.support.kvpool.clustered import QUIET, Pool, config_of, process, ring, running, status_of
from tests.support.kvpool.connectors import fetch_status
from tests.support.kvpool.nodes import PAGE_BYTES, page_of, small_config
from tests.support.kvpool.nodes import keys as some_keys
from tests.support.kvpool.pools import ProcessPool, remove_arena_dir
from tests.support.waiting import SOON_S, soon, until, until_in_loop

# --- processes


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Pool]:
    made = Pool(tmp_path, process)
    yield made
    made.close()
    remove_arena_dir()


def test_a_node_that_is_killed_or_paused_is_dead_for_all_until_it_is_back_and_blames_nobody(
    processes: Pool,
) -> None:
    processes.start("a", "b", "c")
    processes.until("abc")
    victim = processes.nodes["c"]
    epochs = [processes.view("a")[0]]
    for lose, bring_back in ((victim.kill, victim.restart), (victim.pause, victim.resume)):
        lose()
        processes.until("ab", at="ab")
        epochs.append(processes.view("a")[0])
        bring_back()
        processes.until("abc")
        epochs.append(processes.view("a")[0])
    assert epochs == sorted(set(epochs))
    assert "is taken for dead" not in victim.log()
    processes.start("d")
    processes.until("abcd")
    for node in processes.nodes.values():
        node.close()


def start_alone(processes: Pool, name: str, peers: str, **options: Any) -> ProcessPool:
    cluster = ClusterConfig(peers=[f"unix:{processes.directory}/{peer}.sock" for peer in peers])
    config = small_config(name=name, cluster=cluster, **options)
    node = processes.nodes[name] = process(config, processes.directory)
    return node


def test_a_drained_node_gives_all_its_pages_away_and_stops_by_itself(processes: Pool) -> None:
    kept, drained = start_alone(processes, "a", ""), start_alone(processes, "b", "a", stop_when_drained=True)
    processes.until("ab")
    refs = [PoolNodeRef(node="a", address=kept.address)]
    client, wanted = PoolClient(PoolClientConfig(nodes=refs), "ns", {"a": "b"}), some_keys(200)
    assert all(client.put(wanted, [[page_of(key)] for key in wanted]))
    assert drained.status().pages > 20
    done = pdserve_here("pool", "drain", drained.address, "--json")
    assert done.returncode == 0, done.stderr
    until(lambda: not drained.runs, "it stops by itself")
    found = [[np.zeros(PAGE_BYTES, np.uint8)] for _ in wanted]
    assert client.get(wanted, found) == [True] * len(wanted), "no page is lost"
    assert all(np.array_equal(page, page_of(key)) for [page], key in zip(found, wanted, strict=True))
    client.close()
    kept.close()


@pytest.mark.extended
def test_a_node_that_is_upgraded_stays_in_all_views_and_a_seed_never_stands_alone(
    processes: Pool,
) -> None:
    seed, member = start_alone(processes, "a", ""), start_alone(processes, "b", "a")
    processes.until("ab")
    for upgraded in (member, seed):
        before = fetch_status(upgraded.address, soon()).incarnation
        upgrade(upgraded.address, deadline_s=60.0)
        processes.until("ab")
        assert fetch_status(upgraded.address, soon()).incarnation != before
    log = seed.log()
    meanwhile = log[log.index(" continues as the installed version") : log.index("it was upgraded")]
    assert re.search(r"epoch \d+: a, b$", meanwhile, re.M), log
    for node in processes.nodes.values():
        node.close()


@pytest.mark.extended
def test_a_node_that_was_drained_before_its_upgrade_does_not_come_back_into_the_ring(
    processes: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the command waits for pages that move, and here they move for longer than its deadline
    monkeypatch.setattr("pdserve.kvpool.admin.upgrade.has_settled", lambda report: True)
    slow = MovingConfig(bytes_s=1000)  # with pages, a node goes on leaving for long
    _, leaving, left = (start_alone(processes, n, "a" * (n != "a"), moving=slow) for n in "abc")
    processes.until("abc")
    drain_and_upgrade(left, LEFT)
    processes.until("ab", at="ab")
    refs = [PoolNodeRef(node="b", address=leaving.address)]
    client = PoolClient(PoolClientConfig(nodes=refs), "ns", {"a": "b"})
    keys = some_keys(60)
    assert all(client.put(keys, [[page_of(key)] for key in keys]))
    drain_and_upgrade(leaving, LEAVING)
    processes.until("a")
    client.close()


def drain_and_upgrade(node: ProcessPool, status: int) -> None:
    """Before and after its upgrade the node has this status in its own eyes."""
    ask(node.address, Drain, m.Done)
    until_status(node, status)
    upgrade(node.address, deadline_s=60.0)
    until_status(node, status)


def until_status(node: ProcessPool, status: int) -> None:
    def own() -> int:
        report = fetch_status(node.address, soon())
        return next(member.status for member in report.members if member.node == report.node)

    until(lambda: own() == status)


# --- in this process


async def test_a_node_alone_tells_its_view_in_welcome_on_request_and_in_its_status(tmp_path: Path) -> None:
    async with running(tmp_path, "a") as node:
        control = await AsyncControl.connect(node.config.address, make_hello("test", "", "none"))
        welcome = control.welcome
        assert [(n.node, n.address) for n in welcome.nodes] == [("a", node.config.address)]
        view = await control.call(GetView)
        assert isinstance(view, View)
        assert (view.epoch, view.nodes, view.previous) == (welcome.epoch, welcome.nodes, [])
        report = await control.call(m.Status)
        assert isinstance(report, m.StatusReport)
        assert report.epoch == welcome.epoch > 0
        assert [(n.node, n.status, n.settled) for n in report.members] == [("a", ACTIVE, report.epoch)]
        control.close()


async def test_nodes_that_start_at_once_find_together(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        starting = [running(tmp_path, name, peers="abcd") for name in "abcd"]
        nodes = await asyncio.gather(*(stack.enter_async_context(one) for one in starting))
        await until_in_loop(lambda: {ring(n) for n in nodes} == {"abcd"})
        await until_in_loop(lambda: len({n.gossip.cluster.digest for n in nodes}) == 1)
        await until_in_loop(lambda: all(n.gossip.cluster.settled for n in nodes))


def test_a_peer_that_hangs_or_is_no_node_does_not_keep_a_node_from_serving(tmp_path: Path) -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    peers = [f"tcp:127.0.0.1:{silent.getsockname()[1]}", f"unix:{tmp_path}/nobody.sock"]

    async def run() -> None:
        cluster = {"peers": peers, "ping_timeout_s": 0.3}
        async with running(tmp_path, "a", cluster=cluster) as node:
            assert ring(node) == "a"

    asyncio.run(run())
    silent.close()


async def test_a_node_that_finds_nobody_goes_on_looking(tmp_path: Path) -> None:
    async with running(tmp_path, "a", peers="b") as a, running(tmp_path, "b") as b:
        await until_in_loop(lambda: ring(a) == ring(b) == "ab")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cluster": {"name": "other"}}, "is of cluster 'pool', not 'other'"),
        ({"cluster": {"token": "wrong"}}, "another cluster.token"),
        ({"name": "a", "listen": ["unix:{}/x.sock"]}, "has the name a: give this one another name"),
        ({"name": "b", "listen": ["unix:{}/x.sock"]}, "has the name b: give this one another name"),
    ],
)
async def test_a_node_that_does_not_belong_is_refused_and_says_why(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    options = {"name": "c", **options}
    if "listen" in options:
        options["listen"] = [text.format(tmp_path) for text in options["listen"]]
        options["arena_dir"] = tmp_path / "other"
    name = options.pop("name")
    async with running(tmp_path, "a") as a, running(tmp_path, "b", peers="a") as b:
        await until_in_loop(lambda: ring(a) == ring(b) == "ab")
        config = config_of(tmp_path, name, "a", **{k: v for k, v in options.items() if k != "arena_dir"})
        config = replace(config, arena_dir=options.get("arena_dir", config.arena_dir))
        with pytest.raises(StartupError) as error:
            await PoolNode(config).serve()
        assert said in str(error.value)
        assert "\n" not in str(error.value)
        await asyncio.sleep(0.3)  # several rounds of gossip
        assert ring(a) == ring(b) == "ab"


async def test_a_node_whose_clock_among_its_peers_ends_does_not_go_on_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would notice no death and no new ring, and still look well to its clients."""
    node = PoolNode(config_of(tmp_path, "a"))

    def bug(*_: object) -> None:
        raise RuntimeError("bug")

    monkeypatch.setattr(node.gossip.cluster, "tidy", bug)
    with pytest.raises(NodeFailed, match="among its peers"):
        await asyncio.wait_for(node.serve(), SOON_S)


async def test_of_two_nodes_of_one_name_that_meet_later_one_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = config_of(tmp_path, "a", "b", listen=[f"unix:{tmp_path}/x.sock"])
    two = replace(two, arena_dir=tmp_path / "other")
    async with running(tmp_path, "a"):
        with monkeypatch.context() as larger:
            larger.setattr("pdserve.kvpool.node.node.secrets.randbits", lambda bits: 1 << bits)
            second = PoolNode(two)
        serving = asyncio.ensure_future(second.serve())
        await until_in_loop(lambda: second.gossip._detector is not None)
        async with running(tmp_path, "b", "a") as b:  # a's friend now, and the second one's peer
            with pytest.raises(StartupError, match="has the name a"):
                await asyncio.wait_for(serving, 10)
            first = f"unix:{tmp_path}/a.sock"
            await until_in_loop(lambda: next(n.address for n in b.gossip.view.nodes) == first)


async def test_only_nodes_may_gossip(tmp_path: Path) -> None:
    async with running(tmp_path, "a", cluster={"token": "secret"}) as node:
        control = await AsyncControl.connect(node.config.address, make_hello("test", "", "none"))
        state = ClusterState("pool", [], [])
        for reply in (
            await control.call(lambda i: Gossip(i, "x", state)),
            await control.call(lambda i: ProbePeer(i, "a")),
        ):
            assert isinstance(reply, m.Fault)
            assert reply.code == "access_denied"
        control.close()
        liar = replace(make_hello("test", "", "none", "guess"), node="x")
        with pytest.raises(PoolRefused, match="another cluster"):
            await AsyncControl.connect(node.config.address, liar)


async def test_a_node_does_not_believe_a_peer_that_speaks_of_the_far_future(tmp_path: Path) -> None:
    async with running(tmp_path, "a", cluster={"token": "secret"}) as node:
        hello = replace(make_hello("test", "", "none", "secret"), node="x")
        control = await AsyncControl.connect(node.config.address, hello)
        dead = replace(node.gossip.cluster.me, version=1 << 52, status=DEAD)
        state = ClusterState(node.config.cluster.name, [dead], [])
        reply = await control.call(lambda i: Gossip(i, "x", state))
        control.close()
        assert isinstance(reply, m.Fault)
        assert "clocks" in reply.message
        assert node.gossip.cluster.me.version < 1 << 52


async def test_nodes_come_in_where_clients_have_taken_every_place(tmp_path: Path) -> None:
    async with running(tmp_path, "a", max_connections=1) as a:
        client = await AsyncControl.connect(a.config.address, make_hello("test", "", "none"))
        async with running(tmp_path, "b", peers="a") as b:
            await until_in_loop(lambda: ring(a) == ring(b) == "ab")
        client.close()


def publish(node: PoolNode, record: NamespaceRecord) -> None:
    """As when a client of the node has changed it."""
    node.arena.namespaces.registry.change(record)
    node.gossip.publish(record)


async def test_a_change_goes_to_all_at_once(tmp_path: Path) -> None:
    """None of these nodes would ask another by itself within the test."""
    async with contextlib.AsyncExitStack() as stack:
        starting = [running(tmp_path, n, peers="a", cluster=QUIET) for n in "abc"]
        a, b, c = [await stack.enter_async_context(one) for one in starting]
        await until_in_loop(lambda: ring(a) == ring(b) == ring(c) == "abc")
        publish(b, NamespaceRecord("ns", 1, 1, {}))
        await until_in_loop(lambda: all(node.gossip.cluster.registry.get("ns") for node in (a, c)))


async def test_a_clean_stop_is_a_loss_that_is_noticed_at_once(tmp_path: Path) -> None:
    """It need not be silent for long: nobody waits for an answer from where nobody listens."""
    patient = {"ping_timeout_s": 4.0}
    async with running(tmp_path, "a", cluster=patient) as a:
        async with running(tmp_path, "b", peers="a", cluster=patient):
            await until_in_loop(lambda: ring(a) == "ab")
        start_s = time.monotonic()
        await until_in_loop(lambda: status_of(a, "b") == DEAD)
        assert time.monotonic() - start_s < patient["ping_timeout_s"], "two pings were refused"
        assert ring(a) == "a"


async def test_a_leaving_node_has_left_once_the_mover_of_the_other_is_done(tmp_path: Path) -> None:
    async with running(tmp_path, "a") as a, running(tmp_path, "b", peers="a") as b:
        await until_in_loop(lambda: ring(a) == ring(b) == "ab" and b.gossip.cluster.settled)
        a.gossip.on_change.clear()  # its mover hears of nothing
        b.gossip.leave()
        await until_in_loop(lambda: ring(a) == "a")
        assert [n.node for n in a.gossip.view.previous] == ["a", "b"]
        await asyncio.sleep(0.2)
        assert status_of(b, "b") != LEFT
        a.gossip.settle(a.gossip.view.epoch)
        await until_in_loop(lambda: status_of(b, "b") == LEFT == status_of(a, "b"))
        assert a.gossip.view.previous == []


async def test_a_namespace_published_at_one_node_is_known_at_all_however_many(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        a, b, c = [await stack.enter_async_context(running(tmp_path, n, peers="a")) for n in "abc"]
        await until_in_loop(lambda: {ring(n) for n in (a, b, c)} == {"abc"})
        heard: list[NamespaceRecord] = []
        c.gossip.on_namespaces.append(heard.extend)
        geometry = {"layout": "x" * 20_000}
        for number in range(80):  # 1.6 MB: more than one message takes
            publish(b, NamespaceRecord(f"ns{number}", 1, 1, geometry))
        await until_in_loop(lambda: len(heard) == 80)
        await until_in_loop(lambda: len({n.gossip.cluster.digest for n in (a, b, c)}) == 1)
        async with running(tmp_path, "d", peers="a") as d:
            await until_in_loop(lambda: len(d.gossip.cluster.registry) == 80)
