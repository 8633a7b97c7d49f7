"""How many of a request's tokens the pool had below its memory: counted in SGLang's scheduler process.

SGLang says of each request how many of its tokens came from storage, not where that had them. Its one reading
thread knows which request a batch of pages is for, and our backend how many of them a pool node had to bring
up from a tier. They are added up by request here, and said beside SGLang's count (`cached_tokens_details`).
Of pages that were read for a request and then not used they are the last, so it is at most SGLang's count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from pdserve.engine.sglang.answers import SSD_DETAIL
from pdserve.kvpool.hicache import ssd_pages
from pdserve.sglang_places import Place

MAX_REQUESTS: Final = 4096

_CONTROLLER = "sglang.srt.managers.cache_controller"
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer"
PLACES: Final = (
    Place(
        _CONTROLLER,
        "HiCacheController._page_get_zero_copy",
        parameters=("operation", "hash_values", "host_indices", "extra_info"),
        calls=("batch_get_v1",),
    ),
    Place(_CONTROLLER, "PrefetchOperation.__init__", attributes=("request_id",)),
    Place(
        _STREAMER,
        "SchedulerOutputStreamer.get_cached_tokens_details",
        parameters=("req",),
        texts=("storage",),
    ),
)


class SsdTokens:
    """By SGLang's request id: the newest that have any. One thread adds, another asks."""

    def __init__(self) -> None:
        self._of: dict[str, int] = {}

    def of(self, rid: str) -> int:
        """Tokens of this request that came from below the pool's memory."""
        return self._of.get(rid, 0)

    def counting(self, page_get: Callable[..., int]) -> Callable[..., int]:
        """For `HiCacheController._page_get_zero_copy`, which reads a batch: how many pages from its start."""

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
        """For `SchedulerOutputStreamer.get_cached_tokens_details`."""

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
