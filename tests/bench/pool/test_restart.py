"""`python -m benchmarks restart`: what fails it, and a short run; a busy machine's times are not judged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.pool.restart import FIRST_HIT_WITHIN_S, PAGE_BYTES, Restarts, read_sample
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.protocol.base import KEY_BYTES
from tests.support.bench.commands import bench_here, results

KEYS = np.arange(10 * KEY_BYTES, dtype=np.uint8).reshape(10, KEY_BYTES)


class Scripted:
    """A client that finds the pages whose index is in `readable`, the first of them with other bytes."""

    def __init__(self, readable: set[int]) -> None:
        self._readable = readable

    def get(self, keys: Sequence[bytes], pages: Sequence[tuple[npt.NDArray[np.uint8]]]) -> list[bool]:
        for key, (page,) in zip(keys, pages, strict=True):
            page[:] = np.frombuffer(key * (PAGE_BYTES // KEY_BYTES), np.uint8)
        pages[min(self._readable, default=0)][0][0] ^= 1
        return [index in self._readable for index in range(len(keys))]


@pytest.mark.parametrize(
    ("readable", "share", "wrong"), [({1, 2, 3}, 0.3, 1), (set(), 0.0, 0), (set(range(10)), 1.0, 1)]
)
def test_pages_of_the_sample_that_cannot_be_read_are_counted(
    readable: set[int], share: float, wrong: int
) -> None:
    assert read_sample(cast(PoolClient, Scripted(readable)), KEYS) == (share, wrong)


@pytest.mark.parametrize(
    ("kept", "read", "wrong", "passed"),
    [(1.0, 1.0, 0, True), (1.0, 0.998, 0, False), (0.998, 1.0, 0, False), (1.0, 1.0, 1, False)],
)
def test_pages_that_are_there_and_cannot_be_read_fail_the_run(
    kept: float, read: float, wrong: int, passed: bool
) -> None:
    assert Restarts(10, 0.5, kept, read, wrong, []).passed is passed


@pytest.mark.long
def test_a_killed_node_has_its_pages_again_and_the_client_finds_them() -> None:
    (outcome,) = results(bench_here("restart", "--pages", "3000", "--rounds", "2", "--json"))
    assert [outcome[name] for name in ("pages", "kept", "read", "wrong")] == [3000, 1.0, 1.0, 0]
    first, second = (one["first_hit_s"] for one in outcome["restarts"])
    assert 0 < min(first, second) <= outcome["first_hit_s"] <= max(first, second) < FIRST_HIT_WITHIN_S
    assert all("took over 3000 pages" in one["log"] for one in outcome["restarts"])
