"""Requests that only fetch pages: SGLang pulls them from the pool for a request that is to come.

SGLang fetches pages from storage only for requests that wait to be scheduled. So a request whose id begins
with PULL_ID waits like any other while its pages come. What becomes of it then depends on
`--hicache-host-memory-mode`:

| mode | where its pages are then | the pull |
|---|---|---|
| cache | in the tree of host pages, where the real request finds them | is taken out of the queue |
| buffer_only | in host memory that the pull alone owns, and that is freed with it | is let through |

A pull that is let through has SGLang copy its pages to the device, into the tree where the real request finds
them. It computes what no page holds: less than a page of prompt, and one token. A pull of which a page is
missing is taken out of the queue in either mode: whole pages are never computed for one, not even where
nothing was found or host memory is short. Meanwhile SGLang's counts of waiting requests and tokens include
it, and in the end its count of aborted requests or of answered ones.

All ranks of a worker decide alike, since SGLang ends a fetch on all of them in the same step. Ranks of a
pipeline do not in buffer_only, which is refused there (`server_args.check_host_memory`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

PULL_ID: Final = "pdserve-pull-"
"""The prefix of the ids of such requests."""

_MARK: Final = "__pdserve_pulls__"


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
            cache = scheduler.tree_cache
            if not cache.has_ongoing_prefetch(pull.cache_request_handle) and not _has_all(cache, pull):
                scheduler.abort_request(AbortReq(rid=pull.rid))

    setattr(process, _MARK, True)
    return process


def _has_all(cache: Any, pull: Any) -> bool:
    """In buffer_only: all its pages were fetched and wait for it alone. Its last token is never looked up."""
    span = cache.waiting_storage_span(pull.cache_request_handle)
    pages = (len(pull.origin_input_ids) - 1) // cache.page_size
    return span is not None and bool(span[1] >= pages * cache.page_size)
