"""By which way a prompt's KV gets from the prefill worker to the decode worker: a pure choice.

Decode workers are of one of two kinds, and say which (`/pd/info`). One kind computes prompts, and reads pages
from the pool. The other takes the KV that a prefill worker sends it (`direct`), and computes no prompt. So
the way decides which decode workers a request can have. Prefill workers of the direct kind serve both ways.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

Handoff = Literal["pool", "direct"]
HandoffChoice = Literal["auto", "pool", "direct"]


def choose_handoff(
    wanted: HandoffChoice,
    possible: Collection[Handoff],
    *,
    home: Handoff | None,
    reused_tokens: int,
    pool_from_tokens: int,
) -> tuple[Handoff, str]:
    """The way, and why in one word. `possible` is not empty.

    `home`: the way of the worker that answered the session's last turn, if it is eligible: it has most of the
    prompt in its own memory. `reused_tokens`: estimated tokens of the prompt that some cache has.
    """
    if len(possible) == 1:
        return next(iter(possible)), "only"
    if wanted != "auto":
        return wanted, "configured"
    if home is not None:
        return home, "session"
    if reused_tokens >= pool_from_tokens:
        return "pool", "reused"
    return "direct", "new"
