"""Looks into a pool node's arena from outside, to corrupt and to drop pages on purpose."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.transports.control import ControlChannel, make_hello
from pdserve.kvpool.transports.shm import host_id
from tests.support.e2e.cluster import PoolNode


def page_offset(
    node: PoolNode, namespace: str, geometry: dict[str, str], key: bytes, segment_bytes: list[int]
) -> int:
    """Byte offset of a committed page in the node's arena. Raises AssertionError when it is not there."""
    with _found(node, namespace, geometry, key, segment_bytes) as (_, _, pin):
        return pin.offset


def has_page(
    node: PoolNode, namespace: str, geometry: dict[str, str], key: bytes, segment_bytes: list[int]
) -> bool:
    try:
        page_offset(node, namespace, geometry, key, segment_bytes)
    except AssertionError:
        return False
    return True


def drop_page(
    node: PoolNode, namespace: str, geometry: dict[str, str], key: bytes, segment_bytes: list[int]
) -> None:
    """Have the node forget a committed page. Raises AssertionError when it is not there."""
    with _found(node, namespace, geometry, key, segment_bytes) as (channel, number, pin):
        deadline = time.monotonic() + 5.0
        dropped = channel.call(m.Discard(3, number, [key], [pin.sequence]), deadline)
        assert isinstance(dropped, m.Done), dropped
        present = channel.call(m.Exists(4, number, [key]), deadline)
        assert isinstance(present, m.Present), present
        assert present.mask == b"\0"


@contextlib.contextmanager
def reserved_page(
    node: PoolNode, namespace: str, geometry: dict[str, str], key: bytes, segment_bytes: list[int]
) -> Iterator[Callable[[], None]]:
    """A page that we write while this is open; yields what commits it, with whatever bytes its slot has."""
    deadline = time.monotonic() + 60.0
    with contextlib.closing(
        ControlChannel.connect(node.address, make_hello("test", host_id(), "shm"), deadline)
    ) as channel:
        opened = channel.call(m.OpenNamespace(1, namespace, geometry), deadline)
        assert isinstance(opened, m.Opened), opened
        reserved = channel.call(m.Reserve(2, opened.namespace, [key], segment_bytes), deadline)
        assert isinstance(reserved, m.Reserved), reserved
        [grant] = reserved.grants
        assert grant.status == m.GRANTED

        def commit() -> None:
            commit = m.Commit(3, [grant.slot], [grant.sequence], [0])
            committed = channel.call(commit, deadline)
            assert isinstance(committed, m.Committed), committed

        yield commit


@contextlib.contextmanager
def _found(
    node: PoolNode, namespace: str, geometry: dict[str, str], key: bytes, segment_bytes: list[int]
) -> Iterator[tuple[ControlChannel, int, m.Pin]]:
    """A channel to the node, the namespace's number there, and the page pinned for reading."""
    deadline = time.monotonic() + 5.0
    channel = ControlChannel.connect(node.address, make_hello("test", host_id(), "shm"), deadline)
    try:
        opened = channel.call(m.OpenNamespace(1, namespace, geometry), deadline)
        assert isinstance(opened, m.Opened), opened
        got = channel.call(m.Get(2, opened.namespace, [key], segment_bytes), deadline)
        assert isinstance(got, m.Got), got
        assert got.pins[0].status == m.HIT, "the page is not in the pool"
        yield channel, opened.namespace, got.pins[0]
    finally:
        channel.close()


def flip(arena: Path, offset: int, count: int) -> None:
    """Invert `count` bytes of the arena file."""
    data = np.memmap(
        arena, dtype=np.uint8, mode="r+", offset=offset - offset % 4096, shape=(offset % 4096 + count,)
    )
    data[offset % 4096 :] ^= 0xFF
    data.flush()
