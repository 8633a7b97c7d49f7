"""SGLang's kernels of speculative decoding by torch, against simple references. No SGLang is imported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.e2e import cpu_drafts as drafts

TABLE = torch.tensor([[10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25], [30, 31, 32, 33, 34, 35]])


def test_a_chain_of_drafted_tokens_is_laid_out() -> None:
    seq_lens, width = torch.tensor([7, 3]), 3
    mask, positions = (
        torch.zeros(2 * width * width, dtype=torch.bool),
        torch.zeros(2 * width, dtype=torch.long),
    )
    index, following, sibling = (torch.full((2, width), -1) for _ in range(3))
    nothing = torch.empty(0)
    drafts.build_tree_kernel_efficient_cpu(
        nothing, nothing, seq_lens, mask, positions, index, following, sibling, 1, 2, width, 1
    )
    assert positions.tolist() == [7, 8, 9, 3, 4, 5]
    assert index.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert following.tolist() == [[1, 2, -1]] * 2
    assert sibling.tolist() == [[-1] * 3] * 2
    assert mask.view(2, width, width).tolist() == [torch.ones(width, width).tril().bool().tolist()] * 2
    with pytest.raises(NotImplementedError, match="eagle-topk"):
        drafts.build_tree_kernel_efficient_cpu(
            nothing, nothing, seq_lens, mask, positions, index, following, sibling, 2, 2, width, 1
        )


def verified(candidates: Any, wanted: Any, following: Any, sibling: Any, depth: int) -> tuple[Any, ...]:
    shape = torch.tensor(candidates).shape
    predicts = torch.zeros(shape.numel(), dtype=torch.int32)
    accepted = torch.full((shape[0], depth), -1, dtype=torch.int32)
    count = torch.zeros(shape[0], dtype=torch.int32)
    index = torch.arange(shape.numel()).view(shape)
    tensors = (torch.tensor(one) for one in (following, sibling, wanted))
    follow, side, target = tensors
    drafts.verify_tree_greedy_cpu(
        predicts, accepted, count, torch.tensor(candidates), index, follow, side, target
    )
    return predicts.tolist(), accepted.tolist(), count.tolist()


def test_drafted_tokens_are_accepted_up_to_the_first_that_is_wrong() -> None:
    chain = [[1, 2, 3, -1]] * 3
    drafted = [[9, 1, 2, 3], [9, 1, 2, 3], [9, 1, 2, 3]]
    wanted = [[1, 2, 3, 4], [1, 5, 3, 4], [6, 2, 3, 4]]
    predicts, accepted, count = verified(drafted, wanted, chain, [[-1] * 4] * 3, 4)
    assert count == [3, 1, 0]
    assert accepted == [[0, 1, 2, 3], [4, 5, -1, -1], [8, -1, -1, -1]]
    assert predicts == [1, 2, 3, 4, 1, 5, 0, 0, 6, 0, 0, 0]


def test_of_siblings_the_one_is_accepted_that_is_right() -> None:
    """0 is followed by 1 or 2, and 2 by 3."""
    predicts, accepted, count = verified(
        [[9, 1, 2, 3]], [[2, 0, 3, 4]], [[1, -1, 3, -1]], [[-1, 2, -1, -1]], 3
    )
    assert (count, accepted) == ([2], [[0, 2, 3]])
    assert predicts == [2, 0, 3, 4]


def test_slots_of_drafted_and_of_checked_tokens_are_those_of_their_requests() -> None:
    rows, starts = torch.tensor([2, 0]), torch.tensor([1, 3])
    out = torch.zeros(4, dtype=torch.long)
    drafts.assign_draft_cache_locs_contiguous_cpu(rows, TABLE, starts, out, 6, 1, 2)
    assert out.tolist() == [31, 32, 13, 14]
    drafts.assign_extend_cache_locs_cpu(rows, TABLE, starts, torch.tensor([4, 4]), out, 6)
    assert out.tolist() == [31, 32, 33, 13]
    table = TABLE.clone()
    drafts.assign_req_to_token_pool_cpu(rows, table, starts, torch.tensor([3, 4]), torch.tensor([1, 2, 3]), 6)
    assert table.tolist() == [[10, 11, 12, 3, 14, 15], TABLE[1].tolist(), [30, 1, 2, 33, 34, 35]]


def test_accepted_tokens_are_picked_out() -> None:
    bonus = torch.zeros(2, dtype=torch.int32)
    tokens = torch.tensor([[5, 6, 7], [8, 9, 4]])
    drafts.fill_bonus_tokens_cpu(tokens, torch.tensor([2, 3]), bonus, 3)
    assert bonus.tolist() == [6, 4]
    slots = torch.zeros(4, dtype=torch.long)
    accepted = torch.tensor([[0, 2, -1], [3, -1, -1]])
    drafts.fill_accept_out_cache_loc_cpu(accepted, torch.tensor([40, 41, 42, 43]), slots)
    assert slots.tolist() == [40, 42, 43, 0]


def test_slots_of_all_layers_move_as_they_were_before() -> None:
    layers = [torch.arange(5 * size).view(5, size).to(torch.float32) for size in (3, 2)]
    before = [layer.clone() for layer in layers]
    addresses = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64)
    strides = torch.tensor([12, 8])
    drafts.copy_all_layer_kv_cache_cpu(addresses, strides, torch.tensor([1, 2]), torch.tensor([4, 1]))
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer, old[[0, 4, 1, 3, 4]])


def test_checked_tokens_are_an_extension_of_what_is_cached() -> None:
    def forward(_self: Any, _q: Any, _k: Any, _v: Any, _layer: Any, batch: Any) -> Any:
        return batch.seq_lens.tolist(), batch.extend_prefix_lens.tolist(), batch.extend_seq_lens.tolist()

    def batch(*, checks: bool) -> Any:
        return SimpleNamespace(
            forward_mode=SimpleNamespace(is_target_verify=lambda: checks),
            spec_info=SimpleNamespace(draft_token_num=4),
            seq_lens=torch.tensor([7, 3]),
            extend_prefix_lens=torch.tensor([1, 1]),
            extend_seq_lens=torch.tensor([6, 2]),
        )

    run, checked = drafts.verifying(forward), batch(checks=True)
    assert run(None, 0, 0, 0, 0, checked) == ([11, 7], [7, 3], [4, 4])
    assert checked.seq_lens.tolist() == [7, 3]
    assert run(None, 0, 0, 0, 0, batch(checks=False)) == ([7, 3], [1, 1], [6, 2])
