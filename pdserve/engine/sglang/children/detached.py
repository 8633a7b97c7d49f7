"""A storage backend that is detached: what SGLang believes of its pages is forgotten with it.

In `buffer_only` SGLang 0.5.23 remembers which pages are stored, and skips their backup. It keeps that when a
backend is detached. Pages of new weights have the same names, so they would never be stored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from pdserve.sglang_places import places

PLACES: Final = (
    *places(
        "sglang.srt.mem_cache.unified_radix_cache",
        "UnifiedRadixCache.detach_storage_backend(self)",
        "UnifiedRadixCache.__init__ sets storage_existence_cache",
    ),
    *places("sglang.srt.mem_cache.buffer_mode.storage_existence_cache", "StorageExistenceCache.clear(self)"),
)


def forgetting(detach: Callable[[Any], tuple[bool, str]]) -> Callable[[Any], tuple[bool, str]]:
    """Wrap `UnifiedRadixCache.detach_storage_backend`."""

    @functools.wraps(detach)
    def detached(cache: Any) -> tuple[bool, str]:
        done, message = detach(cache)
        if done:
            cache.storage_existence_cache.clear()
        return done, message

    return detached


def install() -> None:
    """In this process, once, before its scheduler is made. Imports SGLang's."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    UnifiedRadixCache.detach_storage_backend = forgetting(UnifiedRadixCache.detach_storage_backend)
