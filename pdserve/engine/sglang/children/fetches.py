"""What becomes of the pages that a scheduler fetches from the pool, request by request.

SGLang asks for a request's pages when the request comes, on a thread, and looks at the beginning of each of
its steps what has become of it:

    step n       the request comes: the pool is asked which of its pages it has
    step n + 1   the answer is seen, and the pages are read into host memory
    step n + 2   they are seen to be there: the request is admitted

Beside a stream a step takes 10 to 200 ms, and the answer comes in one or two. So the step that asks waits for
the answer, `LOOKUP_S` at most, and what is above happens a step sooner.

Importing this module imports neither SGLang nor torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from queue import Queue
from typing import Any, Final

from pdserve.engine.metric_names import METRICS
from pdserve.metric import by_name

LOOKUP_S: Final = 0.005
"""How long a step may wait for the pool's answers, about all requests that came with it."""
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

    def __init__(self, observe: Callable[[str, int], None]) -> None:
        self._observe = observe
        self._step = 0
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
            if self._new:
                answers: Queue[Any] = scheduler.tree_cache.cache_controller.prefetch_hit_queue
                with answers.not_empty:
                    answers.not_empty.wait_for(lambda: len(answers.queue) >= self._new, LOOKUP_S)
                self._new = 0
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
