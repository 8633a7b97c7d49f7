"""The judge of a chaos run, on records made by hand: each figure passes, and each can be missed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pdserve.bench.chaos import pages as p
from pdserve.bench.chaos.judge import Row, judge
from pdserve.bench.chaos.records import (
    Abandoned,
    Asked,
    Disturbed,
    Dropped,
    Ended,
    Flipped,
    Lost,
    Moved,
    Noticed,
    Overshot,
    Record,
    Restarted,
    Stopped,
    read_lines,
    to_line,
)

PAGE = p.number(p.OWNED, 0, 1)
DAMAGED = p.number(p.DAMAGED, 0, 1)


def asked(kind: Any, start_s: float, pages: list[int], ok: list[bool], **more: Any) -> Asked:
    return Asked(kind, more.pop("worker", "client-shm.0"), start_s, start_s + 0.1, 2.0, pages, ok, **more)


PUT = asked("put", 1.0, [PAGE], [True])
GET = asked("get", 20.0, [PAGE], [True])
MISS = asked("get", 20.0, [PAGE], [False])
GOOD: list[Record] = [
    PUT,
    GET,
    asked("confirmed", 30.0, [PAGE], [True]),
    Flipped(5.0, "node0", DAMAGED, "detected"),
    Dropped(6.0, 100, 0),
    Abandoned(7.0, 4096, 0, 0.2),
    Moved(6.0, 8.0, "node3", 3, 250, 1000),
    Noticed(6.0, "node0", 1.5),
    Overshot(6.0, 0, 10),
    Ended("node0", True),
]


def rows(records: list[Record], owner: str = "node0") -> dict[str, Row]:
    lines = b"".join(map(to_line, records))
    return {row.number: row for row in judge(read_lines(lines), lambda page: owner)}


def verdict(number: str, *records: Record, owner: str = "node0") -> str:
    return rows(list(records), owner)[number].verdict


def test_a_good_run_passes() -> None:
    found = rows([*GOOD, Disturbed(40.0, 41.0, "kill", "node0"), asked("get", 50.0, [PAGE], [True])])
    assert {number: row.verdict for number, row in found.items()} == {
        **dict.fromkeys(("R1", "R2", "R3", "R4", "R5", "R6", "R8"), "pass"),
        **dict.fromkeys(("R10", "R11", "R12", "R14", "-", ""), "pass"),
        **dict.fromkeys(("R7", "R13"), "not run"),
    }


def test_nothing_asked_is_not_a_pass() -> None:
    assert all(row.verdict == "not run" for number, row in rows([]).items() if number)


@pytest.mark.parametrize(
    ("number", "bad"),
    [
        ("R1", asked("get", 20.0, [DAMAGED], [True], wrong=[DAMAGED])),
        ("R1", Flipped(5.0, "node0", DAMAGED, "delivered")),
        ("R2", asked("get", 20.0, [PAGE], [True], wrong=[PAGE])),
        ("R2", asked("get", 20.0, [PAGE], [False], corrupt=1)),
        ("R3", asked("confirmed", 20.0, [PAGE], [False])),
        ("R4", MISS),
        ("R5", Dropped(6.0, 100, 1)),
        ("R6", Overshot(6.0, 4096, 10)),
        ("R10", Noticed(6.0, "node0", 2.1)),
        ("R11", Moved(60.0, 61.0, "node3", 3, 400, 1000)),
        ("R12", Asked("get", "client-shm.0", 20.0, 23.1, 2.0, [], [])),
        ("R12", Ended("client-shm", False)),
        ("R14", Abandoned(7.0, 4096, 4096, 30.0)),
        ("", Ended("node0", False)),
        ("", Ended("node0", True, "Traceback ... ValueError")),
    ],
)
def test_each_figure_can_be_missed(number: str, bad: Record) -> None:
    assert verdict(number, *GOOD) == "pass"
    assert verdict(number, *GOOD, bad) == "MISS"


def test_damage_that_was_done_on_purpose_is_no_torn_page() -> None:
    assert verdict("R2", PUT, asked("get", 20.0, [DAMAGED], [False], corrupt=1)) == "pass"


@pytest.mark.parametrize("start_s", [10.0, 19.0, 20.05])
def test_a_miss_while_a_node_is_disturbed_is_no_failure(start_s: float) -> None:
    assert verdict("R4", PUT, MISS, Disturbed(start_s, start_s + 9.5, "pause", "node1")) == "not run"


def test_a_miss_long_after_a_disturbance_is_one() -> None:
    assert verdict("R4", PUT, MISS, Disturbed(10.0, 17.0, "pause", "node1")) == "MISS"


def test_a_client_that_was_stopped_is_excused_and_no_other() -> None:
    stopped = Stopped(15.0, 19.5, "client-shm")
    late = Asked("get", "client-shm.0", 14.0, 19.6, 2.0, [], [])
    assert verdict("R4", PUT, MISS, stopped) == "not run"
    assert verdict("R12", PUT, late, stopped) == "pass"
    assert verdict("R4", PUT, asked("get", 20.0, [PAGE], [False], worker="client-ucx.2"), stopped) == "MISS"


def test_a_client_that_does_not_know_a_node_well_again_has_a_row_of_its_own() -> None:
    pause = Disturbed(10.0, 12.0, "pause", "node1")
    lost = [asked("get", at_s, [PAGE], [False], up=False) for at_s in (13.0, 19.0, 21.0, 23.0)]
    assert verdict("R4", PUT, pause, *lost) == "not run"
    soon, late = asked("get", 21.5, [PAGE], [True]), asked("get", 24.0, [PAGE], [True])
    assert verdict("-", PUT, pause, *lost[:3], soon) == "pass"
    assert verdict("-", PUT, pause, *lost, late) == "MISS"
    assert verdict("-", PUT, pause, *lost) == "MISS"
    again = Disturbed(14.0, 15.0, "pause", "node1")
    assert verdict("-", PUT, pause, *lost[:1], again, soon) == "pass"


KILL = Disturbed(5.0, 6.0, "kill", "node0")


def test_a_page_lost_by_a_killed_node_counts_for_its_restart() -> None:
    found = rows([PUT, KILL, Restarted(6.0, "node0", 1.0, 1), MISS])
    assert (found["R4"].verdict, found["R8"].verdict) == ("not run", "MISS")
    other = rows([PUT, KILL, MISS], owner="node1")
    assert (other["R4"].verdict, other["R8"].verdict) == ("MISS", "not run")


@pytest.mark.parametrize(
    "excuse",
    [
        lambda: [PUT, Lost(10.0), MISS],
        lambda: [PUT, Lost(10.0, [PAGE]), MISS],
        lambda: [asked("put", 1.0, [PAGE], [False]), MISS],
        lambda: [asked("put", 25.0, [PAGE], [True]), MISS],
    ],
)
def test_a_page_that_need_not_be_there_is_not_missed(excuse: Callable[[], list[Record]]) -> None:
    assert verdict("R4", *excuse()) == "not run"


def test_a_miss_while_pages_move_counts_for_that() -> None:
    found = rows([PUT, Moved(19.0, 21.0, "node3", 3, 250, 1000), MISS])
    assert (found["R4"].verdict, found["R11"].verdict) == ("not run", "MISS")


def test_a_namespace_dropped_while_a_node_is_away_is_not_judged() -> None:
    late = Dropped(6.0, 100, 1)
    assert verdict("R5", late, Disturbed(6.5, 7.0, "pause", "node1")) == "not run"


def test_a_page_written_again_after_a_loss_must_be_there() -> None:
    assert verdict("R4", PUT, Lost(10.0), asked("put", 11.0, [PAGE], [True]), MISS) == "MISS"


def test_a_line_cut_short_is_left_out() -> None:
    assert read_lines(to_line(PUT) + to_line(GET)[:-5]) == [PUT]
