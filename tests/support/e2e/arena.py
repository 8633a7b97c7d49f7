"""Looks into a pool node's arena from outside, to corrupt pages on purpose."""

from __future__ import annotations

import time
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
    deadline = time.monotonic() + 5.0
    channel = ControlChannel.connect(node.address, make_hello("test", host_id(), "shm"), deadline)
    try:
        opened = channel.call(m.OpenNamespace(1, namespace, geometry), deadline)
        assert isinstance(opened, m.Opened), opened
        got = channel.call(m.Get(2, opened.namespace, [key], segment_bytes), deadline)
        assert isinstance(got, m.Got), got
        assert got.pins[0].status == m.HIT, "the page is not in the pool"
        return got.pins[0].offset
    finally:
        channel.close()


def flip(arena: Path, offset: int, count: int) -> None:
    """Invert `count` bytes of the arena file."""
    data = np.memmap(
        arena, dtype=np.uint8, mode="r+", offset=offset - offset % 4096, shape=(offset % 4096 + count,)
    )
    data[offset % 4096 :] ^= 0xFF
    data.flush()
