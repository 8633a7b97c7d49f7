"""What faults of a chaos run note, on nodes made by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.chaos import run
from benchmarks.chaos.faults import abandon, perform, timing
from benchmarks.chaos.field import Field, Settings
from benchmarks.chaos.pages import SHAPES
from benchmarks.chaos.plan import Fault, Kind, Plan
from benchmarks.chaos.records import Ended, Lost, Upgraded, read_lines
from benchmarks.chaos.run import Outcome, Replay, figures_table
from benchmarks.stores import BenchError
from pdserve.errors import PoolRefused, PoolUnavailable
from pdserve.kvpool.protocol.messages import (
    FULL,
    GRANTED,
    MOVED,
    Grant,
    Opened,
    Reply,
    Reserved,
    StatusReport,
)
from pdserve.kvpool.protocol.messages import Fault as Refusal


def raises(error: Exception) -> Callable[..., Any]:
    def act(*_: object) -> None:
        raise error

    return act


def node(name: str) -> Any:
    return SimpleNamespace(
        name=name, address=f"unix:/{name}", pid=1, died="", status=lambda: SimpleNamespace(incarnation=1)
    )


@pytest.fixture
def field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Field:
    """Three nodes with a page each, which are always one pool."""
    nodes = [node(f"node{index}") for index in range(3)]
    made = Field(1, Settings(), nodes, [], [], tmp_path / "faults.jsonl", lambda name: node(name), [])
    monkeypatch.setattr(perform, "pages_on", lambda one: {one.name.encode(): 4096})
    monkeypatch.setattr(made, "settle", lambda: None)
    return made


def noted(field: Field, kind: Kind) -> list[Any]:
    """The records of one such fault of node0."""
    perform.perform(field, Fault(0.0, kind, 0, 0.0, 1))
    return read_lines(field.output.read_bytes())


@pytest.mark.parametrize(
    ("kind", "error", "became"),
    [
        ("kill", BenchError("it did not start"), "failed"),
        ("kill", PoolUnavailable("gone"), "failed"),  # nobody else has taken its node
        ("flip", PoolUnavailable("gone"), "left out"),
        ("flip", PoolRefused("bad token"), "failed"),
        ("flip", OSError("no space"), "failed"),
    ],
)
def test_a_fault_that_does_not_happen_is_noted_with_its_error(
    field: Field, monkeypatch: pytest.MonkeyPatch, kind: Kind, error: Exception, became: str
) -> None:
    monkeypatch.setitem(perform.ACTS, kind, raises(error))
    (record,) = noted(field, kind)
    assert (record.kind, record.node, record.became, record.why) == (kind, "node0", became, str(error))


def test_a_fault_that_is_done_is_noted_even_so(field: Field, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(perform.ACTS, "kill", lambda *_: None)
    (record,) = noted(field, "kill")
    assert (record.became, record.why) == ("done", "")


def test_an_upgrade_that_a_node_refuses_is_noted_and_ends_the_round(
    field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perform, "ask", raises(PoolRefused("the new version does not load")))
    upgraded, acted = noted(field, "upgrade")
    assert (upgraded.node, upgraded.error) == ("node0", "the new version does not load")
    assert acted.became == "failed"


def test_an_upgrade_after_which_the_nodes_are_not_one_pool_is_noted(
    field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perform, "ask", lambda *_: None)
    monkeypatch.setattr(perform, "_until_upgraded", lambda *_: "")
    monkeypatch.setattr(field, "settle", raises(BenchError("not one pool")))
    errors = [one.error for one in noted(field, "upgrade") if isinstance(one, Upgraded)]
    assert errors == ["not one pool"]


@pytest.mark.parametrize(("upgraded", "became"), [(0, "left out"), (1, "left out"), (3, "done")])
def test_a_round_of_upgrades_is_done_when_its_last_node_is(
    field: Field, monkeypatch: pytest.MonkeyPatch, upgraded: int, became: str
) -> None:
    seen: list[str] = []

    def upgrade(of: Field, one: Any) -> Upgraded:
        seen.append(one.name)
        if len(seen) == upgraded:
            of.stop.set()  # the run's minutes are over
        return Upgraded(0.0, 1.0, one.name, 1, 0)

    monkeypatch.setattr(perform, "_upgraded", upgrade)
    if not upgraded:
        field.stop.set()
    *_, acted = noted(field, "upgrade")
    assert len(seen) == upgraded
    assert acted.became == became


def test_an_upgrade_lasts_until_another_incarnation_serves(
    field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = [SimpleNamespace(incarnation=number, counters={}) for number in (1, 1, 3, 3)]
    monkeypatch.setattr(field.nodes[0], "status", lambda: reports.pop(0))
    monkeypatch.setattr(field, "nodes", field.nodes[:1])
    monkeypatch.setattr(perform, "ask", lambda *_: None)
    upgraded, _ = noted(field, "upgrade")
    assert upgraded.error == ""
    assert [report.incarnation for report in reports] == [3]


def test_a_restart_notes_how_many_pages_were_asked_for_in_vain(
    field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = node("node0")
    started.spawn, started.await_ready = lambda: None, time.monotonic
    started.status = lambda: SimpleNamespace(pages=2)
    monkeypatch.setattr(timing, "HIT_TIMEOUT_S", 0.1)
    monkeypatch.setattr(timing, "Direct", raises(PoolUnavailable("gone")))
    timing.start_again(field, started, {b"small": sum(SHAPES[0]), b"large": sum(SHAPES[1])})
    (restarted,) = read_lines(field.output.read_bytes())
    assert (restarted.hit_s, restarted.asked) == (None, 1)


@pytest.mark.parametrize(
    ("grants", "said"),
    [
        ([MOVED, GRANTED], "ready"),
        ([GRANTED, MOVED], "ready"),
        ([MOVED, FULL], "left out: pool node unix:/node0 grants none of 2 pages"),
    ],
)
def test_a_client_is_ready_to_be_abandoned_with_any_page_that_its_node_grants(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], grants: list[int], said: str
) -> None:
    answering(monkeypatch, [Opened(1, 1), Reserved(2, [Grant(status) for status in grants])])
    abandon.main("unix:/node0", "shm", len(grants))
    assert capsys.readouterr().out == f"{said}\n"


def test_a_client_to_be_abandoned_that_its_node_refuses_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, [Refusal(1, "access_denied", "a token is needed")])
    with pytest.raises(PoolRefused, match="a token is needed"):
        abandon.main("unix:/node0", "shm", 1)


def answering(monkeypatch: pytest.MonkeyPatch, replies: list[Reply]) -> None:
    """A client to be abandoned gets these."""
    connection = SimpleNamespace(call=lambda *_: replies.pop(0))
    connector = SimpleNamespace(connect=lambda *_: connection)
    monkeypatch.setattr(abandon, "connector_for", lambda *_: connector)
    monkeypatch.setattr("sys.stdin", StringIO())


@pytest.mark.parametrize(
    ("address", "became", "why"),
    [
        ("unix:/nobody/there.sock", "left out", "pool node unix:/nobody/there.sock cannot be reached"),
        ("nonsense", "failed", "a client to be abandoned failed: pdserve.errors.ConfigError: "),
    ],
)
def test_a_client_to_be_abandoned_is_left_out_only_where_its_node_is_away(
    field: Field, address: str, became: str, why: str
) -> None:
    field.ways = [SimpleNamespace(address=address)] * 3  # type: ignore[list-item]
    (acted,) = noted(field, "abandon")
    assert acted.became == became
    assert acted.why.startswith(why)


def test_a_node_on_which_no_client_can_be_abandoned_at_the_end_is_named_with_the_reason(
    field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = node("node0")
    empty = StatusReport(1, "node0", 1, 60.0, 4096, 4096, 0, 0, 0, 0, 0, 0, 1, [])
    last.status = lambda: empty
    last.stop, last.log = lambda: True, lambda: ""
    field.nodes = [last]
    field.workers = [SimpleNamespace(kill=lambda: None)]  # type: ignore[list-item]
    field.ways = [SimpleNamespace(address="unix:/nobody/there.sock")]  # type: ignore[list-item]
    monkeypatch.setattr(run, "perform", lambda *_: None)
    run._end(field)
    (ended,) = [one for one in read_lines(field.output.read_bytes()) if isinstance(one, Ended)]
    assert ended.complaint.startswith("pool node unix:/nobody/there.sock cannot be reached")


def visitor(field: Field, start: Callable[..., Any]) -> None:
    made = node("visitor")
    made.start, made.stop, made.close = start, lambda: True, lambda: None
    field.visitor = lambda name: made


def test_a_visit_is_left_out_while_another_fault_has_a_node_and_excuses_nothing(
    field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    visitor(field, lambda: pytest.fail("it was started"))
    monkeypatch.setattr(perform, "pages_on", raises(PoolUnavailable("node1 went away")))
    (acted,) = noted(field, "visit")
    assert (acted.became, acted.why) == ("left out", "node1 went away")


def test_a_visit_during_which_another_fault_takes_a_node_goes_on_and_counts_no_pages(
    field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[str] = []
    visitor(field, lambda: joined.append("visitor"))

    def pages_on(one: Any) -> dict[bytes, int]:
        if joined and one.name == "node1":
            raise PoolUnavailable("node1 went away")
        return {b"page": 4096}

    monkeypatch.setattr(perform, "pages_on", pages_on)
    monkeypatch.setattr(perform, "await_settled", lambda *_: None)
    monkeypatch.setattr(perform, "ask", lambda *_: None)
    monkeypatch.setattr(perform, "until_all", lambda *_: 0.0)
    came, _, acted = noted(field, "visit")
    assert (came.error, came.moved_pages, came.all_pages) == ("", 0, 0)
    assert (acted.became, acted.why) == ("done", "")


@pytest.mark.parametrize("starts", [True, False])
def test_a_visitor_that_does_not_start_or_goes_away_as_it_joins_is_noted(
    field: Field, monkeypatch: pytest.MonkeyPatch, starts: bool
) -> None:
    def pages_on(one: Any) -> dict[bytes, int]:
        if one.name == "visitor":
            raise PoolUnavailable("the visitor went away")
        return {b"page": 4096}

    visitor(field, (lambda: None) if starts else raises(BenchError("it did not start")))
    monkeypatch.setattr(perform, "pages_on", pages_on)
    monkeypatch.setattr(perform, "await_settled", lambda *_: None)
    moved, lost, acted = noted(field, "visit")
    assert moved.error == ("the visitor went away" if starts else "it did not start")
    assert isinstance(lost, Lost)
    assert acted.became == "failed"


def test_the_title_counts_what_was_carried_out() -> None:
    replay = Replay(Plan(7, 2.0, 3, []), Settings())
    assert (
        figures_table(Outcome(replay, [], 0.0, 5, 5)).title == "Chaos: seed 7, 2 minutes, 3 nodes, 5 faults"
    )
    assert str(figures_table(Outcome(replay, [], 0.0, 5, 3)).title).endswith("3 of 5 faults")
