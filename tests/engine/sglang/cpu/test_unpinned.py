"""LoRA's batches on a machine without an accelerator: nothing is pinned, all else is torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pdserve.engine.sglang.cpu.replacements import UnpinnedTorch, pin_memory


@pytest.mark.skipif(torch.cuda.is_available(), reason="here memory can be pinned")
def test_what_torch_refuses_here_is_made_without_pinning() -> None:
    with pytest.raises(RuntimeError):
        torch.tensor([1], pin_memory=True)
    unpinned: Any = UnpinnedTorch(torch)
    assert unpinned.zeros((3,), dtype=torch.int32, pin_memory=True).tolist() == [0, 0, 0]
    assert unpinned.tensor([1, 2], dtype=torch.int32, pin_memory=True, device="cpu").tolist() == [1, 2]


def test_the_rest_is_torchs_own() -> None:
    unpinned: Any = UnpinnedTorch(torch)
    assert unpinned.cumsum is torch.cumsum
    assert unpinned.int32 is torch.int32
    tensor = torch.ones(2)
    assert pin_memory(tensor) is tensor
