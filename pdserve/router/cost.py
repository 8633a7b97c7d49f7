"""What a request costs at a worker: one number, in milliseconds, by which workers are compared.

    cost_ms = prefill_ms_per_token    * (queued tokens + uncached tokens)
            + host_ms_per_token       * tokens in the worker's host memory
            + pool_ms_per_token       * tokens in the pool
            + running_ms_per_request  * requests at the worker
            + missing_kv_ms_per_token * tokens for which the worker has no free KV memory
            + leave_ms                  unless the session's last turn was there

It is roughly the time to the first token, and what the request does to others there. The weights stand in
the configuration (`[placement]`) with their units; measure yours: the prefill rate of your GPU, the bytes of
KV per token over the pool's bandwidth. Tokens in device memory cost nothing.
"""

from __future__ import annotations

import msgspec

from pdserve.router.placement_config import PlacementSettings
from pdserve.router.prefixes import Cached
from pdserve.router.workers import Worker


class Cost(msgspec.Struct, frozen=True, gc=False):
    """The cost of a request at a worker, and what made it."""

    total_ms: float
    uncached_tokens: int
    queued_tokens: int
    requests: int

    def words(self) -> str:
        """For the log line and the response header."""
        return (
            f"{self.total_ms:.1f}ms uncached={self.uncached_tokens} queued={self.queued_tokens} "
            f"requests={self.requests}"
        )


def cost_of(
    weights: PlacementSettings, worker: Worker, prompt_tokens: int, cached: Cached, *, leaves: bool = False
) -> Cost:
    """The cost of a prompt of so many tokens at `worker`. `leaves`: the session's last turn was elsewhere."""
    uncached = max(0.0, prompt_tokens - cached.device - cached.host - cached.pool)
    needed = max(0.0, prompt_tokens - cached.device)
    free = worker.free_kv_tokens
    missing = 0.0 if free is None or free >= needed else needed - free
    requests = worker.load
    total_ms = (
        weights.prefill_ms_per_token * (worker.queued_tokens + uncached)
        + weights.host_ms_per_token * cached.host
        + weights.pool_ms_per_token * cached.pool
        + weights.running_ms_per_request * requests
        + weights.missing_kv_ms_per_token * missing
        + (weights.leave_ms if leaves else 0.0)
    )
    return Cost(total_ms, int(uncached), worker.queued_tokens, requests)
