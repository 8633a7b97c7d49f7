"""`pdserve pool status|ls|drain` against real nodes, and against nodes that say what a test lets them."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pdserve.errors import PoolError
from pdserve.kvpool.admin import drain as drain_module
from pdserve.kvpool.admin.node_client import Asking, NodeClient, all_nodes, in_parallel
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import ACTIVE, LEAVING, LEFT, Drain, Member, Upgrade
from tests.support.command import Done, pdserve_here
from tests.support.kvpool.local_node import LocalNode
from tests.support.kvpool.nodes import Start, keys, open_namespace, put
from tests.support.kvpool.scripted_node import TOKEN, ScriptedNode
from tests.support.waiting import soon


class Nodes(list[LocalNode]):
    """Two nodes, a and b; `seed` is the address of a that tells of both."""

    seed: str


@pytest.fixture
def two_nodes(start: Start, tmp_path: Path) -> Iterator[Nodes]:
    """Before the first of them a relay that adds both to its members."""
    nodes = Nodes(start(name=name) for name in ("a", "b"))
    members = [Member(node.config.name, node.address, 1, 1, 1) for node in nodes]

    def relay(request: m.Request) -> m.Reply | None:
        with NodeClient(nodes[0].address) as node:
            reply = node._channel.call(request, soon())
        return replace(reply, members=members) if isinstance(reply, m.StatusReport) else reply

    before_a = ScriptedNode(tmp_path / "relay", relay)
    nodes.seed = before_a.address
    yield nodes
    before_a.close()


def run(*words: str, status: int = 0, **environment: str) -> Done:
    done = pdserve_here("pool", *words, COLUMNS="80", **environment)
    assert done.returncode == status, done.stderr
    return done


def test_addresses_where_nobody_answers_are_waited_for_together(tmp_path: Path) -> None:
    together = threading.Barrier(3)
    listeners = [socket.socket(socket.AF_UNIX) for _ in range(4)]
    addresses = []
    for i, listening in enumerate(listeners):
        listening.bind(str(tmp_path / str(i)))
        listening.listen()
        addresses.append(f"unix:{tmp_path / str(i)}")

    def hang_up(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        together.wait(10)
        connection.close()

    def refuse(listening: socket.socket) -> None:
        listening.accept()[0].close()

    work = [(refuse, listeners[0]), *((hang_up, listening) for listening in listeners[1:])]
    threads = [threading.Thread(target=each, args=(listening,), daemon=True) for each, listening in work]
    for thread in threads:
        thread.start()
    nodes = [m.NodeAddress(address, address) for address in addresses]
    answers = in_parallel(nodes, lambda node: all_nodes(node.address, "", 20.0))
    assert all(isinstance(answer, PoolError) for answer in answers)
    for thread in threads:
        thread.join(30)
    assert not together.broken
    for listening in listeners:
        listening.close()


def test_status_of_all_marks_the_node_that_does_not_answer(two_nodes: Nodes) -> None:
    second = two_nodes[1]
    rows = json.loads(run("status", "--all", "--json", two_nodes.seed).stdout)
    assert [(row["node"], row["error"], row["pages"]) for row in rows] == [("a", None, 0), ("b", None, 0)]
    assert rows[0]["address"] == two_nodes.seed, "as we reached it, whatever others call it"
    second.kill()
    shown = run("status", "--all", two_nodes.seed).stdout
    assert "unreachable" in shown
    assert "cannot be reached" in shown
    rows = json.loads(run("status", "--all", "--json", two_nodes.seed).stdout)
    assert "cannot be reached" in rows[1]["error"]


def test_ls_lists_pages_of_one_node_and_of_all(two_nodes: Nodes) -> None:
    written = keys(5, 3)
    held = []
    for pool, mine in zip(two_nodes, (written[:3], written[3:]), strict=True):
        held.append(connection := pool.connect())
        put(connection, open_namespace(connection, "qwen"), mine)
    first = two_nodes[0].address
    here = [json.loads(line) for line in run("ls", "--json", first, "qwen").stdout.splitlines()]
    assert sorted(row["key"] for row in here) == sorted(key.hex() for key in written[:3])
    assert {row["length_bytes"] for row in here} == {24576}
    everywhere = run("ls", "--all", "--limit", "2", two_nodes.seed, "qwen").stdout
    assert "more than 2 pages" in everywhere
    assert sum(line.split()[1] == "b" for line in everywhere.splitlines() if len(line.split()) > 4) == 2
    line = run("ls", first, "absent", status=1).stderr
    assert "no namespace 'absent'" in line
    assert line.count("\n") == 1
    for connection in held:
        connection.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("status", "unix:/nowhere"), "cannot be reached"),
        (("status", "--all", "unix:/nowhere"), "cannot be reached"),
        (("ls", "unix:/nowhere", "x"), "cannot be reached"),
        (("drain", "unix:/nowhere"), "cannot be reached"),
        (("status", "--token-file", "/nowhere", "unix:/x"), "--token-file /nowhere: cannot be read"),
        (("status", "host:1"), 'is not "unix:/path"'),
    ],
)
def test_what_cannot_be_done_is_one_line_and_an_exit_status(words: tuple[str, ...], said: str) -> None:
    found = run(*words, status=2 if "token" in said or "is not" in said else 1)
    assert said in found.stderr
    assert found.stderr.count("\n") == 1
    assert found.stdout == ""


# --- drain, against a node that says what the test lets it


def report(request_id: int, pages: int, members: list[Member], node: str = "n") -> m.StatusReport:
    return m.StatusReport(
        request_id, node, 1, 1.0, 100, 100, 0, 0, 0, pages, 0, 0, 1, [], epoch=9, members=members
    )


def member(node: str, status: int, settled: int = 9, address: str = "unix:/x") -> Member:
    return Member(node, address, 1, 1, 1, status, settled)


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ScriptedNode]]:
    monkeypatch.setattr(drain_module, "POLL_S", 0.01)
    made: list[ScriptedNode] = []

    def make(name: str, answer: Callable[[m.Request], m.Reply | None]) -> ScriptedNode:
        made.append(ScriptedNode(tmp_path / name, answer))
        return made[-1]

    yield make
    for node in made:
        node.close()


def follow(node: ScriptedNode, deadline_s: float = 10.0) -> tuple[list[str], list[str]]:
    lines: list[str] = []
    asking = Asking(node.address, False, TOKEN, 5.0)
    with asking.node() as client:
        others = drain_module.follow(client, asking, soon(deadline_s), lines.append)
    return others, lines


GONE = None
WENT_AWAY = [(5, LEAVING, 0), GONE]  # the node does not answer any more, and the other one is asked


@pytest.mark.parametrize(
    ("steps", "at_the_other", "said"),
    [
        (
            [(30, LEAVING, 3), (30, LEAVING, 3), (10, LEAVING, 9), (0, LEFT, 9)],
            ACTIVE,
            [
                "n: 30 pages; 0 of 1 nodes have all that is theirs",
                "n: 10 pages; 1 of 1 nodes have all that is theirs",
                "n: 0 pages; 1 of 1 nodes have all that is theirs",
            ],
        ),
        (WENT_AWAY, LEFT, ["n: 5 pages; 0 of 1 nodes have all that is theirs"]),
        (WENT_AWAY, LEAVING, "went away before it had left"),
        ([(5, LEAVING, 0), (5, ACTIVE, 0)], ACTIVE, "n does not leave any more"),
        ([(5, LEAVING, 0)] * 99, ACTIVE, "has not left yet.*0 of 1"),
    ],
    ids=["left", "gone", "gone too early", "stays", "too long"],
)
def test_a_drain_is_followed_until_the_node_has_left(
    scripted: Callable[..., ScriptedNode], steps: list[Any], at_the_other: int, said: list[str] | str
) -> None:
    left = list(steps)

    def other_answers(request: m.Request) -> m.Reply | None:
        assert isinstance(request, m.Status)
        return report(request.id, 0, [member("n", at_the_other), member("o", ACTIVE)], node="o")

    other = scripted("o", other_answers)

    def answer(request: m.Request) -> m.Reply | None:
        assert isinstance(request, m.Status)
        step = left.pop(0)
        if step is GONE:
            return None
        pages, status, settled = step
        return report(
            request.id, pages, [member("n", status), member("o", ACTIVE, settled, address=other.address)]
        )

    node = scripted("n", answer)
    if isinstance(said, list):
        assert follow(node) == (["o"], said)
    else:
        with pytest.raises(PoolError, match=said):
            follow(node, 0.1 if len(steps) > 9 else 5.0)
    assert other.proofs == (GONE in steps)


def test_the_drain_command_says_what_became_of_it(scripted: Callable[..., ScriptedNode]) -> None:
    drained: list[Any] = []

    def answer(request: m.Request) -> m.Reply | None:
        if isinstance(request, Drain):
            drained.append(request)
            return m.Done(request.id)
        assert isinstance(request, m.Status)
        return report(request.id, 0, [member("n", LEFT if drained else ACTIVE), member("o", ACTIVE)])

    node = scripted("n", answer)
    assert "n has left after" in run("drain", node.address, PDSERVE_POOL_TOKEN=TOKEN).stdout
    found = json.loads(run("drain", "--json", node.address, PDSERVE_POOL_TOKEN=TOKEN).stdout)
    assert found["left"] is True
    assert found["others"] == ["o"]
    assert len(drained) == 2
    assert node.proofs == 2


def test_the_upgrade_command_waits_until_every_node_has_its_pages_or_says_that_it_did_not(
    scripted: Callable[..., ScriptedNode],
) -> None:
    """The others took the node for dead meanwhile, so pages have other owners for a moment."""
    asked: list[Any] = []
    settled: list[int] = []  # the epoch of the other node's pages, at each look

    def answer(request: m.Request) -> m.Reply | None:
        if isinstance(request, Upgrade):
            asked.append(request)
            return m.Done(request.id)
        assert isinstance(request, m.Status)
        members = [member("n", ACTIVE)]
        if asked:
            members.append(member("o", ACTIVE, settled.pop(0) if settled else 0))
        return replace(report(request.id, 0, members), incarnation=1 + len(asked))

    settled[:] = [0, 8, 9]
    address = scripted("n", answer).address
    assert run("upgrade", address).stderr == ""
    assert settled == []
    asked.clear()
    late = run("upgrade", address, "--deadline", "0.5")
    assert "n was upgraded in" in late.stdout
    assert "n: pages still move: wait with the next node" in late.stderr
