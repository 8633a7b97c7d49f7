from __future__ import annotations

from itertools import permutations

import pytest

from pdserve.errors import FrameError
from pdserve.kvpool.namespaces.catalog import SEQUENCES, Namespaces, item_bytes, page_tokens, take_over
from pdserve.kvpool.namespaces.registry import FORGET_MS
from pdserve.kvpool.protocol.cluster_messages import NamespaceRecord, NamespaceSettings


def record(name: str, generation: int = 1, version: int = 1, **geometry: str) -> NamespaceRecord:
    return NamespaceRecord(name, version, generation, geometry)


def opened(namespaces: Namespaces, found: NamespaceRecord) -> int:
    namespaces.registry.learn(found)
    return namespaces.add(found).number


def spaces(namespaces: Namespaces) -> set[int]:
    return set(namespaces.numbers_of_spaces)


def of(*names: str, incarnation: int = 1) -> Namespaces:
    made = Namespaces(incarnation)
    for name in names:
        opened(made, record(name))
    return made


def test_spaces_survive_a_restart_and_are_never_reused() -> None:
    first = of("a", "b")
    before = spaces(first)
    first.drop("b")
    again = Namespaces.load(first.dump(), 2)
    assert spaces(again) == spaces(first) < before
    opened(again, record("c"))
    assert not spaces(again) & (before - spaces(first))
    assert spaces(Namespaces.load(again.dump(), 3)) == spaces(again)


def test_a_cleared_namespace_keeps_its_number_and_gets_a_space_that_never_was() -> None:
    first = of("a")
    before = spaces(first)
    assert first.clear(1) not in before
    assert first.numbers == [1]
    again = Namespaces.load(first.dump(), 2)
    assert spaces(again) == spaces(first)
    assert not {again.clear(1)} & (before | spaces(first))


def test_a_reboot_takes_the_newest_list_and_its_spaces() -> None:
    made = of("a")
    older = made.dump()
    made.clear(1)
    for saved in permutations([older, made.dump(), None]):
        taken, problems = take_over(Namespaces(2), saved)
        assert spaces(taken) == spaces(made)
        assert not problems


def test_of_two_lists_that_know_nothing_of_each_other_the_later_start_counts() -> None:
    """The tier with the older one was away, and had been written more often."""
    older, later = of("a"), of("a", incarnation=2)
    older.begin_sequences(1_000_000)
    for _ in range(100):
        older_list = older.dump()
    later.begin_sequences(2_000_000)
    for saved in permutations([older_list, later.dump()]):
        assert spaces(take_over(Namespaces(3), saved)[0]) == spaces(later)


def test_a_list_that_cannot_be_read_is_a_problem_and_no_more() -> None:
    taken, problems = take_over(of("a"), ["{", None])
    assert len(problems) == 1
    assert [namespace.name for namespace in taken] == ["a"]


def test_memory_counts_and_a_tier_of_another_history_has_no_word() -> None:
    away = of("a", "b", "c")
    for _ in range(5):
        text = away.dump()
    memory = of("a", incarnation=2)
    memory.dump()
    assert take_over(memory, [text])[0] is memory
    assert spaces(memory).isdisjoint(spaces(away))


def test_where_memorys_list_was_not_saved_the_newer_one_of_a_tier_counts() -> None:
    made = of("a", "b")
    in_memory = made.dump()
    made.clear(2)
    taken, _ = take_over(Namespaces.load(in_memory, 2), [made.dump()])
    assert spaces(taken) == spaces(made)
    again = Namespaces.load(taken.dump(), 3)
    assert again.revision > made.revision


def test_a_node_that_was_away_for_longer_than_tombstones_last_takes_protected_names_only() -> None:
    """It may have missed that they were dropped; what is dropped must not come back."""
    made = of("a")
    made.configured = {"a": NamespaceSettings()}
    opened(made, NamespaceRecord("guarded", 1, 1, {}, NamespaceSettings(read_token="ab" * 32)))
    made.registry.now_ms = 1_000_000
    saved_us = 1000 * made.registry.now_ms
    text = made.dump()
    for late_us, known in ((0, {"a", "guarded"}), (1, {"guarded"})):
        now_us = saved_us + 1000 * FORGET_MS + late_us
        taken, _ = take_over(Namespaces.load(text), [None], now_us)
        assert {record.name for record in taken.registry} == known
        assert bool(taken.configured) == bool(spaces(taken)) == ("a" in known)


def test_no_sequence_is_given_out_that_memory_or_a_tier_may_have_seen() -> None:
    lists = [of("a"), of("a", "b", "c"), of("a")]
    for now_us, one in zip((5, 3, 4), lists, strict=True):
        one.begin_sequences(now_us)
    for memory, *tiers in permutations([one.dump() for one in lists]):
        assert take_over(Namespaces.load(memory), tiers)[0].begin_sequences(0) == 5 + SEQUENCES


def test_a_start_with_an_earlier_clock_gives_out_no_sequence_of_before() -> None:
    first = Namespaces()
    assert first.begin_sequences(1_000_000) == 1_000_000
    again = Namespaces.load(first.dump())
    assert again.begin_sequences(10) == 1_000_000 + SEQUENCES
    assert Namespaces.load(again.dump()).begin_sequences(1 << 60) == 1 << 60


def test_records_and_what_the_configuration_said_survive_a_restart() -> None:
    first = Namespaces()
    settings = NamespaceSettings(quota_bytes=1 << 20, read_token="ab" * 32)
    gone = NamespaceRecord("old", 4, 2, {}, dropped=True, replaced_by="new")
    first.registry.learn(NamespaceRecord("new", 2, 1, {"k": "v"}, settings))
    first.registry.learn(gone)
    first.configured = {"new": settings}
    again = Namespaces.load(first.dump())
    assert list(again.registry) == list(first.registry)
    assert again.configured == {"new": settings}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"revision":1}', '{"revision":"x","namespaces":[]}'])
def test_a_damaged_file_is_refused(text: str) -> None:
    with pytest.raises(FrameError):
        Namespaces.load(text)


def test_pages_of_an_older_generation_do_not_come_back_with_the_file() -> None:
    namespaces = Namespaces()
    opened(namespaces, record("a"))
    opened(namespaces, record("b"))
    namespaces.registry.learn(record("a", generation=2, version=2))
    again = Namespaces.load(namespaces.dump())
    assert [namespace.name for namespace in again] == ["b"]


@pytest.mark.parametrize(
    ("geometry", "item", "tokens"),
    [
        ({"dtype": "bfloat16", "page_size": "64"}, 2, 64),
        ({"dtype": "float32", "kv_dtype": "auto"}, 4, 0),
        ({"dtype": "float32", "kv_dtype": "float8_e4m3fn"}, 1, 0),
        ({"dtype": "float" + "9" * 5000, "page_size": "9" * 5000}, 1, 0),
        ({"dtype": "int" + "9" * 20, "page_size": "9" * 25}, 1, 0),
        ({"dtype": "float160", "page_size": "٣٣"}, 1, 0),
        ({"dtype": "float0", "page_size": "-1"}, 1, 0),
    ],
)
def test_a_number_in_a_geometry_counts_only_where_it_can_be_one(
    geometry: dict[str, str], item: int, tokens: int
) -> None:
    assert item_bytes(geometry) == item
    assert page_tokens(geometry) == tokens
