"""Attention of SGLang's `torch_native` backend: of new queries only, in groups, and right for windows.

SGLang's own version builds a query row for every token of the sequence, cached ones too, and drops those rows
after computing them: a prompt with n cached and m new tokens costs (n+m)^2 instead of m*(n+m). With a prefix
cache that is nearly the cost of having no cache. Here the m new rows attend to all n+m keys under a
lower-right causal mask.

Its decode step copies the cached keys and values element by element, and then again for each query head that
shares a key head. Here they are copied once, by rows, and the query heads of a group are the rows of one
query.

Layers with a sliding window have keys and values in a pool of their own, with slots of its own. SGLang 0.5.23
writes to these slots, and reads from those of the main pool: that is right only as long as both are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def extend_mask(prefix_len: int, total_len: int, window: int | None) -> torch.Tensor | None:
    """Bool mask `[total_len - prefix_len, total_len]`, True where a new query may look; None for plain
    causal.

    A `window` of w lets a query see the w tokens before it and itself.
    """
    windowed = window is not None and window > -1
    if prefix_len == 0 and not windowed:
        return None
    query_pos = torch.arange(prefix_len, total_len)[:, None]
    key_pos = torch.arange(total_len)[None]
    mask = key_pos <= query_pos
    if window is not None and windowed:
        mask &= key_pos >= query_pos - window
    return mask


def extend_new_queries_only(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A `_run_sdpa_forward_extend` that computes new queries only; calls `original` for cross and encoder
    attention.

    query, output: `[new tokens, heads, dim]`; k_cache, v_cache: `[slots, kv heads, dim]`; req_to_token:
    `[requests, context]` slots; seq_lens, extend_prefix_lens, extend_seq_lens: `[requests]`.
    """

    def run(
        self: Any,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        if encoder_lens is not None or is_cross_attn or not causal:
            return original(
                self,
                query,
                output,
                k_cache,
                v_cache,
                req_to_token,
                req_pool_indices,
                seq_lens,
                extend_prefix_lens,
                extend_seq_lens,
                encoder_lens,
                scaling=scaling,
                enable_gqa=enable_gqa,
                causal=causal,
                is_cross_attn=is_cross_attn,
                sliding_window_size=sliding_window_size,
            )
        rows = query.movedim(0, 1)  # [heads, new tokens, dim]
        start = 0
        lengths = zip(seq_lens.tolist(), extend_prefix_lens.tolist(), extend_seq_lens.tolist(), strict=True)
        for request, (total, prefix, new) in enumerate(lengths):
            slots = req_to_token[req_pool_indices[request], :total]
            keys, values = (
                cache.index_select(0, slots).movedim(0, 1).to(rows.dtype)[None]
                for cache in (k_cache, v_cache)
            )
            mask = extend_mask(prefix, total, sliding_window_size)
            attended = scaled_dot_product_attention(
                rows[None, :, start : start + new],
                keys,
                values,
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=enable_gqa,
                scale=scaling,
            )
            output[start : start + new] = attended[0].movedim(1, 0)
            start += new
        return output

    return run


def decode_in_groups(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A `_run_sdpa_forward_decode` of one query for each request; calls `original` for encoder attention.

    query, output: `[requests, heads, dim]`; the rest as for `extend_new_queries_only`.
    """

    def run(
        self: Any,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        if encoder_lens is not None or is_cross_attn:
            return original(
                self,
                query,
                output,
                k_cache,
                v_cache,
                req_to_token,
                req_pool_indices,
                seq_lens,
                encoder_lens,
                scaling=scaling,
                enable_gqa=enable_gqa,
                causal=causal,
                is_cross_attn=is_cross_attn,
                sliding_window_size=sliding_window_size,
            )
        kv_heads = k_cache.shape[1]
        # [requests, kv heads, heads of a group, dim]
        rows, attended = (one.view(len(one), kv_heads, -1, one.shape[2]) for one in (query, output))
        for i, (request, total) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
            first = 0
            if sliding_window_size is not None and sliding_window_size > -1:
                first = max(0, total - 1 - sliding_window_size)
            slots = req_to_token[request, first:total]
            keys, values = (
                cache.index_select(0, slots).transpose(0, 1)[None].to(rows.dtype)
                for cache in (k_cache, v_cache)
            )
            attended[i] = scaled_dot_product_attention(rows[i : i + 1], keys, values, scale=scaling)[0]
        return output

    return run


def from_slots_of_windows(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap `_run_sdpa_forward_extend` or `_run_sdpa_forward_decode`: layers with a window read their slots.

    Slots of tokens before the window may have been given to others; the mask leaves them out.
    """

    @functools.wraps(run)
    def translated(
        self: Any,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        *args: Any,
        sliding_window_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if sliding_window_size is not None and getattr(self, "use_sliding_window_kv_pool", False):
            slots = req_to_token[req_pool_indices, : int(seq_lens.max())]
            req_to_token = self.token_to_kv_pool.translate_loc_from_full_to_swa(slots)
            req_pool_indices = torch.arange(len(slots))
        rows = (req_to_token, req_pool_indices, seq_lens, *args)
        return run(
            self, query, output, k_cache, v_cache, *rows, sliding_window_size=sliding_window_size, **kwargs
        )

    return translated
