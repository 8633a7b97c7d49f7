"""Which segment makes room."""

from __future__ import annotations

from pdserve.kvpool.tiers.ssd.compaction import Compact, Drop, SegmentFacts, make_room


def facts(number: int, live: int, read: int = 0) -> SegmentFacts:
    return SegmentFacts(number, 100, live, read)


def test_nothing_happens_while_there_is_room() -> None:
    assert make_room([facts(1, 10), facts(2, 100)], room_bytes=200, wanted_bytes=200) is None
    assert make_room([], room_bytes=0, wanted_bytes=200) is None


def test_an_empty_segment_goes_even_while_there_is_room() -> None:
    assert make_room([facts(1, 10), facts(2, 0)], room_bytes=500, wanted_bytes=200) == Drop(2)


def test_a_segment_of_which_less_than_half_is_found_is_compacted_first() -> None:
    segments = [facts(1, 100), facts(2, 50), facts(3, 30), facts(4, 60)]
    assert make_room(segments, 0, 200) == Compact(3, only_read=False, budget_bytes=50)


def test_the_oldest_goes_when_all_are_full() -> None:
    assert make_room([facts(1, 100), facts(2, 90, read=50)], 0, 200) == Drop(1)


def test_pages_read_since_they_were_written_stay() -> None:
    assert make_room([facts(1, 100, read=20), facts(2, 90)], 0, 200) == Compact(
        1, only_read=True, budget_bytes=50
    )
