"""How busy this worker is, by SGLang's own account."""

from __future__ import annotations

from typing import Any


def load_of(tokenizer_manager: Any) -> dict[str, int] | None:
    """Requests running and waiting, the uncached prompt tokens of those that wait, and the KV memory that is
    free or can be freed, in tokens; summed over data-parallel ranks. None while SGLang has not said.

    The scheduler writes a `LoadSnapshot` (sglang/srt/managers/load_snapshot.py) into shared memory after its
    batches and when it falls idle; reading it asks nothing of the scheduler.
    """
    ranks = tokenizer_manager.load_snapshot_reader.read_all()
    if not ranks:
        return None
    return {
        "running_requests": sum(rank.num_running_reqs for rank in ranks),
        "waiting_requests": sum(rank.num_waiting_reqs for rank in ranks),
        "queued_tokens": sum(rank.num_waiting_uncached_tokens for rank in ranks),
        "free_kv_tokens": sum(max(0, rank.max_total_num_tokens - rank.num_used_tokens) for rank in ranks),
    }
