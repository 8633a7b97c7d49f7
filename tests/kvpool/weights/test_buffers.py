"""Memory of weights that is used again, and never while somebody has it."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

from pdserve.kvpool.protocol.page_bytes import aligned
from pdserve.kvpool.weights.streaming import Buffers

SIZE = 1000


def test_memory_is_used_again_once_nothing_refers_to_it() -> None:
    buffers = Buffers()
    first = buffers.take(SIZE)
    place = first.ctypes.data
    kept = buffers.take(SIZE)
    del first
    gc.collect()
    again = buffers.take(SIZE - 10)
    assert again.ctypes.data == place
    assert again.shape == (SIZE - 10,)
    assert kept.ctypes.data != place


def test_a_shorter_one_takes_a_part_of_what_came_back_and_a_small_one_does_not() -> None:
    buffers = Buffers()
    place = buffers.take(SIZE).ctypes.data
    gc.collect()
    kept = buffers.take(SIZE // 5)
    assert kept.ctypes.data != place
    assert buffers.take(SIZE // 3).ctypes.data == place


def test_memory_that_a_tensor_refers_to_is_not_used_again() -> None:
    torch = pytest.importorskip("torch")
    buffers = Buffers()
    data = buffers.take(SIZE)
    data[:] = 7
    tensor = torch.from_numpy(data)[10:20].view(torch.int16)
    del data
    gc.collect()
    other = buffers.take(SIZE)
    other[:] = 0
    assert tensor.tolist() == [0x0707] * 5
    del tensor
    gc.collect()
    assert buffers.take(SIZE).ctypes.data != other.ctypes.data


def test_little_memory_is_kept() -> None:
    buffers = Buffers(spare_bytes=SIZE)
    many = [buffers.take(SIZE) for _ in range(3)]
    places = {one.ctypes.data for one in many}
    assert len(places) == 3
    del many
    gc.collect()
    assert len(buffers._free) == 1
    assert np.all(buffers.take(SIZE).shape == (SIZE,))


def test_a_buffer_that_comes_back_while_another_is_taken_holds_up_nobody() -> None:
    """Arrays in cycles are freed whenever the collector runs, also inside `take`."""
    buffers, taken = Buffers(), threading.Event()

    def take_while_the_collector_runs() -> None:
        before = gc.get_threshold()
        try:
            for n in range(100):
                gc.disable()
                cycle: list[Any] = [buffers.take(1000)]
                cycle.append(cycle)
                del cycle
                gc.set_threshold(1 + n % 25)
                gc.enable()
                buffers.take(1000)
                gc.set_threshold(*before)
        finally:
            gc.set_threshold(*before)
            gc.enable()
        taken.set()

    threading.Thread(target=take_while_the_collector_runs, daemon=True).start()
    assert taken.wait(20.0)


def test_buffers_begin_where_a_page_of_memory_does() -> None:
    buffers = Buffers()
    assert [buffers.take(size).ctypes.data % 4096 for size in (1, 1000, 5 << 20)] == [0, 0, 0]
    assert aligned(0).size == 0
