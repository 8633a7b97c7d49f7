"""Torch tensors as pages. `torch` is imported only when a tensor is there.

A tensor in host memory is a page's segment as it stands: `as_segment` gives its bytes without a copy. One in
a GPU's memory is staged through host memory, on either data path: a mapped arena is host memory; and over UCX
the checksum has to see the bytes on the host, so that sending them from the GPU would save no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pdserve.kvpool.protocol.page_bytes import Bytes1D, PageBuffers

if TYPE_CHECKING:
    import torch

    TensorPage = Sequence[torch.Tensor]


class Staged:
    """Pages of tensors of any device, as buffers in host memory.

    put    client.put(keys, Staged(pages, load=True).buffers)
    get    staged = Staged(pages); found = client.get(keys, staged.buffers); staged.store(found)
    """

    def __init__(self, pages: Sequence[TensorPage], *, load: bool = False) -> None:
        """`pages`: each its segments in order, contiguous tensors of any dtype. `load`: copy what is on a GPU
        to the host now. Raises ValueError: a tensor is not contiguous.
        """
        self._copies: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # page, on the GPU, on the host
        self.buffers: list[PageBuffers] = [
            [self._segment(place, tensor) for tensor in page] for place, page in enumerate(pages)
        ]
        if load:
            self._copy(lambda device, host: host.copy_(device, non_blocking=True), range(len(pages)))

    def store(self, found: Sequence[bool]) -> None:
        """Copy the pages that were found to where they belong; the others stay as they are there."""
        self._copy(
            lambda device, host: device.copy_(host, non_blocking=True),
            [place for place, hit in enumerate(found) if hit],
        )

    def _segment(self, place: int, tensor: torch.Tensor) -> Bytes1D:
        if not tensor.is_contiguous():
            raise ValueError(f"page {place}: a tensor of shape {tuple(tensor.shape)} is not contiguous")
        if tensor.device.type == "cpu":
            return as_segment(tensor)
        # pinned: the GPU copies into it by itself, at the speed of the bus
        host = tensor.new_empty(tensor.shape, device="cpu", pin_memory=True)
        self._copies.append((place, tensor, host))
        return as_segment(host)

    def _copy(self, begin: Callable[[torch.Tensor, torch.Tensor], object], places: Sequence[int]) -> None:
        """Begin all copies, then wait for them."""
        wanted = set(places)
        waiting = {}
        for place, device, host in self._copies:
            if place in wanted:
                begin(device, host)
                waiting[device.device] = device
        for tensor in waiting.values():
            _synchronize(tensor)


def as_segment(tensor: torch.Tensor) -> Bytes1D:
    """The bytes of a contiguous tensor in host memory, uint8 [nbytes], without a copy."""
    import torch

    segment: Bytes1D = np.asarray(tensor.detach().view(-1).view(torch.uint8).numpy())
    return segment


def _synchronize(tensor: torch.Tensor) -> None:
    import torch

    torch.cuda.synchronize(tensor.device)
