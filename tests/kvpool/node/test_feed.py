"""What is told to whom, and when: a feed with a loop, a node's state and sockets that are made up."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from pdserve.kvpool.core.events import PagesMoved
from pdserve.kvpool.namespaces.catalog import Namespaces
from pdserve.kvpool.node import events as module
from pdserve.kvpool.node.config import EventsConfig
from pdserve.kvpool.node.events import LISTED_PAGES, EventFeed
from pdserve.kvpool.protocol.cluster_messages import NamespaceRecord, PageEntry
from pdserve.kvpool.protocol.kv_events import block_hash
from tests.support.kvpool.node_model import key
from tests.support.virtual_time import virtually

ADDRESS = "ipc:///nowhere"


class State:
    """Pages by the number of their namespace."""

    def __init__(self, *names: str) -> None:
        self.namespaces = Namespaces()
        self.pages: dict[int, dict[bytes, str]] = {}
        for name in names:
            number = self.namespaces.add(NamespaceRecord(name, 1, 1, {"page_size": "64"})).number
            self.pages[number] = {}

    def list_pages(self, namespace: int, cursor: int, limit: int) -> tuple[list[PageEntry], int]:
        found = list(self.pages[namespace].items())
        entries = [PageEntry(one, 1, place) for one, place in found[cursor : cursor + limit]]
        end = cursor + limit
        return entries, end if end < len(found) else 0


class Sink:
    """Notes what is sent; None for a gap."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.subscribed = False

    def send(self, payload: bytes) -> None:
        self.sent += msgspec.msgpack.decode(payload)[1]

    def skip(self) -> None:
        self.sent.append(None)

    def step(self) -> bool:
        subscribed, self.subscribed = self.subscribed, False
        return subscribed

    def close(self) -> None: ...


def make(state: State, sink: Sink, guarded: set[int] | None = None, **options: Any) -> EventFeed:
    config = EventsConfig(address=ADDRESS, **options)
    return EventFeed(config, asyncio.get_running_loop(), state, guarded or set(), sink, lambda: 1.0)


def known(sink: Sink, after: int = 0) -> dict[int, str]:
    """Blocks and tiers, as a subscriber has them that began there."""
    blocks: dict[int, str] = {}
    for event in sink.sent[after:]:
        if event["type"] == "AllBlocksCleared":
            blocks.clear()
        for block in event.get("block_hashes", ()):
            if event["type"] == "BlockStored":
                blocks[block] = event["tier"]
            else:
                blocks.pop(block, None)
    return blocks


def wanted(state: State) -> dict[int, str]:
    return {
        block_hash(one): place.partition(":")[0]
        for pages in state.pages.values()
        for one, place in pages.items()
    }


def change(state: State, feed: EventFeed, number: int, *pages: int, place: str = "dram") -> None:
    for page in pages:
        if place:
            state.pages[number][key(page)] = place
        else:
            del state.pages[number][key(page)]
    feed.moved(PagesMoved(number, [key(page) for page in pages], [place] * len(pages)))


@virtually
async def test_who_subscribes_hears_of_all_pages_whenever_he_comes() -> None:
    state, sink = State("a", "b"), Sink()
    feed = make(state, sink)
    change(state, feed, 1, *range(2 * LISTED_PAGES + 3))
    change(state, feed, 2, 5000)
    await asyncio.sleep(1)
    begun, sink.subscribed = len(sink.sent), True
    await asyncio.sleep(module.TICK_S * 1.5)
    change(state, feed, 1, 7, place="")  # while all pages are told
    change(state, feed, 1, 9999)
    await asyncio.sleep(2)
    assert known(sink, begun) == wanted(state)
    told = len(sink.sent)
    await asyncio.sleep(20)
    assert len(sink.sent) == told  # once is enough
    feed.close()


@virtually
async def test_who_comes_while_all_pages_are_told_hears_of_them_too() -> None:
    state, sink = State("a"), Sink()
    feed = make(state, sink)
    change(state, feed, 1, *range(4 * LISTED_PAGES))
    sink.subscribed = True
    await asyncio.sleep(module.TICK_S + module.BUSY_TICK_S * 2.5)
    begun, sink.subscribed = len(sink.sent), True
    await asyncio.sleep(2 * module.RELIST_S)
    assert known(sink, begun) == wanted(state)
    feed.close()


@virtually
async def test_namespaces_with_tokens_are_told_only_where_they_are_named() -> None:
    for names, expected in (([], {2}), (["a"], {1}), (["a", "b"], {1, 2})):
        state, sink = State("a", "b"), Sink()
        feed = make(state, sink, guarded={1}, namespaces=names)
        change(state, feed, 1, 1)
        change(state, feed, 2, 2)
        await asyncio.sleep(1)
        assert known(sink).keys() == {block_hash(key(number)) for number in expected}
        sink.subscribed, begun = True, len(sink.sent)
        await asyncio.sleep(1)
        assert known(sink, begun) == known(sink)
        feed.close()
