"""What a node remembers of pages that it removed."""

from __future__ import annotations

import itertools

import pytest

from pdserve.kvpool.core.store.index import REASONS
from pdserve.kvpool.core.store.slot_states import MIN_PLACES, RemovedPages
from pdserve.kvpool.protocol import messages as m
from tests.support.kvpool.node_model import KIB, Node, answers, key, opened


def fate(node: Node, connection: int, namespace: int, number: int) -> m.Fate:
    [answer] = answers(node.send(connection, m.Exists(9, namespace, [key(number)], True)), connection)
    assert isinstance(answer, m.Present)
    [one] = answer.fates
    return one


def remembered_beside(namespace: int, number: int) -> int:
    """A page with another place in the table: hashes, and so places, differ from process to process."""
    for other in itertools.count(number + 1):
        removed = RemovedPages(1)
        removed.note(namespace, key(number), 0, 1.0)
        removed.note(namespace, key(other), 0, 2.0)
        if removed.find(namespace, key(number)) is not None:
            return other
    raise AssertionError("unreachable")


def test_what_is_remembered_is_bounded_and_the_newest_stays() -> None:
    removed = RemovedPages(1)
    for number in range(20 * MIN_PLACES):
        removed.note(1, key(number), 0, float(number))
    known = [number for number in range(20 * MIN_PLACES) if removed.find(1, key(number)) is not None]
    assert len(known) <= MIN_PLACES
    assert 20 * MIN_PLACES - 1 in known


def test_a_page_that_is_there_has_an_age_and_one_that_never_was_has_no_fate() -> None:
    node, c, ns = opened()
    node.put(c, ns, 1)
    node.now_s += 3.0
    assert fate(node, c, ns, 1) == m.Fate(3.0)
    assert fate(node, c, ns, 2) == m.Fate()


def test_an_evicted_page_is_told_with_its_reason_also_once_it_is_back() -> None:
    node, c, ns = opened(slabs=1, slab_bytes=8 * KIB)
    second = remembered_beside(ns, 1)
    node.put(c, ns, 1, second)
    node.put(c, ns, second + 1)  # evicts 1
    node.now_s += 2.0
    assert fate(node, c, ns, 1) == m.Fate(None, "capacity", 2.0)
    node.put(c, ns, 1)  # evicts the second
    node.now_s += 1.0
    assert fate(node, c, ns, 1) == m.Fate(1.0, "capacity", 3.0)


def test_fates_are_told_to_those_who_ask_and_of_so_many_keys_only() -> None:
    node, c, ns = opened()
    keys = [key(number) for number in range(m.MAX_FATES + 1)]
    [plain] = answers(node.send(c, m.Exists(9, ns, keys)), c)
    [asked] = answers(node.send(c, m.Exists(9, ns, keys, True)), c)
    assert isinstance(plain, m.Present)
    assert isinstance(asked, m.Present)
    assert (plain.fates, len(asked.fates)) == ([], m.MAX_FATES)


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_has_a_word_for_people(reason: str) -> None:
    from pdserve.prefill.missed_pages import REASONS as WORDS

    assert WORDS[reason]
