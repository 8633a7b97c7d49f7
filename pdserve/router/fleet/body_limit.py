"""How large a request's body can be, from what workers say of their model. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pdserve.router.fleet.worker import WorkerInfo

LARGEST_BODY_BYTES: Final = 32 * 1024 * 1024
SMALLEST_BODY_BYTES: Final = 4 * 1024 * 1024
"""Room for lists of prompts and for tools, however short the context."""
BODY_BYTES_PER_TOKEN: Final = 64
"""A token of text has about 4 bytes, its number up to 8. JSON's escapes take six times as many."""


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
