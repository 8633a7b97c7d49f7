"""What speculative decoding adds to a worker: weights of its draft model, and keys and values. Pure.

    the draft model                      its keys and values        its weights
    MTP layers of the model (NEXTN)      more layers of each page   in the model's files
    MTP layers in files of their own     more layers of each page   on each GPU beside the model's
    EAGLE, EAGLE3, STANDALONE            pages of their own         on each GPU beside the model's
    none (NGRAM)                         none                       none

The worker tells them apart in the same way (`engine/sglang/drafts.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from pdserve.capacity.facts import Draft, Model, WorkerNeed

_PACKED: Final = frozenset({"EAGLE", "NEXTN"})
_WITHOUT: Final = frozenset({"", "NGRAM"})


def with_draft(path: str, worker: WorkerNeed, read_model: Callable[[str], Model]) -> Model:
    """The model in `path`, and what drafts for it in this worker. Raises what `read_model` raises."""
    model = read_model(path)
    if worker.draft_algorithm in _WITHOUT:
        return model
    # SGLang takes the model itself where none is named: it has MTP layers then
    is_own = worker.draft_path in ("", path)
    found = model if is_own else read_model(worker.draft_path)
    is_packed = worker.draft_algorithm in _PACKED and found.mtp_layers > 0
    draft = Draft(
        name="MTP layers" if is_own else found.name,
        weight_bytes=0 if is_own else found.weight_bytes,
        layers=found.mtp_layers if is_packed else found.layers + found.sliding_layers,
        kv_heads=found.kv_heads,
        token_values=found.token_values,
        dtype_bytes=found.dtype_bytes,
        is_packed=is_packed,
    )
    return replace(model, draft=draft)
