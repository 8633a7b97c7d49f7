"""`pdserve pool` asks a node that is hostile: it ends in time, and nothing acts on the terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pdserve.errors import PoolRefused, PoolTimeout
from pdserve.kvpool.admin.ls import pages
from pdserve.kvpool.admin.node_client import NodeClient, all_nodes
from pdserve.kvpool.admin.tables import MAX_ROWS
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import (
    ACTIVE,
    MAX_MEMBERS,
    ListNamespaces,
    ListPages,
    Member,
    NamespaceList,
    NamespaceRecord,
    PageEntry,
    PageList,
    TierStatus,
)
from tests.support.command import pdserve_here
from tests.support.kvpool.scripted_node import ScriptedNode

EVIL = "n\x1b[2J\n ok   all is well\r\u202e\x9b31m"
Answer = Callable[[m.Request], m.Reply | None]


def member(node: str, address: str) -> Member:
    return Member(node, address, 1, 1, 1, ACTIVE, 9)


REPORT = m.StatusReport(
    0,
    EVIL,
    1,
    1.0,
    100,
    100,
    0,
    0,
    0,
    5,
    0,
    0,
    1,
    [m.NamespaceStatus(EVIL, 5, 10, {})],
    counters={EVIL: 7},
    epoch=9,
    members=[member(EVIL, f"unix:/{EVIL}"), member("b", EVIL)],
    tiers=[TierStatus(name=EVIL, kind=EVIL, capacity_bytes=1, used_bytes=1, pages=1)],
)


def evil(request: m.Request) -> m.Reply | None:
    """Every text is an attack."""
    match request:
        case m.Status():
            return replace(REPORT, id=request.id)
        case ListPages():
            return PageList(request.id, [PageEntry(b"k" * 32, 8, EVIL)], 0)
        case ListNamespaces():
            return NamespaceList(request.id, [NamespaceRecord(EVIL, 1, 1, {})])
        case _:
            return m.Fault(getattr(request, "id", 0), EVIL, EVIL)


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Callable[[Answer], str]]:
    """Makes such a node; its address."""
    made: list[ScriptedNode] = []

    def make(answer: Answer) -> str:
        made.append(ScriptedNode(tmp_path / f"node{len(made)}", answer))
        return made[-1].address

    yield make
    for node in made:
        node.close()


@pytest.mark.parametrize(
    "words",
    [
        ("status",),
        ("status", "--all"),
        ("ls", EVIL),
        ("ns", "list"),
        ("ns", "drop", EVIL),
        ("ns", "replace", "a", "b"),
        ("drain", "--deadline", "0.2"),
        ("upgrade", "--deadline", "0.2"),
    ],
)
def test_no_text_of_a_node_acts_on_the_terminal(
    scripted: Callable[[Answer], str], words: tuple[str, ...]
) -> None:
    address, verbs = scripted(evil), 2 if words[0] == "ns" else 1
    done = pdserve_here("pool", *words[:verbs], address, *words[verbs:], "--timeout", "2", COLUMNS="200")
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    assert "\\x1b[2J" in re.sub(r"\s", "", said)
    assert all(line.isprintable() for line in said.split("\n"))
    assert not any(line.startswith(" ok") for line in said.split("\n"))


def test_a_listing_without_an_end_ends(scripted: Callable[[Answer], str]) -> None:
    def endless(request: m.Request) -> m.Reply | None:
        assert isinstance(request, ListPages)
        return PageList(request.id, [], request.cursor + 1)

    with (
        NodeClient(scripted(endless), timeout_s=0.3) as node,
        pytest.raises(PoolTimeout, match="names no page"),
    ):
        list(pages(node, "n"))


def test_a_node_that_names_more_nodes_than_a_pool_has_is_not_believed(
    scripted: Callable[[Answer], str],
) -> None:
    many = [member(f"n{number}", "unix:/nowhere") for number in range(MAX_MEMBERS + 1)]
    address = scripted(lambda request: replace(REPORT, id=getattr(request, "id", 0), members=many))
    with pytest.raises(PoolRefused, match="1,026 nodes"):
        all_nodes(address, "", 2.0)


def test_an_address_that_is_none_hides_no_other_node(scripted: Callable[[Answer], str]) -> None:
    def lying(request: m.Request) -> m.Reply | None:
        members = [member("n", "unix:/x"), member("liar", "no address")]
        return replace(REPORT, id=getattr(request, "id", 0), node="n", members=members)

    done = pdserve_here("pool", "status", scripted(lying), "--all", "--timeout", "2", COLUMNS="120")
    assert done.returncode == 0
    assert re.search(r"^ *liar +unreachable", done.stdout, re.MULTILINE)
    assert re.search(r"^ *n +active", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("changes", [{"uptime_s": float("inf")}, {"uptime_s": float("nan")}])
def test_a_number_that_is_none_is_shown_as_unknown(
    scripted: Callable[[Answer], str], changes: dict[str, Any]
) -> None:
    address = scripted(lambda request: replace(REPORT, id=getattr(request, "id", 0), **changes))
    for more in ((), ("--all",)):
        done = pdserve_here("pool", "status", address, *more, "--timeout", "2", COLUMNS="120")
        assert (done.returncode, "Traceback" in done.stderr) == (0, False)


def test_a_table_has_no_more_rows_than_it_may(scripted: Callable[[Answer], str]) -> None:
    counters = {f"count{number}": 1 for number in range(4 * MAX_ROWS)}
    address = scripted(lambda request: replace(REPORT, id=getattr(request, "id", 0), counters=counters))
    done = pdserve_here("pool", "status", address, "--timeout", "5", COLUMNS="120")
    assert done.returncode == 0
    assert done.stdout.count("\n") < 2 * MAX_ROWS
    assert "... and more" in done.stdout
