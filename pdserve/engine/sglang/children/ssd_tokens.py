"""Tokens of a request that a pool node brought up from a tier: counted in SGLang's scheduler process.

SGLang counts the tokens of each request that came from storage, but not from which tier. Its one reading
thread knows the request of a batch of pages; our backend knows how many of the pages came from a tier. Here
they are added up by request, and reported beside SGLang's count (`cached_tokens_details`). Some pages are
read and then not used; so the count is at most SGLang's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from pdserve.engine.sglang.answers import SSD_DETAIL
from pdserve.kvpool.hicache import ssd_pages
from pdserve.sglang_places import places

MAX_REQUESTS: Final = 4096

PLACES: Final = (
    *places(
        "sglang.srt.managers.cache_controller",
        "HiCacheController._page_get_zero_copy(operation, hash_values, host_indices, extra_info)",
        "HiCacheController._page_get_zero_copy uses batch_get_v1",
        "PrefetchOperation.__init__ sets request_id",
    ),
    *places(
        "sglang.srt.managers.scheduler_components.output_streamer",
        "SchedulerOutputStreamer.get_cached_tokens_details(req) fills in storage",
    ),
)


class SsdTokens:
    """By SGLang's request id, of the newest requests that have any. One thread adds, another reads."""

    def __init__(self) -> None:
        self._of: dict[str, int] = {}

    def of(self, rid: str) -> int:
        """Tokens of this request that came from below the pool's memory."""
        return self._of.get(rid, 0)

    def counting(self, page_get: Callable[..., int]) -> Callable[..., int]:
        """Wrap `HiCacheController._page_get_zero_copy`. It reads a batch and returns how many pages came."""

        @functools.wraps(page_get)
        def counted(controller: Any, operation: Any, *args: Any, **kwargs: Any) -> int:
            with ssd_pages.counting() as read:
                pages = page_get(controller, operation, *args, **kwargs)
            if from_ssd := min(pages, read.pages):
                rid = operation.request_id
                self._of[rid] = self._of.pop(rid, 0) + from_ssd * controller.page_size
                if len(self._of) > MAX_REQUESTS:
                    del self._of[next(iter(self._of))]
            return pages

        return counted

    def telling(
        self, details_of: Callable[[Any, Any], dict[str, Any] | None]
    ) -> Callable[[Any, Any], dict[str, Any] | None]:
        """Wrap `SchedulerOutputStreamer.get_cached_tokens_details`."""

        @functools.wraps(details_of)
        def told(streamer: Any, req: Any) -> dict[str, Any] | None:
            details = details_of(streamer, req)
            tokens = self.of(req.rid)
            if details and tokens:
                details[SSD_DETAIL] = min(tokens, details.get("storage", 0))
            return details

        return told


def install() -> None:
    """In this process, once, before its scheduler is made. Imports SGLang's."""
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

    tokens = SsdTokens()
    HiCacheController._page_get_zero_copy = tokens.counting(HiCacheController._page_get_zero_copy)
    streamer = SchedulerOutputStreamer
    streamer.get_cached_tokens_details = tokens.telling(streamer.get_cached_tokens_details)
