"""The formats of a node's events, decoded as their readers do."""

from __future__ import annotations

import msgspec

from pdserve.kvpool.protocol.kv_events import MEDIUM, Blocks, Objects, Told, block_hash, object_key
from pdserve.pages import page_hashes

PAGES = page_hashes(range(256), 64)


def told(place: str, *pages: int, namespace: str = "m@1") -> list[Told]:
    return [Told(namespace, 64, PAGES[page], place) for page in pages]


def test_neighbours_of_one_place_and_namespace_are_one_event() -> None:
    pages = [*told("dram", 0, 1), *told("", 0), *told("ssd", 2), *told("ssd", 3, namespace="m@2")]
    time_s, events, rank = msgspec.msgpack.decode(Blocks().batch(pages, 12.5))
    assert (time_s, rank) == (12.5, 0)
    assert [(one["type"], one["block_hashes"], one.get("tier"), one["namespace"]) for one in events] == [
        ("BlockStored", [block_hash(PAGES[0]), block_hash(PAGES[1])], "dram", "m@1"),
        ("BlockRemoved", [block_hash(PAGES[0])], None, "m@1"),
        ("BlockStored", [block_hash(PAGES[2])], "ssd", "m@1"),
        ("BlockStored", [block_hash(PAGES[3])], "ssd", "m@2"),
    ]
    assert {one["medium"] for one in events} == {MEDIUM}
    assert events[0]["token_ids"] == []
    assert events[0]["block_size"] == 64


def test_all_that_was_told_can_be_made_void() -> None:
    assert msgspec.msgpack.decode(Blocks().void(1.0)) == [1.0, [{"type": "AllBlocksCleared"}], 0]
    assert Objects().void(1.0) is None


class MooncakeObjectEvent(msgspec.Struct):
    """As Dynamo 1.6.1 reads it (`lib/llm/src/kv_router/shared_cache.rs`)."""

    event_type: str
    object_key: str | None = None
    tenant_id: str = ""
    group_id: str | None = None


def test_objects_are_read_as_dynamo_reads_mooncakes_events() -> None:
    batch = Objects().batch([*told("dram", 0), *told("", 1)], 12.5)
    # whole milliseconds, and a rank: its decoder is strict
    reader = msgspec.msgpack.Decoder(tuple[int, list[MooncakeObjectEvent], int], strict=True)
    time_ms, [stored, removed], rank = reader.decode(batch)
    assert (time_ms, rank) == (12500, 0)
    assert (stored.event_type, removed.event_type) == ("stored", "removed")
    assert stored.object_key == object_key("m@1", PAGES[0]) == f"m@1_{PAGES[0].hex()}__k"
    assert stored.tenant_id == "default"  # of others it takes no notice
