"""Requests that only fetch: SGLang pulls their prompt's pages from the pool into its host memory, and no
more.

SGLang fetches pages from storage only for requests that wait to be scheduled, and has no other way in. So a
request whose id begins with PULL_ID waits like any other while its pages come, and is taken out of the queue
when none of them is under way any more: by then they are in the tree of host pages, where the real request
finds them. It is never computed, not even where nothing was found or host memory is short. SGLang's counts of
waiting requests and tokens include it for that while, those of aborted requests too.

All ranks of a worker decide alike: SGLang ends a fetch on all of them in the same step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from pdserve.sglang_places import Place

PULL_ID: Final = "pdserve-pull-"
"""How the ids of such requests begin."""

_MARK: Final = "__pdserve_pulls__"

PLACES: Final = (
    Place("sglang.srt.managers.scheduler", "Scheduler._process_hicache_events", parameters=("self",)),
    Place("sglang.srt.managers.scheduler", "Scheduler.abort_request", parameters=("recv_req",)),
    Place("sglang.srt.managers.io_struct", "AbortReq", parameters=("rid",)),
    Place("sglang.srt.managers.schedule_batch", "Req.__init__", attributes=("rid", "cache_request_handle")),
    Place(
        "sglang.srt.mem_cache.unified_radix_cache",
        "UnifiedRadixCache.has_ongoing_prefetch",
        parameters=("handle",),
    ),
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
