"""Torch operators of `sgl_kernel` that modules of SGLang only look up when they are imported.

The module of Qwen3.5 does (SGLang 0.5.23), and the processor of images of all Qwen models imports it. The
operators have no CPU version: calling one is an error of torch that names it.
"""

from __future__ import annotations

from typing import Final

import torch

LIBRARY: Final = "sgl_kernel"
NAMES: Final = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)


def declare() -> None:
    """Make the names known to torch; again is a no-op."""
    known = getattr(torch.ops, LIBRARY)
    for name in NAMES:
        if not hasattr(known, name):
            torch.library.define(f"{LIBRARY}::{name}", "() -> ()")
