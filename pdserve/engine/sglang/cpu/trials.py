"""Trials of the hooks in place, through SGLang's own names, against plain references. Run at every start:
milliseconds.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch


def page_first_copies_agree() -> bool:
    """Device to host to device through page_first_direct, other pages and slots untouched."""
    from sglang.srt.mem_cache.pool_host import mha

    layers, page, heads, dim = 3, 4, 2, 5
    device = [torch.randn(6 * page, heads, dim) for _ in range(2 * layers)]
    host = [torch.zeros(7, layers, page, heads, dim) for _ in range(2)]
    source, stored = _slots([4, 1], page), _slots([2, 5], page)
    mha.transfer_kv_all_layer_direct_lf_pf(
        src_ptrs=device, dst_ptrs=host, src_indices=source, dst_indices=stored, page_size=page
    )
    restored = [torch.zeros(6 * page, heads, dim) for _ in range(2 * layers)]
    target = _slots([0, 3], page)
    for layer in range(layers):
        mha.transfer_kv_per_layer_direct_pf_lf(
            src_ptrs=host,
            dst_ptrs=[restored[layer], restored[layers + layer]],
            src_indices=stored,
            dst_indices=target,
            layer_id=layer,
            page_size=page,
        )
    untouched = all(bool((side[[0, 1, 3, 4, 6]] == 0).all()) for side in host)
    expected = all(
        bool((host[i // layers][2, i % layers] == device[i][4 * page : 5 * page]).all())
        for i in range(2 * layers)
    )
    return untouched and expected and _moved(device, restored, source, target)


def layer_first_copies_agree() -> bool:
    """Device to host to device through layer_first."""
    from sglang.srt.mem_cache.pool_host import mha

    page = 4
    device = [torch.randn(6 * page, 2, 5) for _ in range(4)]
    host = [torch.zeros(8 * page, 2, 5) for _ in range(4)]
    restored = [torch.zeros(6 * page, 2, 5) for _ in range(4)]
    source, stored, target = _slots([5, 0], page), _slots([1, 6], page), _slots([2, 4], page)
    mha.transfer_kv_direct(
        src_layers=device, dst_layers=host, src_indices=source, dst_indices=stored, page_size=page
    )
    mha.transfer_kv_direct(
        src_layers=host, dst_layers=restored, src_indices=stored, dst_indices=target, page_size=page
    )
    return _moved(device, host, source, stored) and _moved(device, restored, source, target)


def _slots(pages: list[int], page_size: int) -> torch.Tensor:
    return torch.tensor([page * page_size + i for page in pages for i in range(page_size)])


def _moved(
    source: list[torch.Tensor],
    target: list[torch.Tensor],
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
) -> bool:
    """Each target tensor holds the source's rows at its slots, and zeros elsewhere."""
    for before, after in zip(source, target, strict=True):
        rest = after.clone()
        rest[target_slots] = 0
        if bool((after[target_slots] != before[source_slots]).any()) or bool((rest != 0).any()):
            return False
    return True


def attention_agrees() -> bool:
    """Extend attention of a batch (cached prefixes of 0, 5 and 9 tokens, grouped heads) equals a plain
    softmax.
    """
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    heads, kv_heads, dim, window = 4, 2, 8, 3
    prefix, new = [0, 5, 9], [4, 1, 3]
    total = [p + n for p, n in zip(prefix, new, strict=True)]
    keys, values = torch.randn(40, kv_heads, dim), torch.randn(40, kv_heads, dim)
    table = torch.stack([torch.randperm(40)[: max(total)] for _ in total])
    query = torch.randn(sum(new), heads, dim)
    for sliding in (None, window):
        output = torch.empty_like(query)
        TorchNativeAttnBackend._run_sdpa_forward_extend(
            None,
            query,
            output,
            keys,
            values,
            table,
            torch.arange(len(total)),
            torch.tensor(total),
            torch.tensor(prefix),
            torch.tensor(new),
            scaling=1 / math.sqrt(dim),
            enable_gqa=True,
            causal=True,
            sliding_window_size=sliding,
        )
        if not torch.allclose(
            output, _plain_attention(query, keys, values, table, prefix, new, sliding), atol=1e-5
        ):
            return False
    return True


def windows_agree() -> bool:
    """Layers with a window, extended and decoded, read the slots of the pool that such layers have."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    heads, kv_heads, dim, window, total = 4, 2, 8, 3, [6, 9]
    keys, values = torch.randn(40, kv_heads, dim), torch.randn(40, kv_heads, dim)
    own_slots = torch.randperm(40)  # by slot of the main pool
    table = torch.stack([torch.randperm(40)[: max(total)] for _ in total])
    backend = object.__new__(TorchNativeAttnBackend)
    backend.use_sliding_window_kv_pool = True
    backend.token_to_kv_pool = SimpleNamespace(translate_loc_from_full_to_swa=lambda slots: own_slots[slots])
    query = torch.randn(len(total), heads, dim)
    cached, one = [length - 1 for length in total], [1] * len(total)
    expected = _plain_attention(query, keys, values, own_slots[table], cached, one, window)
    requests, options = (table, torch.arange(len(total)), torch.tensor(total)), {"enable_gqa": True}
    extended, decoded = torch.empty_like(query), torch.empty_like(query)
    backend._run_sdpa_forward_extend(
        *(query, extended, keys, values, *requests, torch.tensor(cached), torch.tensor(one)),
        **{**options, "scaling": 1 / math.sqrt(dim), "causal": True, "sliding_window_size": window},
    )
    backend._run_sdpa_forward_decode(
        *(query, decoded, keys, values, *requests),
        **{**options, "scaling": 1 / math.sqrt(dim), "sliding_window_size": window},
    )
    return all(torch.allclose(output, expected, atol=1e-5) for output in (extended, decoded))


def _plain_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    prefix: list[int],
    new: list[int],
    window: int | None,
) -> torch.Tensor:
    output, row = torch.empty_like(query), 0
    group = query.shape[1] // keys.shape[1]
    for request, (cached, added) in enumerate(zip(prefix, new, strict=True)):
        for position in range(cached, cached + added):
            first = 0 if window is None else max(0, position - window)
            slots = table[request, first : position + 1]
            for head in range(query.shape[1]):
                k, v = keys[slots, head // group], values[slots, head // group]
                weights = torch.softmax(k @ query[row, head] / math.sqrt(query.shape[2]), 0)
                output[row, head] = weights @ v
            row += 1
    return output
