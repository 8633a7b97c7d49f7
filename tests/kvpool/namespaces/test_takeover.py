"""Which namespaces a node has at a start, and which pages in tiers count."""

from __future__ import annotations

from itertools import permutations

from pdserve.kvpool.namespaces.catalog import SEQUENCES, Namespaces
from pdserve.kvpool.namespaces.takeover import take_over
from pdserve.kvpool.protocol.cluster_messages import NamespaceRecord


def of(*names: str, incarnation: int = 1, **geometry: str) -> Namespaces:
    made = Namespaces(incarnation)
    for name in names:
        record = NamespaceRecord(name, 1, 1, geometry)
        made.registry.learn(record)
        made.add(record)
    return made


def test_a_reboot_takes_the_newest_list_and_its_spaces() -> None:
    made = of("a")
    older = made.dump()
    made.clear(1)
    newer = made.dump()
    for saved in permutations([older, newer, None]):
        taken = take_over(Namespaces(2), saved)
        assert taken.namespaces.tier_spaces == made.tier_spaces
        assert taken.problems == []
        assert taken.namespaces.revision >= made.revision


def test_of_two_lists_that_know_nothing_of_each_other_the_later_start_counts() -> None:
    """The tier with the older one was away, and had been written more often."""
    older, later = of("a"), of("a", incarnation=2)
    older.begin_sequences(1_000_000)
    for _ in range(100):
        older_list = older.dump()
    later.begin_sequences(2_000_000)
    for saved in permutations([older_list, later.dump()]):
        assert take_over(Namespaces(3), saved).namespaces.tier_spaces == later.tier_spaces


def test_a_list_that_cannot_be_read_is_a_problem_and_no_more() -> None:
    taken = take_over(of("a"), ["{", None])
    assert len(taken.problems) == 1
    assert [namespace.name for namespace in taken.namespaces] == ["a"]


def test_memory_counts_and_a_tier_that_was_away_has_no_word() -> None:
    """Another list began while the tier was away, and the memory was lost before that."""
    away = of("a", "b", "c")
    for _ in range(5):
        text = away.dump()
    memory = of("a", incarnation=2)
    spaces = memory.tier_spaces
    assert take_over(memory, [text]).namespaces.tier_spaces == spaces
    assert spaces.isdisjoint(away.tier_spaces)


def test_where_memorys_list_was_not_saved_pages_in_tiers_count_as_far_as_the_tiers_list_agrees() -> None:
    made = of("a", "b")
    in_memory = made.dump()
    a, b = made[1].tier_space, made[2].tier_space
    made.clear(2)
    in_tier = made.dump()
    taken = take_over(Namespaces.load(in_memory, 2), [in_tier])
    assert taken.namespaces[1].tier_space == a
    assert taken.namespaces[2].tier_space not in (b, made[2].tier_space)
    assert taken.namespaces.numbers_of_spaces == {1: 1, 2: 2}, "the rows are as memory's list says"
    again = Namespaces.load(taken.namespaces.dump(), 3)
    assert again.tier_spaces == taken.namespaces.tier_spaces
    assert again.revision > made.revision


def test_no_number_and_no_sequence_is_given_out_that_memory_or_a_tier_may_have_seen() -> None:
    lists = [of("a"), of("a", "b", "c"), of("a")]
    for now_us, one in zip((5, 3, 4), lists, strict=True):
        one.begin_sequences(now_us)
    for memory, *tiers in permutations([one.dump() for one in lists]):
        found = take_over(Namespaces.load(memory), tiers).namespaces
        assert found.next_number == 4
        assert found.begin_sequences(0) == 5 + SEQUENCES
