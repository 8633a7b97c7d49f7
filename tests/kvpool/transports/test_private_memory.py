"""Memory that shows a file: what others write is seen until it is owned, what is written here stays here."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest

from pdserve.kvpool.transports.private_memory import BLOCK_BYTES, Region, can_own


@pytest.fixture
def file() -> Iterator[int]:
    """A file of memory with four blocks of ones."""
    with tempfile.TemporaryFile(dir="/dev/shm") as opened:
        opened.write(b"\1" * (4 * BLOCK_BYTES))
        opened.flush()
        yield opened.fileno()


def test_a_region_has_zeros_but_where_it_shows_the_file(file: int) -> None:
    region = Region(3 * BLOCK_BYTES - 5)
    assert region.size_bytes == 3 * BLOCK_BYTES
    region.show(file, 2 * BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES)
    assert region.array().reshape(3, BLOCK_BYTES).max(axis=1).tolist() == [0, 1, 0]


def test_what_is_written_into_a_region_stays_there(file: int) -> None:
    region = Region(BLOCK_BYTES)
    region.show(file, 0, 0, BLOCK_BYTES)
    region.array()[:] = 9
    assert os.pread(file, 4 * BLOCK_BYTES, 0) == b"\1" * (4 * BLOCK_BYTES)


def test_what_others_write_into_the_file_is_seen_until_the_region_is_owned(file: int) -> None:
    assert can_own()
    region = Region(2 * BLOCK_BYTES)
    region.show(file, 0, 0, 2 * BLOCK_BYTES)
    data = region.array()
    assert data.max() == 1
    os.pwrite(file, b"\2", 5)
    assert data[5] == 2
    region.own()
    os.pwrite(file, b"\3" * (2 * BLOCK_BYTES), 0)
    assert np.flatnonzero(data != 1).tolist() == [5]
    assert data[5] == 2


def test_a_region_is_freed_once_no_array_needs_it(file: int) -> None:
    region = Region(BLOCK_BYTES)
    region.show(file, 0, 0, BLOCK_BYTES)
    view = region.array()[10:20][2:4]
    assert not region.free()
    assert view.tolist() == [1, 1]
    del view
    assert region.free()


def test_a_file_that_cannot_be_shown_leaves_the_region_as_it_was(file: int) -> None:
    region = Region(BLOCK_BYTES)
    with pytest.raises(OSError, match="Invalid argument"):
        region.show(file, 100, 0, BLOCK_BYTES)
    assert not region.array().any()


@pytest.mark.parametrize(
    ("start", "size"),
    [
        (-BLOCK_BYTES, BLOCK_BYTES),
        (BLOCK_BYTES, 2 * BLOCK_BYTES),
        (2 * BLOCK_BYTES, BLOCK_BYTES),
        (0, 0),
        (0, -BLOCK_BYTES),
        (1, BLOCK_BYTES),
        (0, BLOCK_BYTES - 1),
    ],
)
def test_nothing_is_mapped_over_memory_beside_the_region(file: int, start: int, size: int) -> None:
    region = Region(2 * BLOCK_BYTES)
    with pytest.raises(ValueError, match="whole blocks"):
        region.show(file, 0, start, size)


def test_bounds_of_the_region_hold_in_an_optimised_interpreter() -> None:
    script = """
import os
from pdserve.kvpool.transports.private_memory import BLOCK_BYTES, Region
file = os.memfd_create("x")
os.ftruncate(file, BLOCK_BYTES)
try:
    Region(BLOCK_BYTES).show(file, 0, BLOCK_BYTES, BLOCK_BYTES)
except ValueError:
    print("refused")
"""
    done = subprocess.run(
        [sys.executable, "-O", "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "refused\n"
