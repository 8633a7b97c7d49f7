"""Prompts that a worker in SGLang's prefill mode computes for the pool, and sends to nobody.

SGLang has no such requests but its own warm-ups, which have a host that nobody has (`FAKE_BOOTSTRAP_HOST`).
It sends nothing for them, and keeps none of their pages. Requests in the room POOL_ROOM are like them, and
their pages are kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

POOL_ROOM: Final = 2**62
"""The rooms of two workers are below it. Several prompts of a request have it and those above it."""

_MARK: Final = "__pdserve_kept_prompts__"


def install() -> None:
    """Make the scheduler of this process keep their pages; again is a no-op. Imports SGLang's scheduler."""
    from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue

    original = PrefillBootstrapQueue.create_sender
    if not getattr(original, _MARK, False):
        PrefillBootstrapQueue.create_sender = keeping(original)


def keeping(create_sender: Callable[..., bool]) -> Callable[..., bool]:
    """`PrefillBootstrapQueue.create_sender`, through which every request of SGLang's prefill mode goes."""

    @functools.wraps(create_sender)
    def create(queue: Any, req: Any, num_kv_heads: int) -> bool:
        if req.bootstrap_room is not None and req.bootstrap_room >= POOL_ROOM:
            req.skip_radix_cache_insert = False
        return create_sender(queue, req, num_kv_heads)

    setattr(create, _MARK, True)
    return create
