"""Which of a tier's namespaces a node believes at a start."""

from __future__ import annotations

from itertools import permutations

import pytest

from pdserve.kvpool.namespaces.catalog import SEQUENCES, Namespaces
from pdserve.kvpool.namespaces.takeover import take_over
from pdserve.kvpool.protocol.cluster_messages import NamespaceRecord


def of(*names: str, **geometry: str) -> Namespaces:
    made = Namespaces()
    for name in names:
        record = NamespaceRecord(name, 1, 1, geometry)
        made.registry.learn(record)
        made.add(record)
    return made


def test_a_reboot_takes_the_newest_list() -> None:
    found, believed, problems = take_over(Namespaces(), [of("a").dump(), of("a", "b").dump(), None])
    assert [namespace.name for namespace in found] == ["a", "b"]
    assert (believed, problems) == ([{1}, {1, 2}, set()], [])


@pytest.mark.parametrize("change", ["name", "geometry", "clear"])
def test_a_number_that_meant_something_else_when_the_tier_was_in_use_is_not_believed(change: str) -> None:
    memory = of("a", "c" if change == "name" else "b", **({"g": "2"} if change == "geometry" else {}))
    if change == "clear":
        memory.clear(2)
    _, [believed], _ = take_over(memory, [of("a", "b").dump()])
    assert believed == (set() if change == "geometry" else {1})


def test_no_number_is_given_out_that_a_tier_has_seen() -> None:
    found, _, _ = take_over(of("a"), [of("a", "b", "c").dump()])
    assert found.next_number == 4


def test_no_sequence_is_given_out_that_memory_or_a_tier_may_have_seen() -> None:
    lists = [of("a"), of("a", "b"), of("a")]
    for now_us, one in zip((5, 3, 4), lists, strict=True):
        one.begin_sequences(now_us)
    for memory, *tiers in permutations([one.dump() for one in lists]):
        found, _, _ = take_over(Namespaces.load(memory), tiers)
        assert found.begin_sequences(0) == 5 + SEQUENCES
