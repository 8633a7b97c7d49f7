"""What becomes of the pages that a scheduler fetches from the pool, request by request.

SGLang asks for a request's pages when the request comes, on a thread, and looks at the beginning of each of
its steps what has become of it:

    step n       the request comes: the pool is asked which of its pages it has
    step n + 1   the answer is seen, and the pages are read into host memory
    step n + 2   they are seen to be there: the request is admitted

Beside a stream a step takes 10 to 200 ms, and the answer comes in one or two. So the step that asks waits for
the answer, `LOOKUP_S` at most, and then for the pages, as long as the step before took and `READ_S` at most:
what takes longer is there in time for the next one. So the request is admitted in the same step, a step or
two sooner. Requests that only fetch are not waited for.

All ranks are told of the same requests, so each of them looks as often as the others.

Importing this module imports neither SGLang nor torch.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from queue import Queue
from typing import Any, Final

from pdserve.engine.metric_names import METRICS
from pdserve.metric import by_name

PULL_ID: Final = "pdserve-pull-"
"""The prefix of the ids of requests that only fetch pages."""
LOOKUP_S: Final = 0.005
"""How long a step may wait for the pool's answers, about all requests that came with it."""
READ_S: Final = 0.05
"""How long a step may wait for the pages of all requests that came with it: 250 MB come in that time."""
MOST: Final = 4096
"""Fetches that are remembered; of aborted requests nobody says the end."""
STEPS: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
DECLINED: Final[Mapping[str, str]] = {
    "declined_rate_limited": "others_under_way",
    "declined_host_oversize": "larger_than_host_memory",
}
"""SGLang's counts of fetches that it declined, and what they are called here."""


class Fetches:
    """The requests of one scheduler for which the pool was asked. `observe(outcome, steps)`: one was
    admitted, so many steps after the one that it came with; hit: with pages of the pool, miss: with none.
    """

    def __init__(
        self, observe: Callable[[str, int], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._observe = observe
        self._clock = clock
        self._step = 0
        self._began_s = clock()
        self._asked: dict[Any, int] = {}  # request -> step
        self._new = 0  # that were asked for since the last step began

    def asked(self, prefetch: Callable[..., Any]) -> Callable[..., Any]:
        """`UnifiedRadixCache.prefetch_from_storage`: a request has come, or is asked for again."""

        @functools.wraps(prefetch)
        def ask(cache: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            is_known = cache.has_ongoing_prefetch(request)
            decision = prefetch(cache, request, *args, **kwargs)
            if not is_known and cache.has_ongoing_prefetch(request):
                self._new += 1
                self._asked.setdefault(request, self._step)
                if len(self._asked) > MOST:
                    del self._asked[next(iter(self._asked))]
            return decision

        return ask

    def stepped(self, process_events: Callable[..., None]) -> Callable[..., None]:
        """`Scheduler._process_hicache_events`: a step begins, and has asked for the requests that came."""

        @functools.wraps(process_events)
        def process(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            now_s = self._clock()
            step_s, self._began_s = now_s - self._began_s, now_s
            if self._new:
                controller = scheduler.tree_cache.cache_controller
                answers, read = controller.prefetch_hit_queue, controller.ack_prefetch_queue
                _await(answers, lambda: len(answers.queue) >= self._new, LOOKUP_S)
                hits = sum(one.storage_hit_count > 0 and _is_waited_for(one) for one in answers.queue)
                self._new = 0
                process_events(scheduler, *args, **kwargs)  # has the pages read
                _await(read, lambda: sum(map(_is_read, read.queue)) >= hits, min(READ_S, step_s))
            self._step += 1
            process_events(scheduler, *args, **kwargs)

        return process

    def admitted(self, pop_loaded: Callable[..., Any]) -> Callable[..., Any]:
        """`UnifiedRadixCache.pop_prefetch_loaded_span`: a request is admitted with so many tokens loaded."""

        @functools.wraps(pop_loaded)
        def pop(cache: Any, request: Any) -> Any:
            loaded_tokens, start = pop_loaded(cache, request)
            step = self._asked.pop(request, None)
            if step is not None:
                self._observe("hit" if loaded_tokens else "miss", self._step - step - 1)
            return loaded_tokens, start

        return pop


def _is_waited_for(operation: Any) -> bool:
    return not operation.request_id.startswith(PULL_ID)


def _is_read(progress: Any) -> bool:
    return bool(progress.completed_req) and _is_waited_for(progress.operation)


def _await(queue: Queue[Any], come: Callable[[], bool], timeout_s: float) -> None:
    with queue.not_empty:
        queue.not_empty.wait_for(come, timeout_s)


class Declined:
    """The growth of SGLang's counts of fetches that it put off or gave up for lack of host memory: it fetches
    nothing more while half of that waits for pages on their way, and shows the counts nowhere. `add`:
    (reason, how many more); first 0 of each, so that all are shown.
    """

    def __init__(self, add: Callable[[str, int], None]) -> None:
        self._add = add
        self._seen = dict.fromkeys(DECLINED, -1)

    def counted(self, snapshot: Callable[[Any], dict[str, float]]) -> Callable[[Any], dict[str, float]]:
        """SGLang takes a snapshot after each batch."""

        def read(cache: Any) -> dict[str, float]:
            stats = snapshot(cache)
            for name, reason in DECLINED.items():
                count, seen = int(stats.get(name, 0)), self._seen[name]
                if count > seen:
                    self._add(reason, count - max(0, seen))
                self._seen[name] = count
            return stats

        return read


class FetchMetrics:
    """Made at their first use: prometheus_client must not be imported before SGLang has set up its mode."""

    @functools.cached_property
    def _registry(self) -> Any:
        from prometheus_client import CollectorRegistry

        return CollectorRegistry()

    @functools.cached_property
    def _declined(self) -> Any:
        from prometheus_client import Counter

        named = by_name(METRICS)["fetches_declined"]
        return Counter(named.family_name, named.says, named.labels, registry=self._registry)

    @functools.cached_property
    def _steps(self) -> Any:
        from prometheus_client import Histogram

        named = by_name(METRICS)["fetch_steps"]
        return Histogram(named.family_name, named.says, named.labels, registry=self._registry, buckets=STEPS)

    def declined(self, reason: str, count: int) -> None:
        """So many more fetches were."""
        self._declined.labels(reason).inc(count)

    def steps(self, outcome: str, steps: int) -> None:
        """A request was admitted."""
        self._steps.labels(outcome).observe(steps)
