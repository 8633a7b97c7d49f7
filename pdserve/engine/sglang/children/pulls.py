"""Requests that only fetch pages: SGLang pulls them from the pool into its host memory, and computes nothing.

SGLang fetches pages from storage only for requests that wait to be scheduled. So a request whose id begins
with PULL_ID waits like any other while its pages come. When no page is on its way any more, it is taken out
of the queue. By then the pages are in the tree of host pages, where the real request finds them. Such a
request is never computed, not even where nothing was found or host memory is short. Meanwhile SGLang's
counts of waiting requests and tokens include it, and in the end its count of aborted requests.

All ranks of a worker decide alike, since SGLang ends a fetch on all of them in the same step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from pdserve.sglang_places import places

PULL_ID: Final = "pdserve-pull-"
"""The prefix of the ids of such requests."""

_MARK: Final = "__pdserve_pulls__"

PLACES: Final = (
    *places(
        "sglang.srt.managers.scheduler",
        "Scheduler._process_hicache_events(self)",
        "Scheduler.abort_request(recv_req)",
    ),
    *places("sglang.srt.managers.io_struct", "AbortReq(rid)"),
    *places("sglang.srt.managers.schedule_batch", "Req.__init__ sets rid, cache_request_handle"),
    *places("sglang.srt.mem_cache.unified_radix_cache", "UnifiedRadixCache.has_ongoing_prefetch(handle)"),
)


def install() -> None:
    """Make the scheduler of this process end such requests; again is a no-op. Imports SGLang's scheduler."""
    from sglang.srt.managers.scheduler import Scheduler

    original = Scheduler._process_hicache_events
    if not getattr(original, _MARK, False):
        Scheduler._process_hicache_events = ending_pulls(original)


def ending_pulls(process_events: Callable[..., None]) -> Callable[..., None]:
    """`Scheduler._process_hicache_events`, which every step begins with, before it looks at the queue."""
    from sglang.srt.managers.io_struct import AbortReq

    @functools.wraps(process_events)
    def process(scheduler: Any, *args: Any, **kwargs: Any) -> None:
        process_events(scheduler, *args, **kwargs)
        for pull in [request for request in scheduler.waiting_queue if request.rid.startswith(PULL_ID)]:
            if not scheduler.tree_cache.has_ongoing_prefetch(pull.cache_request_handle):
                scheduler.abort_request(AbortReq(rid=pull.rid))

    setattr(process, _MARK, True)
    return process
