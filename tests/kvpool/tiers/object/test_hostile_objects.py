"""Objects in the bucket that no tier put there, or that somebody changed: they cost pages at most."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdserve.kvpool.tiers.base import CORRUPT, GONE, LOADED, READ_FAILED, STORED, TierPage
from pdserve.kvpool.tiers.object.inventory import SegmentObject, parse_object
from pdserve.kvpool.tiers.page_codec import ZSTD
from pdserve.kvpool.tiers.ssd.segment_format import (
    BLOCK_BYTES,
    MAX_NUMBER,
    MAX_SEGMENT_BYTES,
    Record,
    SegmentHeader,
    encode_footer,
    encode_segment_header,
)
from tests.support.kvpool.object_server import ObjectServer
from tests.support.kvpool.object_tiers import BUCKET, LENGTH, MakeNode, Node
from tests.support.kvpool.tier_tools import key

COUNT = 5
MINE = f"{1:016x}" * 2
OTHER = f"{2:016x}" * 2


@pytest.fixture
def make(store: ObjectServer, nodes: MakeNode) -> Callable[[str], Node]:
    """Makes a node above the store, by name."""
    return lambda name: nodes(name, store.endpoint, f"s3://{BUCKET}")


@pytest.fixture
def name(store: ObjectServer, make: Callable[[str], Node]) -> str:
    """The name of an object with `COUNT` pages of namespace 1."""
    writer = make("writer")
    writer.open()
    assert writer.put(*range(COUNT)) == [STORED] * COUNT
    writer.until_uploaded()
    writer.tier.close()
    [found] = store.objects
    return found


def moved(name: str, **changes: object) -> str:
    one = parse_object(name.removeprefix(f"{BUCKET}/"), 1 << 20)
    assert one is not None
    fields = {"namespace": one.namespace, "number": one.number, "nonce": one.nonce, "size_bytes": 1 << 20}
    return f"{BUCKET}/{SegmentObject(**{**fields, **changes}).name}"  # type: ignore[arg-type]


def test_a_segment_of_one_namespace_is_none_of_another(
    store: ObjectServer, make: Callable[[str], Node], name: str
) -> None:
    """Their pages may have the same keys."""
    store.objects[moved(name, namespace=OTHER)] = store.objects[name]
    node = make("reader")
    assert {found.space for found in node.open(known=(1, 2))} == {1}
    assert node.read(*range(COUNT), space=2) == [GONE] * COUNT


@pytest.mark.parametrize("changes", [{"number": 5}, {"nonce": 5}])
def test_a_segment_under_another_name_is_left_alone(
    store: ObjectServer, make: Callable[[str], Node], name: str, changes: dict[str, object]
) -> None:
    store.objects[moved(name, **changes)] = store.objects.pop(name)
    node = make("reader")
    assert node.open() == []
    assert len(store.objects) == 1
    assert node.put(1) == [STORED]


@pytest.mark.parametrize(
    "other",
    [
        "pages/x.seg",
        f"pages/{MINE}/x.seg",
        f"pages/{MINE}/{MAX_NUMBER:016x}-{1:016x}.seg",
        f"pages/{MINE}/{'f' * 16}-{1:016x}.seg",
        f"pages/{MINE}/{1:016x}-{1:016x}.seg.tmp",
        "mine",
    ],
)
def test_what_has_no_segments_name_is_left_alone(
    store: ObjectServer, make: Callable[[str], Node], name: str, other: str
) -> None:
    store.objects[f"{BUCKET}/{other}"] = store.objects[name]
    node = make("reader")
    assert len(node.open()) == COUNT
    node.tier.forget_space(1)
    node.until(lambda: name not in store.objects)
    assert f"{BUCKET}/{other}" in store.objects


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES, MAX_SEGMENT_BYTES + BLOCK_BYTES])
def test_an_object_of_an_impossible_size_is_no_segment(size: int) -> None:
    assert parse_object(SegmentObject(MINE, 1, 1, size).name, size) is None


def test_a_footer_of_records_that_are_not_there_gives_misses(
    store: ObjectServer, make: Callable[[str], Node]
) -> None:
    """Whoever can write to the bucket can make guards."""
    pages = [Record(1 + 4 * n, TierPage(1, key(n), LENGTH, 0, 1)) for n in range(2)]
    content = encode_segment_header(SegmentHeader(5, 1)) + bytes(8 * BLOCK_BYTES) + encode_footer(pages, 9, 1)
    store.objects[f"{BUCKET}/{SegmentObject(MINE, 5, 1, len(content)).name}"] = content
    node = make("reader")
    assert len(node.open()) == 2
    assert node.read(0, 1) == [CORRUPT, CORRUPT]


def test_two_records_whose_places_are_exchanged_are_misses(
    store: ObjectServer, make: Callable[[str], Node], name: str
) -> None:
    content = bytearray(store.objects[name])
    size = BLOCK_BYTES + LENGTH
    first, second = content[BLOCK_BYTES : BLOCK_BYTES + size], content[BLOCK_BYTES + size :][:size]
    content[BLOCK_BYTES : BLOCK_BYTES + 2 * size] = second + first
    store.objects[name] = bytes(content)
    node = make("reader")
    node.open()
    assert node.read(*range(COUNT)) == [CORRUPT, CORRUPT, *[LOADED] * (COUNT - 2)]


@pytest.mark.parametrize("at", [0, 20, 45, 70, 95])
def test_a_wrong_byte_anywhere_is_a_miss(
    store: ObjectServer, make: Callable[[str], Node], name: str, at: int
) -> None:
    content = bytearray(store.objects[name])
    content[at * len(content) // 96] ^= 0x10
    store.objects[name] = bytes(content)
    node = make("reader")
    node.open()
    assert set(node.read(*range(COUNT))) <= {LOADED, CORRUPT, GONE}


def test_an_object_that_became_shorter_is_a_miss(
    store: ObjectServer, make: Callable[[str], Node], name: str
) -> None:
    node = make("reader")
    assert len(node.open()) == COUNT
    store.objects[name] = store.objects[name][: 2 * BLOCK_BYTES]
    assert set(node.read(*range(COUNT))) <= {CORRUPT, GONE, READ_FAILED}


def test_a_stored_length_beyond_the_segment_is_not_believed(
    store: ObjectServer, make: Callable[[str], Node]
) -> None:
    record = Record(1, TierPage(1, key(0), LENGTH, 0, 1), 0, (1 << 31) - 1, ZSTD, 0)
    footer = encode_footer([record], 9, 1)
    content = encode_segment_header(SegmentHeader(5, 1)) + bytes(8 * BLOCK_BYTES) + footer
    store.objects[f"{BUCKET}/{SegmentObject(MINE, 5, 1, len(content)).name}"] = content
    assert make("reader").open() == []
