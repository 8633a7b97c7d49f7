"""Where the time to a request's first token went: told to the caller, and counted.

SGLang 0.5.23 gives it in `meta_info` of every answer (with `--enable-metrics`, which every worker has):
`queue_time` (its waiting queue, `storage_prefetch_wait` within it), `prefill_finished_time` and
`forward_entry_time`. The answer's head says it (see `requests`):

    server-timing: queue;dur=1.2, pull;dur=3.4, compute;dur=20.1

SGLang (in multi-process mode) adds the metrics up over its processes and shows them at the worker's
`/metrics`. prometheus_client must not be imported before SGLang has set that mode up: it is at the first
request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.engine.metric_names import BUCKETS_S, METRICS
from pdserve.metric import by_name

TIMING_HEADER = b"server-timing"


@dataclass(frozen=True)
class FirstToken:
    """Of one HTTP request; times in seconds, of its first prompt."""

    parts_s: dict[str, float]

    def timing(self) -> bytes:
        """The value of `server-timing`: milliseconds (W3C Server Timing)."""
        return ", ".join(f"{part};dur={1e3 * spent_s:.1f}" for part, spent_s in self.parts_s.items()).encode()


class WorkerMetrics:
    """Counts the first tokens of this process. Made before SGLang runs; counts only after."""

    def __init__(self) -> None:
        self._seconds: Any = None
        self._tokens: Any = None
        self._missed: Any = None
        self._turns: Any = None

    def observe(self, part: str, seconds: float) -> None:
        """One part of one request's time to its first token."""
        self._make()
        self._seconds.labels(part).observe(seconds)

    def count(self, first: FirstToken, by_tier: Mapping[str, int]) -> None:
        """A request's first token is there; `by_tier`: where its prompt's tokens came from."""
        for part, seconds in first.parts_s.items():
            self.observe(part, seconds)
        for tier, tokens in by_tier.items():
            self._tokens.labels(tier).inc(tokens)

    def miss(self, reason: str, tokens: int) -> None:
        """So many prompt tokens of full pages were not found, for this reason."""
        self._make()
        self._missed.labels(reason).inc(tokens)

    def count_turn(self, outcome: str) -> None:
        """A prompt with earlier answers: whether they got the tokens that they were made of."""
        self._make()
        self._turns.labels(outcome).inc()

    def _make(self) -> None:
        if self._seconds is not None:
            return
        from prometheus_client import CollectorRegistry, Counter, Histogram

        named, registry = by_name(METRICS), CollectorRegistry()

        def made(name: str, kind: Any, **more: Any) -> Any:
            one = named[name]
            return kind(one.family_name, one.says, one.labels, registry=registry, **more)

        self._tokens = made("prompt_tokens", Counter)
        self._missed = made("missed_tokens", Counter)
        self._turns = made("exact_turns", Counter)
        self._seconds = made("first_token_seconds", Histogram, buckets=BUCKETS_S)
