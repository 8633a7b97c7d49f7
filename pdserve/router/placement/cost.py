"""The cost function: one number in milliseconds for a request at a worker. Lower is better.

    cost_ms = prefill_ms_per_token    * (queued tokens + uncached tokens)
            + host_ms_per_token       * tokens in the worker's host memory
            + pool_ms_per_token       * tokens in the pool
            + running_ms_per_request  * requests at the worker
            + missing_kv_ms_per_token * tokens for which the worker has no free KV memory

The cost is roughly the time to the first token, plus the delay of other requests at the worker. Tokens in
device memory cost nothing. The weights are in the configuration (`[placement]`). Good values come from
measurements: the prefill rate of the GPU, and the bytes of KV per token divided by the pool's bandwidth.
"""

from __future__ import annotations

from pdserve.router.config.placement import PlacementSettings
from pdserve.router.fleet.worker import Worker
from pdserve.router.placement.prefix_index import Cached


def cost_ms(weights: PlacementSettings, worker: Worker, prompt_tokens: int, cached: Cached) -> float:
    """The cost in ms of `prompt_tokens` at `worker`."""
    uncached = max(0.0, prompt_tokens - cached.device - cached.host - cached.pool)
    cost = weights.prefill_ms_per_token * (worker.queued_tokens + uncached)
    cost += weights.host_ms_per_token * cached.host + weights.pool_ms_per_token * cached.pool
    cost += weights.running_ms_per_request * (worker.in_flight + worker.elsewhere)
    if worker.free_kv_tokens is not None:
        missing = prompt_tokens - cached.device - worker.free_kv_tokens
        cost += weights.missing_kv_ms_per_token * max(0.0, missing)
    return cost


def cost_words(total_ms: float, worker: Worker, prompt_tokens: int, cached: Cached) -> str:
    """The cost and its parts as text, for the log line and the response header."""
    uncached = max(0, int(prompt_tokens - cached.total))
    return f"{total_ms:.1f}ms uncached={uncached} queued={worker.queued_tokens} requests={worker.load}"
