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
from typing import Any, TypeAlias

import torch
from torch.nn.functional import scaled_dot_product_attention

Attend: TypeAlias = Callable[..., torch.Tensor]
Tensors: TypeAlias = tuple[torch.Tensor, ...]


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


def extend_new_queries_only(original: Attend) -> Attend:
    """A `_run_sdpa_forward_extend` that computes new queries only; calls `original` for cross and encoder
    attention. Its positional arguments:

    query, output: `[new tokens, heads, dim]`; k_cache, v_cache: `[slots, kv heads, dim]`; req_to_token:
    `[requests, context]` slots; req_pool_indices, seq_lens, extend_prefix_lens, extend_seq_lens:
    `[requests]`.
    """
    return _replacing(original, _extend, tensors=9, needs_causal=True)


def decode_in_groups(original: Attend) -> Attend:
    """A `_run_sdpa_forward_decode` of one query for each request; calls `original` for encoder attention.

    query, output: `[requests, heads, dim]`; the rest as for `extend_new_queries_only`, up to seq_lens.
    """
    return _replacing(original, _decode, tensors=7, needs_causal=False)


def _replacing(original: Attend, attend: Attend, *, tensors: int, needs_causal: bool) -> Attend:
    @functools.wraps(original)
    def run(backend: Any, *args: Any, **options: Any) -> torch.Tensor:
        encoder_lens = args[tensors] if len(args) > tensors else options.get("encoder_lens")
        is_plain = encoder_lens is None and not options.get("is_cross_attn", False)
        if not is_plain or (needs_causal and not options.get("causal", False)):
            return original(backend, *args, **options)
        window = options.get("sliding_window_size")
        query, output, k_cache, v_cache, *rows = args[:tensors]
        table, requests, lengths, *more = rows
        if window is not None and getattr(backend, "use_sliding_window_kv_pool", False):
            # slots of tokens before the window may have been given to others; the mask leaves them out
            slots = table[requests, : int(lengths.max())]
            table = backend.token_to_kv_pool.translate_loc_from_full_to_swa(slots)
            requests = torch.arange(len(slots))
        taken = (query, output, k_cache, v_cache, table, requests, lengths, *more)
        return attend(taken, options.get("scaling"), window, enable_gqa=options.get("enable_gqa", False))

    return run


def _extend(tensors: Tensors, scaling: float | None, window: int | None, *, enable_gqa: bool) -> torch.Tensor:
    query, output, k_cache, v_cache, table, requests, seq_lens, prefix_lens, new_lens = tensors
    rows = query.movedim(0, 1)  # [heads, new tokens, dim]
    start = 0
    lengths = zip(seq_lens.tolist(), prefix_lens.tolist(), new_lens.tolist(), strict=True)
    for request, (total, prefix, new) in enumerate(lengths):
        slots = table[requests[request], :total]
        keys, values = (
            cache.index_select(0, slots).movedim(0, 1).to(rows.dtype)[None] for cache in (k_cache, v_cache)
        )
        mask = extend_mask(prefix, total, window)
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


def _decode(tensors: Tensors, scaling: float | None, window: int | None, *, enable_gqa: bool) -> torch.Tensor:
    query, output, k_cache, v_cache, table, requests, seq_lens = tensors
    kv_heads = k_cache.shape[1]
    # [requests, kv heads, heads of a group, dim]
    rows, attended = (one.view(len(one), kv_heads, -1, one.shape[2]) for one in (query, output))
    for i, (request, total) in enumerate(zip(requests.tolist(), seq_lens.tolist(), strict=True)):
        first = 0 if window is None or window < 0 else max(0, total - 1 - window)
        slots = table[request, first:total]
        keys, values = (
            cache.index_select(0, slots).transpose(0, 1)[None].to(rows.dtype) for cache in (k_cache, v_cache)
        )
        attended[i] = scaled_dot_product_attention(rows[i : i + 1], keys, values, scale=scaling)[0]
    return output
