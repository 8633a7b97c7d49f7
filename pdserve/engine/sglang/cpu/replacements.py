"""What takes the place of pieces of torch and SGLang that need a GPU: operators, streams and events, pinned
memory, page hashes.

Work on a CPU is done at once, so every wait for a stream is over when it starts.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any, Final

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
