"""Page copies between SGLang's device pool and HiCache's host pool, both in CPU memory.

Shapes (one K or V tensor each):
- device, layer first: one tensor per layer, `[tokens, heads, dim]`
- host, layer_first: one tensor per layer, `[tokens, heads, dim]`
- host, page_first_direct: `[pages, layers, page_size, heads, dim]`
- host, page_head: `[pages, heads, page_size, layers, dim]`

Indices are token positions, int64, whole pages: each run of `page_size` of them is one page's consecutive
slots, from a multiple of `page_size`. Names and parameters are those of `sgl_kernel.kvcacheio`.
"""

from __future__ import annotations

import ctypes
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
    pages, slots = (indices.cpu()[::page_size] // page_size for indices in (src_indices, dst_indices))
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        _by_page(dst, page_size).index_copy_(0, slots, src.select(1, layer_id).index_select(0, pages))


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
    slots, pages = (indices.cpu()[::page_size] // page_size for indices in (src_indices, dst_indices))
    layers = len(src_ptrs) // len(dst_ptrs)
    for index, src in enumerate(src_ptrs):
        host = dst_ptrs[index // layers].select(1, index % layers)
        host.index_copy_(0, pages, _by_page(src, page_size).index_select(0, slots))


def _by_page(layer: torch.Tensor, page_size: int) -> torch.Tensor:
    """A device tensor `[tokens, ...]` as `[pages, page_size, ...]`: whole pages are copied sooner."""
    pages = len(layer) // page_size
    return layer[: pages * page_size].view(pages, page_size, *layer.shape[1:])


def transfer_kv_per_layer_ph_lf(
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    page_size: int,
    head_num: int,
) -> None:
    """One layer of host pages (page_head) to device slots."""
    pages = src_indices.cpu()[::page_size] // page_size
    dst_indices = dst_indices.cpu()
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        found = src.select(3, layer_id)[pages]  # [pages, heads, page_size, dim]
        dst[dst_indices] = found.transpose(1, 2).reshape(-1, head_num, found.shape[-1])


def transfer_kv_all_layer_lf_ph(
    src_k_layers: torch.Tensor,
    dst_k: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    page_size: int,
    head_num: int,
) -> None:
    """All layers of device slots to host pages (page_head). `src_k_layers`, `src_v_layers`: the addresses of
    each layer's slots, uint64 `[layers]`; a slot has `item_size` bytes.
    """
    pages = dst_indices.cpu()[::page_size] // page_size
    src_indices = src_indices.cpu()
    if not src_indices.numel():
        return
    length = (int(src_indices.max()) + 1) * item_size
    for addresses, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        host = dst.view(torch.uint8)
        for layer, address in enumerate(addresses.tolist()[:num_layers]):
            memory = (ctypes.c_uint8 * length).from_address(address)
            slots = torch.frombuffer(memory, dtype=torch.uint8).reshape(-1, item_size)[src_indices]
            found = slots.reshape(len(pages), page_size, head_num, -1)
            host.select(3, layer)[pages] = found.transpose(1, 2)
