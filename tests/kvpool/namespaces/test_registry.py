"""What nodes agree on, whatever they hear in whatever order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.kvpool.namespaces import registry as registry_module
from pdserve.kvpool.namespaces.registry import (
    FORGET_MS,
    MAX_GEOMETRY_CHARS,
    MAX_NAME_CHARS,
    MAX_NAMESPACES,
    NamespaceError,
    Registry,
    check_geometry,
    check_name,
    join,
)
from pdserve.kvpool.protocol.cluster_messages import NamespaceRecord, NamespaceSettings

RECORDS = st.builds(
    NamespaceRecord,
    st.sampled_from("ab"),
    st.integers(1, 3),
    st.integers(1, 3),
    st.dictionaries(st.sampled_from("xy"), st.sampled_from("12"), max_size=2),
    st.builds(NamespaceSettings, quota_bytes=st.integers(0, 2)),
    st.booleans(),
    st.sampled_from(["", "b"]),
    st.dictionaries(st.sampled_from(["", "n0"]), st.integers(1, 3)),
)


@given(st.lists(RECORDS, max_size=8), st.randoms(use_true_random=False))
def test_all_orders_and_repetitions_lead_to_the_same_records(records: list[NamespaceRecord], random) -> None:  # type: ignore[no-untyped-def]
    other = records + [record for record in records if random.random() < 0.5]
    random.shuffle(other)
    assert {r.name: r for r in Registry(records)} == {r.name: r for r in Registry(other)}


@given(RECORDS, RECORDS, RECORDS)
def test_join_is_commutative_associative_and_idempotent(
    a: NamespaceRecord, b: NamespaceRecord, c: NamespaceRecord
) -> None:
    assert join(a, b) == join(b, a)
    assert join(a, join(b, c)) == join(join(a, b), c)
    assert join(a, a) == a


@given(RECORDS, RECORDS)
def test_a_generation_never_goes_back(a: NamespaceRecord, b: NamespaceRecord) -> None:
    assert join(a, b).generation == max(a.generation, b.generation)
    assert join(a, b).version == max(a.version, b.version)
    for node in {*a.voided, *b.voided}:
        assert join(a, b).voided[node] == max(a.voided.get(node, 0), b.voided.get(node, 0))


def test_a_drop_wins_over_another_change_of_the_same_version() -> None:
    before = NamespaceRecord("a", 1, 1, {"k": "v"})
    changed = NamespaceRecord("a", 2, 1, {"k": "v"}, NamespaceSettings(weight=9))
    dropped = NamespaceRecord("a", 2, 2, {}, dropped=True)
    assert join(join(before, changed), dropped) == dropped
    later = NamespaceRecord("a", 3, 1, {"k": "v"}, NamespaceSettings(weight=8))
    assert join(later, dropped).generation == 2  # it lives, its pages do not


def test_only_news_is_reported() -> None:
    registry = Registry()
    record = NamespaceRecord("a", 2, 1, {})
    assert registry.learn(record) == record
    assert registry.learn(record) is None
    assert registry.learn(NamespaceRecord("a", 1, 1, {})) is None


def dropped(name: str, version: int, **fields: Any) -> NamespaceRecord:
    return NamespaceRecord(name, version, 2, {}, dropped=True, **fields)


def test_tombstones_are_forgotten_in_time_and_not_learned_again_but_those_of_protected_names() -> None:
    guarded = dropped("guarded", 5, settings=NamespaceSettings(read_token="ab" * 32))
    registry = Registry([dropped("old", 5), dropped("new", 1000), guarded])
    lives = NamespaceRecord("lives", 1, 1, {})
    registry.learn(lives)
    registry.expire(FORGET_MS + 6)
    assert {record.name for record in registry} == {"new", "guarded", "lives"}
    assert registry.learn(dropped("old", 5)) is None
    assert Registry(registry).digest == registry.digest != Registry([lives]).digest


def test_a_change_is_newer_than_all_before_whatever_the_clock_says() -> None:
    registry = Registry([dropped("a", 1000)])
    known = registry.get("a")
    assert known is not None
    assert registry.changed(known, dropped=False).version == 1001
    registry.now_ms = 5000
    assert registry.changed(known).version == 5000
    assert registry.dropped(known).generation == 3


def test_a_namespace_whose_tombstone_is_forgotten_has_a_generation_that_never_was() -> None:
    registry = Registry()
    registry.change(registry.changed(registry.fresh("a", NamespaceSettings())))
    for _ in range(100):
        known = registry.get("a")
        assert known is not None
        registry.change(registry.dropped(known))
    last = registry.get("a")
    assert last is not None
    registry.expire(last.version + FORGET_MS + 1)
    assert registry.get("a") is None
    assert registry.fresh("a", NamespaceSettings()).generation > last.generation


def test_tombstones_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_TOMBSTONES", 10)
    tombstones = [dropped(f"revision-{n}", n) for n in range(50)]
    one, other = Registry(tombstones), Registry(reversed(tombstones))
    assert {record.version for record in one} == set(range(40, 50))
    assert one.digest == other.digest


def test_the_number_of_namespaces_is_bounded_and_dropped_ones_make_room() -> None:
    registry = Registry()
    for i in range(MAX_NAMESPACES):
        registry.change(NamespaceRecord(f"n{i}", 1, 1, {}))
    with pytest.raises(NamespaceError, match="drop one"):
        registry.change(NamespaceRecord("one more", 1, 1, {}))
    registry.change(NamespaceRecord("n0", 2, 1, {}, NamespaceSettings(weight=2)))
    registry.change(NamespaceRecord("n0", 3, 2, {}, dropped=True))
    registry.change(NamespaceRecord("one more", 1, 1, {}))
    with pytest.raises(NamespaceError, match="drop one"):
        registry.change(NamespaceRecord("n0", 4, 2, {}))


def test_all_records_together_fit_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_REGISTRY_BYTES", 4096)
    registry = Registry()
    for i in range(48):
        registry.change(NamespaceRecord(f"n{i}", 1, 1, {"k": "v" * 60}))
    with pytest.raises(NamespaceError, match="drop those"):
        registry.change(NamespaceRecord("large", 1, 1, {"k": "v" * 600}))
    # what comes from other nodes was bounded there
    assert registry.learn(NamespaceRecord("far", 1, 1, {})) is not None


@pytest.mark.parametrize("name", ["", "x" * (MAX_NAME_CHARS + 1), "a\nb", " a", "a ", "a\x00"])
def test_names_that_no_table_could_show_are_refused(name: str) -> None:
    with pytest.raises(NamespaceError) as error:
        check_name(name)
    assert error.value.code == "bad_namespace"


def test_geometry_is_bounded_and_its_difference_is_named() -> None:
    with pytest.raises(NamespaceError, match="at most"):
        check_geometry("a", {}, {"k": "v" * MAX_GEOMETRY_CHARS})
    with pytest.raises(NamespaceError, match=r"dtype = bf16.*dtype = \(absent\)") as error:
        check_geometry("a", {"dtype": "bf16"}, {})
    assert error.value.code == "geometry_mismatch"
