from __future__ import annotations

import pytest

from pdserve.errors import FrameError
from pdserve.kvpool.namespaces.catalog import SEQUENCES, Namespaces, item_bytes, page_tokens
from pdserve.kvpool.protocol.cluster_messages import NamespaceRecord, NamespaceSettings


def record(name: str, generation: int = 1, version: int = 1, **geometry: str) -> NamespaceRecord:
    return NamespaceRecord(name, version, generation, geometry)


def opened(namespaces: Namespaces, found: NamespaceRecord) -> int:
    namespaces.registry.learn(found)
    return namespaces.add(found).number


def test_numbers_survive_a_restart_and_are_never_reused() -> None:
    first = Namespaces()
    a = opened(first, record("a", dtype="bf16"))
    b = opened(first, record("b"))
    first.drop("b")
    again = Namespaces.load(first.dump())
    assert again.numbers_of_spaces == {a: a}
    assert again[a].geometry == {"dtype": "bf16"}
    assert again.add(record("b")).number > b
    assert Namespaces.load(again.dump()).numbers_of_spaces == again.numbers_of_spaces


def test_a_cleared_namespace_keeps_its_number_and_never_gets_a_space_of_before() -> None:
    first = Namespaces()
    a = opened(first, record("a"))
    spaces = {a, first.clear(a)}
    again = Namespaces.load(first.dump())
    assert again.numbers_of_spaces == {max(spaces): a}
    assert {again.clear(a), opened(again, record("b"))}.isdisjoint(spaces)


def test_a_space_in_tiers_is_of_one_start_and_is_kept_through_others() -> None:
    """Also where the list was lost, and numbers begin again."""
    record_a = record("a")
    first, lost = Namespaces(5), Namespaces(6)
    a, other = opened(first, record_a), opened(lost, record_a)
    assert a == other
    assert first.tier_spaces.isdisjoint(lost.tier_spaces)
    again = Namespaces.load(first.dump(), 7)
    assert again.tier_spaces == first.tier_spaces
    again.clear(a)
    assert again.tier_spaces.isdisjoint(first.tier_spaces)
    cleared = again.tier_spaces
    again.void_tiers(a)
    assert Namespaces.load(again.dump(), 8).tier_spaces == cleared, "it is of this start already"
    later = Namespaces.load(again.dump(), 8)
    later.void_tiers(a)
    assert later.tier_spaces.isdisjoint(cleared)
    assert later.numbers_of_spaces == again.numbers_of_spaces


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


@pytest.mark.parametrize("text", ["", "{", "[]", '{"next_number":1}', '{"next_number":"x","namespaces":[]}'])
def test_a_damaged_file_is_refused(text: str) -> None:
    with pytest.raises(FrameError):
        Namespaces.load(text)


def test_a_file_of_before_there_were_records_is_taken_over_and_its_numbers_are_not_reused() -> None:
    found = Namespaces.load('{"next_number":1,"namespaces":[{"number":7,"name":"a","geometry":{"k":"v"}}]}')
    assert found.numbers == [7]
    assert found.registry.get("a") == record("a", k="v")
    assert found.add(record("b")).number == 8


def test_pages_of_an_older_generation_do_not_come_back_with_the_file() -> None:
    namespaces = Namespaces()
    number = opened(namespaces, record("a"))
    opened(namespaces, record("b"))
    namespaces.registry.learn(record("a", generation=2, version=2))
    again = Namespaces.load(namespaces.dump())
    assert number not in again
    assert [namespace.name for namespace in again] == ["b"]


def test_dropping_what_is_not_there_is_nothing() -> None:
    assert Namespaces().drop("x") is None


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
