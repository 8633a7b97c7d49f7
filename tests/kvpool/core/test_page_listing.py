"""`ListPages`: every committed page once, whatever the limit, while others come and go."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kvpool.core import lookups
from pdserve.kvpool.core.events import PagesFound
from pdserve.kvpool.core.tiering.tier_index import TierSpec
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import ListPages, PageEntry, PageList
from pdserve.kvpool.tiers.base import TierPage
from tests.support.kvpool.node_model import KIB, Node, key


def listed(node: Node, connection: int, name: str, limit: int) -> list[PageEntry]:
    pages: list[PageEntry] = []
    cursor = 0
    for _ in range(1000):
        reply = node.ask(connection, ListPages(node.next_id(), name, cursor, limit), PageList)
        assert len(reply.pages) <= limit
        pages += reply.pages
        cursor = reply.cursor
        if not cursor:
            return pages
    raise AssertionError("the listing does not end")


PAGES = st.sets(st.integers(0, 60))


@settings(deadline=None)
@given(PAGES, PAGES, PAGES, st.integers(1, 70), st.integers(1, 9))
def test_every_page_is_listed_once_with_its_place_whatever_the_limit(
    first: set[int], second: set[int], below: set[int], limit: int, scan: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookups, "SCAN_SLOTS", scan)
        node = Node(slabs=8, tiers=[TierSpec("ssd:/a", "ssd", 1 << 30)])
        c = node.connect()
        spaces = {name: node.open(c, name) for name in ("a", "b")}
        for name, keys in (("a", first), ("b", second)):
            if keys:
                node.put(c, spaces[name], *keys)
        space = node.state.namespaces[spaces["a"]].space
        pages = tuple(TierPage(space, key(k), 8 * KIB, 0, 1) for k in below)
        node.do(PagesFound(0, pages, 0, last=True))
        tier = {key(k): (8 * KIB, "ssd:/a", 0) for k in below}
        for name, keys, in_tier in (("a", first, tier), ("b", second, {})):
            found = listed(node, c, name, limit)
            in_memory = {key(k): (4 * KIB, "dram", 0) for k in keys}
            assert {
                page.key: (page.length_bytes, page.place, page.pins) for page in found
            } == in_tier | in_memory
            assert len(found) == len(in_tier | in_memory)


def test_pages_that_go_during_the_listing_neither_end_nor_repeat_it() -> None:
    node = Node()
    c = node.connect()
    ns = node.open(c, "a")
    node.put(c, ns, *range(20))
    first = node.ask(c, ListPages(1, "a", 0, 8), PageList)
    gone = first.pages[0].key
    node.send(c, m.Discard(2, ns, [gone], [0]))
    node.ask(c, m.Clear(3, ns), m.Done)
    node.put(c, ns, 100)
    rest = node.ask(c, ListPages(4, "a", first.cursor, 50), PageList)
    assert rest.cursor == 0
    assert not {page.key for page in rest.pages} & {page.key for page in first.pages}


def test_pins_and_pages_being_written_are_told_apart() -> None:
    node = Node()
    c = node.connect()
    ns = node.open(c, "a")
    node.put(c, ns, 1, 2)
    node.get(c, ns, 2)
    node.reserve(c, ns, 3)
    assert {page.key: page.pins for page in listed(node, c, "a", 10)} == {key(1): 0, key(2): 1}


def test_lists_of_keys_go_with_their_listing_or_their_client() -> None:
    node = Node(slabs=8, tiers=[TierSpec("ssd:/a", "ssd", 1 << 30)])
    one, other = node.connect(), node.connect()
    ns = node.open(one, "a")
    node.open(other, "a")
    node.do(
        PagesFound(
            0,
            tuple(TierPage(node.state.namespaces[ns].space, key(k), 8 * KIB, 0, 1) for k in range(9)),
            0,
            last=True,
        )
    )
    kept = node.state._listing._tier_keys
    listed(node, one, "a", 4)
    assert not kept
    begun = node.ask(other, ListPages(1, "a", 0, 4), PageList)
    node.ask(other, ListPages(2, "a", begun.cursor, 4), PageList)
    assert kept
    node.disconnect(other)
    assert not kept


def test_a_namespace_that_is_not_there_is_named() -> None:
    node = Node()
    c = node.connect()
    fault = node.ask(c, ListPages(1, "nobody", 0, 10), m.Fault)
    assert (fault.code, fault.id) == ("unknown_namespace", 1)
    assert "nobody" in fault.message


@pytest.mark.parametrize("cursor", [-1, 1 << 62])
def test_a_cursor_from_nowhere_ends_the_listing(cursor: int) -> None:
    node = Node()
    c = node.connect()
    node.put(c, node.open(c, "a"), *range(64))  # every slot there is
    assert node.ask(c, ListPages(1, "a", cursor, 10), PageList) == PageList(1, [], 0)
