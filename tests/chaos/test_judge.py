"""The judge of a chaos run, on records made by hand: each figure passes, and each can be missed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.judge import Row, judge, starved_s
from tests.chaos.records import (
    Abandoned,
    Acted,
    Asked,
    Disturbed,
    Ended,
    Flipped,
    Lost,
    Moved,
    Record,
    Restarted,
    Starved,
    Stopped,
    Upgraded,
    read_lines,
    to_line,
)
from tests.support.kvpool import made_pages as p

PAGE = p.number(p.OWNED, 0, 1)
MANY = [p.number(p.OWNED, 0, which) for which in range(900)]
DAMAGED = p.number(p.DAMAGED, 0, 1)


def asked(kind: Any, start_s: float, pages: list[int], ok: list[bool], **more: Any) -> Asked:
    return Asked(kind, more.pop("worker", "client-shm.0"), start_s, start_s + 0.1, 2.0, pages, ok, **more)


PUT = asked("put", 1.0, [PAGE], [True])
GET = asked("get", 20.0, [PAGE], [True])
MISS = asked("get", 20.0, [PAGE], [False])
KILL = Disturbed(5.0, 6.0, "kill", "node0")
REBOOT = Disturbed(5.0, 6.0, "reboot", "node0")
UPGRADE = Upgraded(24.0, 26.0, "node0", 100, 0)
GOOD: list[Record] = [
    PUT,
    GET,
    asked("get", 25.0, [PAGE], [True]),
    asked("confirmed", 30.0, [PAGE], [True]),
    Disturbed(10.0, 11.0, "pause", "node1"),
    Flipped(5.0, "node0", DAMAGED, "detected"),
    Flipped(5.0, "node0", DAMAGED, "detected", "ssd"),
    Stopped(6.0, 7.0, "client-shm", killed=True),
    Abandoned(7.0, 4096, 0, 0.2),
    Moved(6.0, 8.0, "node3", 3, 250, 1000),
    UPGRADE,
    Acted(6.0, "pause", "node1", "done"),
    Ended("node0", True),
]
RESTART = [KILL, Restarted(6.0, "node0", 0.5, 100, 0.8, 16)]


def rows(records: list[Record], owner: str = "node0") -> dict[str, Row]:
    """By number; the second of a number is R1/2, the third R1/3."""
    lines = b"".join(map(to_line, records))
    found: dict[str, Row] = {}
    for row in judge(read_lines(lines), lambda page: owner, 3.0):
        ordinal = sum(name.partition("/")[0] == row.number for name in found)
        found[f"{row.number}/{ordinal + 1}" if ordinal else row.number] = row
    return found


def verdict(number: str, *records: Record, owner: str = "node0") -> str:
    return rows(list(records), owner)[number].verdict


def test_a_good_run_passes() -> None:
    more = [Moved(34.0, 36.0, "node3", 3), asked("get", 35.0, [PAGE], [True])]
    again = [Disturbed(40.0, 41.0, "kill", "node0"), Restarted(41.0, "node0", 0.5, 100, 0.8, 16)]
    dead = [asked("get", 50.0, [PAGE], [True]), Disturbed(55.0, 56.0, "reboot", "node0")]
    found = rows([*GOOD, *more, *again, *dead, asked("get", 60.0, [PAGE], [True])])
    assert {row.verdict for row in found.values()} == {"pass"}


def test_nothing_done_is_not_a_pass() -> None:
    assert {row.verdict for row in rows([]).values()} == {"not exercised"}


@pytest.mark.parametrize(
    ("row", "idle"),
    [
        ("R1/2", Flipped(5.0, "node0", DAMAGED, "replaced")),
        ("R2", Abandoned(50.0, 4096, 0, 0.2)),
        ("R8/2", Restarted(6.0, "node0", 0.5, 0)),
        ("R9", UPGRADE),
        ("R11", Moved(6.0, 8.0, "node3", 3)),
        ("R14", Abandoned(7.0, 0, 0, 0.0)),
        ("faults", Acted(6.0, "flip", "node0", "left out", "no page")),
        ("R12", Acted(6.0, "flip", "node0", "left out", "no page")),
    ],
)
def test_a_fault_that_showed_nothing_is_no_evidence(row: str, idle: Record) -> None:
    assert rows([PUT, GET, idle])[row].verdict == "not exercised"


@pytest.mark.parametrize(
    ("number", "bad"),
    [
        ("R1", asked("get", 20.0, [DAMAGED], [True], wrong=[DAMAGED])),
        ("R1", Flipped(5.0, "node0", DAMAGED, "delivered")),
        ("R1/2", Flipped(5.0, "node0", DAMAGED, "delivered")),
        ("R1/2", Flipped(5.0, "node0", DAMAGED, "delivered", "ssd")),
        ("R2", asked("get", 20.0, [PAGE], [True], wrong=[PAGE])),
        ("R2", asked("get", 20.0, [PAGE], [False], corrupt=1)),
        ("R3", asked("confirmed", 20.0, [PAGE], [False])),
        ("R3", asked("confirmed", 20.0, MANY, [False, *[True] * 899])),
        ("R4", MISS),
        ("R8/2", Restarted(6.0, "node0", 0.5, 100, 10.1, 16)),
        ("R8/2", Restarted(6.0, "node0", 0.5, 100, None, 1)),
        ("R9", asked("get", 25.0, [PAGE], [False])),
        ("R9", asked("get", 25.0, [PAGE], [False], up=False)),
        ("R9", asked("put", 25.0, [PAGE], [False])),
        ("R9", asked("confirmed", 25.0, [PAGE], [False])),
        ("R9", Upgraded(24.0, 26.0, "node0", 100, 1)),
        ("R9", Upgraded(24.0, 26.0, "node0", 100, 0, "it did not come back")),
        ("R11", Moved(60.0, 61.0, "node3", 3, 350, 1000)),
        ("R11", Moved(60.0, 91.0, "node3", 3, error="it did not join")),
        ("R12", Asked("get", "client-shm.0", 20.0, 23.1, 2.0, [], [])),
        ("R12", Ended("client-shm", False)),
        ("R14", Abandoned(7.0, 4096, 4096, 30.0)),
        ("faults", Acted(6.0, "kill", "node0", "failed", "it did not start")),
        ("ended", Ended("node0", False)),
        ("ended", Ended("node0", True, "Traceback ... ValueError")),
    ],
)
def test_each_figure_can_be_missed(number: str, bad: Record) -> None:
    good = [*GOOD, *RESTART[1:]]
    assert verdict(number, *good) == "pass"
    assert verdict(number, *good, bad) == "MISS"


def test_a_client_that_was_stopped_is_excused_and_no_other() -> None:
    stopped = Stopped(15.0, 19.5, "client-shm")
    late = Asked("get", "client-shm.0", 14.0, 19.6, 2.0, [], [])
    assert verdict("R4", PUT, MISS, stopped) == "not exercised"
    assert verdict("R12", PUT, late, stopped) == "pass"
    assert verdict("R4", PUT, asked("get", 20.0, [PAGE], [False], worker="client-ucx.2"), stopped) == "MISS"


def test_a_client_that_does_not_know_a_node_well_again_has_a_row_of_its_own() -> None:
    pause = Disturbed(10.0, 12.0, "pause", "node1")
    lost = [asked("get", at_s, [PAGE], [False], up=False) for at_s in (13.0, 19.0, 21.0, 23.0)]
    assert verdict("R4", PUT, pause, *lost) == "not exercised"
    soon, late = asked("get", 21.5, [PAGE], [True]), asked("get", 24.0, [PAGE], [True])
    assert verdict("found", PUT, pause, *lost[:3], soon) == "pass"
    assert verdict("found", PUT, pause, *lost, late) == "MISS"
    assert verdict("found", PUT, pause, *lost) == "MISS"
    again = Disturbed(14.0, 15.0, "pause", "node1")
    assert verdict("found", PUT, pause, *lost[:1], again, soon) == "pass"


def test_a_page_lost_by_a_killed_node_counts_for_its_restart() -> None:
    found = rows([PUT, KILL, Restarted(6.0, "node0", 1.0, 1), MISS])
    assert (found["R4"].verdict, found["R8"].verdict) == ("not exercised", "MISS")
    other = rows([PUT, KILL, MISS], owner="node1")
    assert (other["R4"].verdict, other["R8"].verdict) == ("MISS", "not exercised")


def test_a_page_that_a_reboot_lost_has_a_row_of_its_own_unless_it_was_just_written() -> None:
    found = rows([PUT, REBOOT, MISS])
    assert [found[name].verdict for name in ("R4", "R8", "reboot")] == [
        "not exercised",
        "not exercised",
        "MISS",
    ]
    just = asked("put", 4.0, [PAGE], [True])
    assert rows([just, REBOOT, MISS])["reboot"].verdict == "not exercised"
    assert rows([just, REBOOT, MISS], "node1")["R4"].verdict == "MISS"


def test_an_upgrade_puts_deadlines_off() -> None:
    late = Asked("get", "client-ucx.0", 24.5, 30.0, 2.0, [], [])
    assert verdict("R12", PUT, UPGRADE, late) == "pass"
    assert verdict("R12", PUT, Disturbed(24.0, 26.0, "pause", "node0"), late) == "MISS"


def test_where_the_machine_gives_no_processor_nothing_is_judged() -> None:
    late = Asked("get", "client-shm.0", 20.0, 23.1, 2.0, [], [])
    other = asked("get", 30.0, [PAGE], [True])
    assert verdict("R12", *GOOD, other, Starved(21.0, 22.0, "client-shm"), late) == "pass"
    assert verdict("R12", *GOOD, other, Starved(21.0, 22.0, "client-ucx"), late) == "MISS"
    starved = Disturbed(19.0, 21.0, "starved", "node1")
    assert verdict("R4", PUT, MISS, starved) == "not exercised"
    assert starved_s([starved, Disturbed(20.0, 23.0, "starved", "node0")]) == 4.0


LATER: Record = asked("put", 11.0, [PAGE], [True])


@pytest.mark.parametrize(
    ("number", "records", "found"),
    [
        ("R4", [PUT, MISS, Disturbed(10.0, 19.5, "pause", "node1")], "not exercised"),
        ("R4", [PUT, MISS, Disturbed(10.0, 17.0, "pause", "node1")], "MISS"),
        ("R4", [PUT, Lost(10.0), MISS], "not exercised"),
        ("R4", [PUT, Lost(10.0, [PAGE]), MISS], "not exercised"),
        ("R4", [PUT, Lost(10.0), LATER, MISS], "MISS"),
        ("R4", [asked("put", 1.0, [PAGE], [False]), MISS], "not exercised"),
        ("R11/2", [PUT, Moved(19.0, 21.0, "node3", 3, 250, 1000), MISS], "MISS"),
        ("R9", [Upgraded(24.0, 26.0, "node0", 0, 0, "it refused")], "MISS"),
        ("R2", [PUT, GOOD[7], asked("get", 20.0, [DAMAGED], [False], corrupt=1)], "pass"),
    ],
)
def test_a_miss_is_excused_by_what_lost_the_page_or_disturbed_its_node_and_by_nothing_else(
    number: str, records: list[Record], found: str
) -> None:
    assert verdict(number, *records) == found
