"""LoRA's batches without pinned memory, which a machine without an accelerator has none of.

SGLang's `torch_native` backend pins the few numbers that describe a batch, so that a GPU reads them without a
wait. On a CPU there is nothing to copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

_MAKERS: Final = frozenset({"tensor", "zeros"})


class UnpinnedTorch:
    """`torch` for one module of SGLang: what makes tensors there pins nothing."""

    __pdserve_cpu__ = True  # `hooks.apply` has been here

    def __init__(self, whole: Any) -> None:
        self._whole = whole

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._whole, name)
        return _unpinned(found) if name in _MAKERS else found


def _unpinned(maker: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(maker)
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return maker(*args, **kwargs)

    return made


def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    """In the place of `torch.Tensor.pin_memory`, which fails here."""
    return tensor
