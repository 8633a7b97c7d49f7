"""What takes the place of pieces of torch and SGLang that need a GPU: operators, streams and events, pinned
memory, page hashes.

Work on a CPU is done at once, so every wait for a stream is over when it starts.

Pages are copied between SGLang's device pool and HiCache's host pool, both in CPU memory.

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
import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch

from pdserve.pages import page_hashes, token_bytes

_LIBRARY: Final = "sgl_kernel"
OPERATORS: Final = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
_MAKERS: Final = frozenset({"tensor", "zeros"})


def declare_operators() -> None:
    """Make torch know operators of `sgl_kernel` that modules of SGLang only look up when they are imported;
    again is a no-op.

    The module of Qwen3.5 does (SGLang 0.5.23), and the processor of images of all Qwen models imports it. The
    operators have no CPU version: calling one is an error of torch that names it.
    """
    known = getattr(torch.ops, _LIBRARY)
    for name in OPERATORS:
        if not hasattr(known, name):
            torch.library.define(f"{_LIBRARY}::{name}", "() -> ()")


class Event(torch.cpu.Event):
    """Recorded and complete from the start; elapsed times are 0 ms."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        super().__init__()

    def elapsed_time(self, end: torch.cpu.Event) -> float:
        return 0.0


class Stream(torch.cpu.Stream):
    """Runs nothing asynchronously."""

    def __init__(self, device: object = None, priority: int = -1) -> None:
        super().__init__(priority)

    def record_event(self, event: Event | None = None) -> Event:  # type: ignore[override]
        return event or Event()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class UnpinnedTorch:
    """`torch` for one module of SGLang: what makes tensors there pins nothing.

    SGLang's `torch_native` backend of LoRA pins the few numbers that describe a batch, so that a GPU reads
    them without a wait. On a CPU there is nothing to copy.
    """

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


def get_native_hash(
    token_ids: Any, prior_digest: bytes | None, page_size: int | None = None
) -> str | list[str]:
    """Same result as `sglang.srt.mem_cache.cpp_utils.native_hash.get_native_hash`, by `hashlib`: SGLang's
    native extension is compiled on first use.

    Without `page_size` one hex digest of all tokens, else a list of one per page, the last partial page
    included. `token_ids` is a list, an array or a `RadixKey`, which has a token more than its length says
    where it is of pairs (EAGLE).
    """
    pairs = bool(getattr(token_ids, "is_bigram", False))
    raw_token_ids = getattr(token_ids, "raw_token_ids", None)
    raw = raw_token_ids() if raw_token_ids is not None else getattr(token_ids, "token_ids", token_ids)
    raw = raw[: len(token_ids) + pairs]
    if page_size is None:
        return _digest(prior_digest or b"", raw, pairs).hex()
    digests = page_hashes(raw, page_size, prior_digest, pairs=pairs)
    rest = raw[len(digests) * page_size :]
    if len(rest) > pairs:
        digests.append(_digest(digests[-1] if digests else prior_digest or b"", rest, pairs))
    return [digest.hex() for digest in digests]


def _digest(prior_digest: bytes, tokens: Any, pairs: bool) -> bytes:
    return hashlib.sha256(prior_digest + token_bytes(tokens, pairs=pairs)).digest()


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
    runs = _runs(src_indices, dst_indices, page_size)
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        _copy_pages(src.select(1, layer_id), _by_page(dst, page_size), runs)


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
    runs = _runs(src_indices, dst_indices, page_size)
    layers = len(src_ptrs) // len(dst_ptrs)
    for index, src in enumerate(src_ptrs):
        host = dst_ptrs[index // layers].select(1, index % layers)
        _copy_pages(_by_page(src, page_size), host, runs)


def _runs(src_indices: torch.Tensor, dst_indices: torch.Tensor, page_size: int) -> list[tuple[int, int, int]]:
    """The pages that follow each other at both ends: the first one's number at either, and how many."""
    src, dst = ((indices[::page_size] // page_size).cpu().numpy() for indices in (src_indices, dst_indices))
    ends = np.flatnonzero((np.diff(src) != 1) | (np.diff(dst) != 1)) + 1
    spans = itertools.pairwise([0, *ends.tolist(), len(src)])
    return [(int(src[start]), int(dst[start]), end - start) for start, end in spans if end > start]


def _copy_pages(src: torch.Tensor, dst: torch.Tensor, runs: Sequence[tuple[int, int, int]]) -> None:
    """Both `[pages, ...]`. On this thread alone: torch's threads would wait for each other at every layer,
    which takes ten times as long where other processes keep the cores busy.
    """
    source, target = (pages.view(torch.uint8).numpy() for pages in (src, dst))
    for first, place, count in runs:
        target[place : place + count] = source[first : first + count]


def _by_page(layer: torch.Tensor, page_size: int) -> torch.Tensor:
    """A device tensor `[tokens, ...]` as `[pages, page_size, ...]`."""
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
