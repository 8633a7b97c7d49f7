"""What a new owner pulls, from whom, and when it has settled: in simulated time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kvpool.cluster.rebalance_plan import List, MigrationLimits, Pull
from tests.support.kvpool.move_model import Member, Moving
from tests.support.kvpool.node_model import key

KIB = 1024


def pages(numbers: Sequence[int], length: int = KIB) -> dict[bytes, int]:
    return {key(n): length for n in numbers}


def test_everything_that_is_mine_is_pulled_once_and_then_i_am_settled() -> None:
    moving = Moving({"a": Member({"x": pages(range(100)), "y": pages([1, 2])}), "b": Member()})
    moving.begin(7)
    moving.run()
    assert moving.mine == {"x": pages(range(100)), "y": pages([1, 2])}
    assert [epoch for epoch, _ in moving.settled] == [7]
    assert (moving.planner.pages_pulled, moving.planner.bytes_pulled) == (102, 102 * KIB)
    pulled = [key for action in moving.actions if isinstance(action, Pull) for key in action.keys]
    assert len(pulled) == 102
    assert not moving.planner.moving


def test_what_is_here_already_is_not_pulled() -> None:
    moving = Moving({"a": Member({"x": pages(range(10))})})
    moving.mine = {"x": pages(range(9))}
    moving.begin(1)
    moving.run()
    assert moving.planner.pages_pulled == 1


def test_alone_it_is_settled_at_once() -> None:
    moving = Moving({})
    moving.begin(3)
    assert moving.settled == [(3, 0.0)]
    moving.begin(4)
    assert moving.settled == [(3, 0.0), (4, 0.0)]


def test_pages_still_being_written_there_are_waited_for() -> None:
    member = Member({"x": pages([1])}, writing=1)
    moving = Moving({"a": member})
    moving.begin(1)
    moving.run(until_s=1.0)
    assert not moving.settled
    member.pages["x"].update(pages([2]))
    member.writing = 0
    moving.run()
    assert moving.mine["x"] == pages([1, 2])
    assert moving.settled


def test_a_namespace_whose_place_a_member_lost_is_gone_through_again() -> None:
    moving = Moving({"a": Member({"x": pages(range(10))}, forgets_at=6)}, MigrationLimits(list_keys=3))
    moving.begin(1)
    moving.run()
    assert moving.mine["x"] == pages(range(10))
    assert [action.cursor for action in moving.actions if isinstance(action, List)] == [0, 3, 6, 0, 3, 6, 9]
    assert moving.settled


def test_a_member_that_does_not_know_the_epoch_yet_is_asked_again_soon() -> None:
    member = Member({"x": pages([1])}, epoch=1)
    moving = Moving({"a": member})
    moving.begin(2, learned=False)
    moving.run(until_s=2.0)
    assert not moving.settled
    assert member.asked >= 10
    member.epoch = 2
    moving.run(until_s=3.0)
    assert moving.settled
    assert moving.planner.peers_given_up == 0


@pytest.mark.parametrize("how", ["silent", "stale"])
def test_a_member_that_never_answers_costs_time_and_nothing_else(how: str) -> None:
    dead = Member({"x": pages([1])}, silent=how == "silent", epoch=0)
    moving = Moving({"dead": dead, "b": Member({"x": pages([2, 3])})})
    moving.members["b"].epoch = 5
    moving.begin(5, learned=False)
    moving.run()
    assert moving.mine["x"] == pages([2, 3])
    assert moving.planner.peers_given_up == 1
    assert moving.settled[0][1] < 60
    assert dead.asked < 400


def test_a_pull_that_failed_is_repeated_and_the_member_forgiven() -> None:
    member = Member({"x": pages(range(200))})
    moving = Moving({"a": member})
    moving.begin(1)
    while not moving.planner.pages_pulled:
        moving.step()
    member.silent = True
    for _ in range(3):
        moving.step()
    member.silent = False
    moving.run()
    assert moving.mine["x"] == pages(range(200))
    assert moving.planner.pulls_failed >= 1
    assert moving.planner.peers_given_up == 0


def test_a_new_view_in_the_middle_starts_over_and_keeps_what_was_pulled() -> None:
    moving = Moving({"a": Member({"x": pages(range(500))}), "b": Member({"x": pages(range(500, 600))})})
    moving.begin(1)
    while moving.planner.pages_pulled < 100:
        moving.step()
    del moving.members["b"]
    moving.begin(2)
    moving.run()
    assert [epoch for epoch, _ in moving.settled] == [2]
    assert moving.mine["x"].keys() >= pages(range(500)).keys()
    per_key = [k for action in moving.actions if isinstance(action, Pull) for k in action.keys]
    assert len(per_key) <= 600 + 64 * 2, "a batch that was out may be asked for twice, the rest may not"


def test_a_namespace_without_room_ends_and_the_others_go_on() -> None:
    moving = Moving(
        {"a": Member({"big": pages(range(300), 10 * KIB), "small": pages(range(10))})}, room_bytes=1000 * KIB
    )
    moving.begin(1)
    moving.run()
    assert len(moving.mine["big"]) == 100
    assert moving.settled
    assert len(moving.mine.get("small", {})) <= 10


def test_a_member_that_gives_few_pages_at_a_time_gives_them_all() -> None:
    moving = Moving({"a": Member({"x": pages(range(300))}, at_once=3)})
    moving.begin(1)
    moving.run()
    assert moving.mine["x"] == pages(range(300))
    assert moving.members["a"].asked < 120


def test_pages_that_come_late_are_asked_for_again() -> None:
    member = Member({"x": pages(range(50))}, late=set(pages(range(50))))
    moving = Moving({"a": member})
    moving.begin(1)
    moving.run()
    assert moving.mine["x"] == pages(range(50))


def test_a_page_that_never_comes_does_not_keep_anybody() -> None:
    member = Member({"x": pages(range(10))}, at_once=0)
    moving = Moving({"a": member})
    moving.begin(1)
    moving.run()
    assert moving.settled
    assert member.asked < 12


def test_no_more_is_pulled_than_there_may_be_room_for() -> None:
    moving = Moving({name: Member({"x": pages(range(n, n + 1000))}) for name, n in (("a", 0), ("b", 1000))})
    moving.begin(1, room_bytes=100 * KIB)
    moving.run()
    assert 100 <= moving.planner.pages_pulled < 100 + 2 * 64
    assert moving.settled


@pytest.mark.parametrize("rate", [1e6, 50e6])
def test_pages_come_at_the_given_rate_whatever_the_members_could(rate: float) -> None:
    limits = MigrationLimits(bytes_s=rate)
    moving = Moving(
        {f"n{i}": Member({"x": pages(range(i * 100, i * 100 + 100), 1 << 20)}) for i in range(4)}, limits
    )
    moving.begin(1)
    moving.run()
    assert moving.planner.bytes_pulled == 400 << 20
    wanted_s = (400 << 20) / rate
    assert 0.85 * wanted_s < moving.settled[0][1] < 1.1 * wanted_s + 1


def test_a_page_larger_than_the_bucket_comes_too() -> None:
    moving = Moving({"a": Member({"x": pages([1, 2], 1 << 30)})}, MigrationLimits(bytes_s=1e6))
    moving.begin(1)
    moving.run()
    assert moving.mine["x"] == pages([1, 2], 1 << 30)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_happens_it_settles_with_all_that_the_living_had(data: st.DataObject) -> None:
    names = ["a", "b", "c", "d"]
    moving = Moving(
        {
            name: Member({ns: pages(data.draw(st.lists(st.integers(0, 300)))) for ns in ("x", "y")})
            for name in names
        },
        MigrationLimits(
            bytes_s=data.draw(st.sampled_from([0.0, 1e4, 1e7])), batch_pages=3, list_keys=5, max_peers=2
        ),
    )
    epoch = 1
    moving.begin(epoch)
    for _ in range(data.draw(st.integers(0, 60))):
        what = data.draw(st.sampled_from(["step", "step", "step", "view", "silent", "writing"]))
        member = moving.members[data.draw(st.sampled_from(names))]
        if what == "view":
            epoch += 1
            moving.begin(epoch, learned=data.draw(st.booleans()))
        elif what == "silent":
            member.silent = not member.silent
        elif what == "writing":
            member.writing = 1 - member.writing
        elif not moving.idle:
            moving.step()
    for member in moving.members.values():
        member.silent, member.writing, member.epoch = False, 0, epoch
    moving.begin(epoch + 1)
    moving.run()
    assert moving.settled[-1][0] == epoch + 1
    for ns in ("x", "y"):
        wanted = {k for member in moving.members.values() for k in member.pages[ns]}
        assert moving.mine.get(ns, {}).keys() == wanted
