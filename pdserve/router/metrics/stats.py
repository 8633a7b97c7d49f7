"""The router's metrics: plain counters on the hot path, copied into a `Snapshot` when asked for.

Counting is a dictionary increment; prometheus_client's own counters take a lock each and cost ten times
that. `names` lists the metrics, `exposition` shows them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from typing import Final

import msgspec

from pdserve.metric import Labels

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
MAX_PLACEMENTS: Final = 64
"""Label values of placements; policies of other packages may have any words."""


class Histogram(msgspec.Struct):
    """Observations in seconds: how many in each of `BUCKETS_S` and beyond, and their sum."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    sum_s: float = 0.0

    def __add__(self, other: Histogram) -> Histogram:
        counts = [one + more for one, more in zip(self.counts, other.counts, strict=True)]
        return Histogram(counts, self.sum_s + other.sum_s)

    def since(self, before: Histogram) -> Histogram:
        """What came after `before`; all of it where it has begun anew since."""
        grown = [now - was for now, was in zip(self.counts, before.counts, strict=True)]
        return self if min(grown) < 0 else Histogram(grown, self.sum_s - before.sum_s)

    def observe(self, value_s: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(BUCKETS_S, value_s)] += 1
        self.sum_s += value_s

    def cumulative(self) -> list[tuple[str, float]]:
        """Prometheus's form: (upper bound, observations at or below it)."""
        total, rows = 0, []
        for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), self.counts, strict=True):
            total += count
            rows.append((bound, float(total)))
        return rows


class Stats:
    """Counted since the start of this router."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.requests: defaultdict[Labels, int] = defaultdict(int)
        """(route, status); status `aborted`: the client left before there was one."""
        self.first_byte: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.first_token: defaultdict[str, Histogram] = defaultdict(Histogram)
        """By part, see `metric_names.PARTS`."""
        self.model_request: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.model_first_token: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.model_inter_token: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.turn_tokens: defaultdict[Labels, int] = defaultdict(int)
        """Prompt tokens by (turn, tier)."""
        self.placements: dict[Labels, int] = {}
        """By (role, reason)."""
        self.slo_streams: defaultdict[Labels, int] = defaultdict(int)
        """Streams by (model, what they kept)."""
        self.prefill: defaultdict[str, int] = defaultdict(int)
        self.direct: defaultdict[str, int] = defaultdict(int)
        self.settle: defaultdict[str, int] = defaultdict(int)
        self.pull_ahead: defaultdict[str, int] = defaultdict(int)
        self.decode_retries: defaultdict[str, int] = defaultdict(int)
        self.client_aborts: defaultdict[str, int] = defaultdict(int)
        """By the phase the request was in: body, settle, prefill, decode, stream."""
        self.stream_errors: defaultdict[str, int] = defaultdict(int)
        self.continued: defaultdict[str, int] = defaultdict(int)
        self.retries_refused = 0
        self.poisoned = 0
        self.limits_apart = 0
        """1: tenants' limits are to be shared, and the other processes are not heard."""
        self.sessions_apart = 0
        """1: sessions are to be shared in Redis, whose last answer was none."""
        self.joins_refused = 0
        self.task_failures: defaultdict[str, int] = defaultdict(int)
        """By the background task that failed and began again: probes, discovery."""
        self.prompt_tokens = 0
        self.cached_tokens: defaultdict[str, int] = defaultdict(int)
        self.missing_pages = 0

    def on_placed(self, role: str, reason: str) -> None:
        """A worker of the role was chosen, or none was, for that reason."""
        key = role, reason
        if key not in self.placements and len(self.placements) >= MAX_PLACEMENTS:
            key = role, "other"
        self.placements[key] = self.placements.get(key, 0) + 1
