"""Speculative decoding on a CPU, for tests: SGLang's kernels and attention of draft models, by torch.

Importing it adds to the hooks of schedulers that start from this process (`cpu.hooks.SCHEDULER_HOOKS`); the
warm server does. Users need a GPU, or a processor with AMX.

SGLang 0.5.23 runs speculative decoding on a CPU with its AMX kernels only. What they compute is simple where
each step drafts one token (`--speculative-eagle-topk 1`): SGLang itself refuses more with pages of more than
one token.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import importlib
from collections.abc import Callable
from typing import Any, Final

import torch

from pdserve.engine.sglang.cpu import hooks

ATTENTION: Final = "torch_native"


def build_tree_kernel_efficient_cpu(
    _parent_list: torch.Tensor,
    _top_scores_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    _retrieve_next_sibling: torch.Tensor,
    topk: int,
    _spec_steps: int,
    num_verify_tokens: int,
    _tree_mask_mode: int,
) -> None:
    """Fill in the chain of drafted tokens: `positions` [requests * tokens], `retrieve_*` [requests, tokens].

    Raises NotImplementedError for trees.
    """
    if topk != 1:
        raise NotImplementedError("trees of drafted tokens (--speculative-eagle-topk over 1)")
    requests, width = len(seq_lens), num_verify_tokens
    steps = torch.arange(width)
    positions.copy_((seq_lens[:, None] + steps).flatten())
    retrieve_index.copy_(torch.arange(requests * width).view(requests, width))
    retrieve_next_token[:, :-1] = steps[1:]
    tree_mask[: requests * width * width].view(requests, width, width).copy_(steps[:, None] >= steps)


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Follow each request's tree as long as a drafted token is what the model says itself.

    `candidates`, `retrive_*`, `target_predict`: [requests, tokens]; `accept_index`: [requests, depth].
    """
    index, following, sibling = (
        one.tolist() for one in (retrive_index, retrive_next_token, retrive_next_sibling)
    )
    drafted, wanted = candidates.tolist(), target_predict.tolist()
    for request in range(len(drafted)):
        node, accepted = 0, [index[request][0]]
        while len(accepted) < accept_index.shape[1]:
            child = following[request][node]
            while child != -1 and drafted[request][child] != wanted[request][node]:
                child = sibling[request][child]
            if child == -1:
                break
            predicts[index[request][node]] = wanted[request][node]
            accepted.append(index[request][child])
            node = child
        predicts[index[request][node]] = wanted[request][node]
        accept_index[request, : len(accepted)] = torch.tensor(accepted, dtype=accept_index.dtype)
        accept_token_num[request] = len(accepted) - 1


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    _pool_len: int,
    topk: int,
    num_cols: int,
) -> None:
    """Slots of the tokens that are drafted next, `topk * num_cols` of each request."""
    columns = seq_lens[:, None] + torch.arange(topk * num_cols)
    out_cache_loc.copy_(req_to_token[req_pool_indices[:, None], columns].flatten())


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    _pool_len: int,
) -> None:
    """Slots of the tokens from `start_offset` to `end_offset`, one request after the other."""
    ranges = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    slots = torch.cat([req_to_token[row, start:end] for row, start, end in ranges])
    out_cache_loc[: len(slots)] = slots.to(out_cache_loc.dtype)


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int
) -> None:
    """The last accepted token of each request."""
    rows = torch.arange(len(accept_lens))
    bonus_tokens.copy_(accept_tokens.flatten()[rows * accept_stride + accept_lens - 1])


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Slots of accepted tokens, side by side."""
    accepted = accept_index.flatten()
    slots = out_cache_loc[accepted[accepted > -1].long()]
    accept_out_cache_loc[: len(slots)] = slots


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    _pool_len: int,
) -> None:
    """Note new slots of each request."""
    ranges = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    first = 0
    for row, start, end in ranges:
        req_to_token[row, start:end] = out_cache_loc[first : first + end - start].to(req_to_token.dtype)
        first += end - start


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copy slots of all layers. `data_ptrs`: addresses of the buffers, `strides`: bytes of a slot in each."""
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for start, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(start + source * size, size) for source in sources]
        for target, row in zip(targets, rows, strict=True):
            ctypes.memmove(start + target * size, row, size)


def verifying(forward_extend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A `forward_extend` that knows batches whose drafted tokens are checked: SGLang says their lengths in
    another place.
    """

    @functools.wraps(forward_extend)
    def extend(
        self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **more: Any
    ) -> Any:
        if forward_batch.forward_mode.is_target_verify():
            width = forward_batch.spec_info.draft_token_num
            lengths = forward_batch.seq_lens
            forward_batch = copy.copy(forward_batch)
            forward_batch.extend_prefix_lens = lengths
            forward_batch.extend_seq_lens = torch.full_like(lengths, width)
            forward_batch.seq_lens = lengths + width
        return forward_extend(self, q, k, v, layer, forward_batch, *args, **more)

    return extend


class DraftSteps:
    """Attention of the steps in which one token after the other is drafted, as SGLang wants it."""

    def __init__(self, backends: list[Any]) -> None:
        self.attn_backends = backends

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Called before the first step."""
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


def with_torch(create_backend: Callable[..., Any]) -> Callable[..., Any]:
    """A `DraftBackendFactory._create_backend` that knows torch's attention too."""

    @functools.wraps(create_backend)
    def create(self: Any, backend_name: str, backend_map: dict[str, Any], *args: Any, **more: Any) -> Any:
        native = importlib.import_module(
            "sglang.srt.layers.attention.torch_native_backend"
        ).TorchNativeAttnBackend

        def made() -> tuple[str, Any]:
            if backend_name != "decode_attention_backend":
                return ATTENTION, native(self.draft_model_runner)
            steps = range(1, self.speculative_num_steps)
            return ATTENTION, DraftSteps([_step(native, step)(self.draft_model_runner) for step in steps])

        return create_backend(self, backend_name, {**backend_map, ATTENTION: made}, *args, **more)

    return create


def _step(native: type[Any], drafted: int) -> type[Any]:
    """Torch's attention, where so many tokens were drafted before."""

    class Step(native):  # type: ignore[misc]
        def forward_decode(
            self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **more: Any
        ) -> Any:
            forward_batch = copy.copy(forward_batch)
            forward_batch.seq_lens = forward_batch.seq_lens + drafted
            return super().forward_decode(q, k, v, layer, forward_batch, *args, **more)

    return Step


KERNELS: Final[dict[str, dict[str, Callable[..., None]]]] = {
    "sglang.kernels.ops.speculative.spec_tree": {
        "sgl_build_tree_kernel_efficient_cpu": build_tree_kernel_efficient_cpu,
        "sgl_verify_tree_greedy_cpu": verify_tree_greedy_cpu,
    },
    "sglang.kernels.ops.speculative.cache_locs": {
        "assign_draft_cache_locs_contiguous_cpu": assign_draft_cache_locs_contiguous_cpu,
        "assign_extend_cache_locs_cpu": assign_extend_cache_locs_cpu,
    },
    "sglang.kernels.ops.speculative.eagle": {
        "fill_bonus_tokens_cpu": fill_bonus_tokens_cpu,
        "fill_accept_out_cache_loc_cpu": fill_accept_out_cache_loc_cpu,
    },
    "sglang.kernels.ops.kvcache.cache_move": {"copy_all_layer_kv_cache_cpu": copy_all_layer_kv_cache_cpu},
    "sglang.srt.mem_cache.allocation": {"assign_req_to_token_pool_cpu": assign_req_to_token_pool_cpu},
}
hooks.SCHEDULER_HOOKS += (
    *(
        hooks.Hook(module, name, lambda _original, kernel=kernel: kernel)
        for module, kernels in KERNELS.items()
        for name, kernel in kernels.items()
    ),
    hooks.Hook(hooks.ATTENTION_BACKEND, "TorchNativeAttnBackend.forward_extend", verifying),
    hooks.Hook("sglang.srt.speculative.draft_utils", "DraftBackendFactory._create_backend", with_torch),
)
