"""Page copies between SGLang's device pool and HiCache's host pool, both in CPU memory.

Shapes (one K or V tensor each):
- device, layer first: one tensor per layer, `[tokens, heads, dim]`
- host, layer_first: one tensor per layer, `[tokens, heads, dim]`
- host, page_first_direct: `[pages, layers, page_size, heads, dim]`

Indices are token positions, int64, whole pages: each run of `page_size` of them is one page's consecutive
slots. Names and parameters are those of `sgl_kernel.kvcacheio`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Layer first to layer first: `dst[i][dst_indices] = src[i][src_indices]` for every tensor pair."""
    src_indices, dst_indices = src_indices.cpu(), dst_indices.cpu()
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """One layer of host pages (page_first_direct) to device slots: `src_ptrs` and `dst_ptrs` are [K, V]."""
    pages = src_indices.cpu()[::page_size] // page_size
    dst_indices = dst_indices.cpu()
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        dst[dst_indices] = src[pages, layer_id].reshape(-1, *src.shape[3:])


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """All layers of device slots to host pages: `src_ptrs` holds every layer's K, then every layer's V;
    `dst_ptrs` is [K, V] of page_first_direct.
    """
    pages = dst_indices.cpu()[::page_size] // page_size
    src_indices = src_indices.cpu()
    layers = len(src_ptrs) // len(dst_ptrs)
    for index, src in enumerate(src_ptrs):
        host = dst_ptrs[index // layers]
        host[pages, index % layers] = src[src_indices].reshape(len(pages), page_size, *src.shape[1:])
