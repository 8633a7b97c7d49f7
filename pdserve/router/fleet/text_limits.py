"""How much text a model's workers take, and how large a request can be. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.text_bound import NO_BOUND, TextBound

if TYPE_CHECKING:
    from pdserve.router.fleet.worker import WorkerInfo

LARGEST_BODY_BYTES: Final = 32 * 1024 * 1024
SMALLEST_BODY_BYTES: Final = 4 * 1024 * 1024
"""Room for lists of prompts and for tools, however short the context."""
BODY_BYTES_PER_TOKEN: Final = 64
"""A token of text has about 4 bytes, its number up to 8. JSON's escapes take six times as many."""


class TextLimit(msgspec.Struct, frozen=True):
    """What no worker of a model takes: a prompt of `tokens` or more. `bound`: how few a text can have."""

    tokens: int = 0
    bound: TextBound = NO_BOUND


NO_LIMIT: Final = TextLimit()


def text_limit(infos: Collection[WorkerInfo]) -> TextLimit:
    """Of one model's workers: the limit of the one that takes most. None where one says no bound."""
    bounds = [TextBound(info.longest_token_bytes, info.text_shrink) for info in infos]
    if not all(bounds) or any(info.context_length <= 0 for info in infos):
        return NO_LIMIT
    longest = max((bound.longest_token_bytes for bound in bounds), default=0)
    shrink = max((bound.text_shrink for bound in bounds), default=1)
    return TextLimit(max((info.context_length for info in infos), default=0), TextBound(longest, shrink))


def body_limit_bytes(infos: Collection[WorkerInfo]) -> int:
    """A bound on request bodies of all models that no usual request reaches. The largest for media, for lists
    of texts to embed, and where a worker does not say.
    """
    return max(map(_body_limit_bytes, infos), default=LARGEST_BODY_BYTES)


def _body_limit_bytes(info: WorkerInfo) -> int:
    if info.is_multimodal is not False or "embed" in info.tasks or info.context_length <= 0:
        return LARGEST_BODY_BYTES
    needed_bytes = info.context_length * BODY_BYTES_PER_TOKEN
    return min(max(needed_bytes, SMALLEST_BODY_BYTES), LARGEST_BODY_BYTES)
