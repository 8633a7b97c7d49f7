"""Torch tensors as pages: those in host memory as they stand, others by way of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pdserve.kvpool.client import tensors
from pdserve.kvpool.client.tensors import Staged, as_segment
from tests.support.kvpool.faulty import Pool, keys


class Remote:
    """Stands in for a tensor in a GPU's memory: what it holds cannot be seen but by copying."""

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held
        self.shape = held.shape
        self.device = torch.device("cuda:0")
        self.copied = 0

    def is_contiguous(self) -> bool:
        return True

    def new_empty(self, shape: Any, *, device: str, pin_memory: bool) -> HostSide:
        assert (device, pin_memory) == ("cpu", True)
        return HostSide(torch.full(shape, 99, dtype=self.held.dtype))

    def copy_(self, source: HostSide, *, non_blocking: bool) -> None:
        self.held.copy_(source.tensor)
        self.copied += 1


class HostSide:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def copy_(self, source: Remote, *, non_blocking: bool) -> None:
        self.tensor.copy_(source.held)
        source.copied += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


@pytest.fixture
def synchronized(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    waited: list[Any] = []
    monkeypatch.setattr(tensors, "_synchronize", lambda tensor: waited.append(tensor.device))
    return waited


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.uint8])
def test_a_host_tensor_s_bytes_are_its_own_memory(dtype: torch.dtype) -> None:
    tensor = torch.zeros(4, 6, dtype=dtype)
    segment = as_segment(tensor)
    assert (segment.dtype, segment.shape) == (np.uint8, (24 * tensor.element_size(),))
    segment[:] = 0x3C
    assert bytes(tensor.view(torch.uint8).numpy()) == b"\x3c" * segment.size


def test_host_tensors_travel_without_a_copy_of_ours(synchronized: list[Any]) -> None:
    pool = Pool()
    client = pool.client()
    sources = [[torch.randn(2, 64, dtype=torch.bfloat16), torch.randn(32)] for _ in range(5)]
    targets = [[torch.zeros_like(segment) for segment in page] for page in sources]
    assert client.put(keys(5), Staged(sources, load=True).buffers) == [True] * 5
    staged = Staged(targets)
    assert client.get(keys(5), staged.buffers) == [True] * 5
    staged.store([True] * 5)
    assert all(
        torch.equal(a, b)
        for one, other in zip(sources, targets, strict=True)
        for a, b in zip(one, other, strict=True)
    )
    assert synchronized == []
    client.close()


def test_tensors_elsewhere_are_staged_and_misses_leave_them_alone(synchronized: list[Any]) -> None:
    pool = Pool()
    client = pool.client()
    sources = [[Remote(torch.randn(64)), Remote(torch.randn(32))] for _ in range(3)]
    assert client.put(keys(3), Staged(sources, load=True).buffers) == [True] * 3  # type: ignore[arg-type]
    assert [segment.copied for page in sources for segment in page] == [1] * 6
    targets = [[Remote(torch.zeros(64)), Remote(torch.zeros(32))] for _ in range(4)]
    staged = Staged(targets)  # type: ignore[arg-type]
    found = client.get(keys(4), staged.buffers)
    assert found == [True, True, True, False]
    staged.store(found)
    for source, target in zip(sources, targets, strict=False):
        assert all(torch.equal(a.held, b.held) for a, b in zip(source, target, strict=True))
    assert [segment.copied for segment in targets[3]] == [0, 0]
    assert synchronized == [torch.device("cuda:0")] * 2
    client.close()


def test_a_tensor_with_gaps_is_refused() -> None:
    with pytest.raises(ValueError, match="page 1: a tensor of shape"):
        Staged([[torch.zeros(4)], [torch.zeros(4, 4)[:, 1]]])
