"""Fetches from the pool that SGLang put off or gave up for lack of host memory: counted in its scheduler.

SGLang fetches nothing more while half of host memory waits for pages that are on their way, and a request is
computed where its turn comes first. It counts that, and shows it nowhere: `storage_prefetch_*` are of fetches
that were begun. So the growth of its counts becomes a metric of the worker (`fetches_declined`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

from pdserve.engine.metric_names import METRICS
from pdserve.metric import by_name

REASONS: Final[Mapping[str, str]] = {
    "declined_rate_limited": "others_under_way",
    "declined_host_oversize": "larger_than_host_memory",
}
"""SGLang's counts, and what they are called here."""


class DeclinedFetches:
    """The growth of SGLang's counts. `add`: (reason, how many more); first 0 of each, so all are shown."""

    def __init__(self, add: Callable[[str, int], None]) -> None:
        self._add = add
        self._seen = dict.fromkeys(REASONS, -1)

    def reading(self, snapshot: Callable[[Any], dict[str, float]]) -> Callable[[Any], dict[str, float]]:
        """Wrap `UnifiedRadixCache.prefetch_outcome_stats_snapshot`, which SGLang takes after each batch."""

        @functools.wraps(snapshot)
        def read(cache: Any) -> dict[str, float]:
            stats = snapshot(cache)
            for name, reason in REASONS.items():
                count, seen = int(stats.get(name, 0)), self._seen[name]
                if count > seen:
                    self._add(reason, count - max(0, seen))
                self._seen[name] = count
            return stats

        return read


def install() -> None:
    """In this process, once, before its scheduler is made. Imports SGLang's."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    cache = UnifiedRadixCache
    declined = DeclinedFetches(_Counter().add)
    cache.prefetch_outcome_stats_snapshot = declined.reading(cache.prefetch_outcome_stats_snapshot)


class _Counter:
    """Made at its first use: prometheus_client must not be imported before SGLang has set up its mode."""

    def __init__(self) -> None:
        self._counter: Any = None

    def add(self, reason: str, count: int) -> None:
        if self._counter is None:
            from prometheus_client import CollectorRegistry, Counter

            named = by_name(METRICS)["fetches_declined"]
            self._counter = Counter(named.family_name, named.says, named.labels, registry=CollectorRegistry())
        self._counter.labels(reason).inc(count)
