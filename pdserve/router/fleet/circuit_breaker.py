"""The circuit breaker of one worker, fed by the outcome of requests. Pure.

closed --(so many failures in a row)---> open until `retry_at_s`
open   --(retry_at_s passed)-----------> half-open: the worker is eligible
half-open --(selected)-----------------> open: this request is a trial, the others wait for it
open   --(the trial's stream begins)---> half-open: the next request can be a trial, since a stream is long
any    --(success: a whole answer)-----> closed
"""

from __future__ import annotations


class CircuitBreaker:
    """Closed, open or half-open."""

    __slots__ = ("failures", "retry_at_s", "trial")

    def __init__(self) -> None:
        self.failures = 0
        """Failed requests in a row."""
        self.retry_at_s = 0.0
        """0: closed. Otherwise open until this time, and half-open after it."""
        self.trial = 0
        """Number of the last trial. A failure raises it too."""

    @property
    def is_closed(self) -> bool:
        """Requests come and go as usual."""
        return not self.retry_at_s

    def lets_through(self, now_s: float) -> bool:
        """The circuit is closed or half-open."""
        return now_s >= self.retry_at_s

    def on_selected(self, now_s: float, open_s: float) -> int:
        """A request goes to the worker while the circuit is not closed. Returns the number of its trial."""
        self.retry_at_s = now_s + open_s
        self.trial += 1
        return self.trial

    def on_trial_answering(self, trial: int, now_s: float) -> bool:
        """The stream of a trial has begun as it should. True if that makes the circuit half-open: not after a
        newer failure, since a worker that breaks off its streams still begins one after the other.
        """
        if trial != self.trial or self.is_closed:
            return False
        self.retry_at_s = now_s
        return True

    def on_success(self) -> bool:
        """A request was answered to its end. True if that changes anything."""
        if not self.failures and not self.retry_at_s:
            return False
        self.failures, self.retry_at_s = 0, 0.0
        return True

    def on_failure(self, now_s: float, limit: int, open_s: float) -> bool:
        """A request failed. True if that opens the closed circuit: it is the `limit`th in a row."""
        self.failures += 1
        if self.failures < limit:
            return False
        was_closed = self.is_closed
        self.trial += 1
        self.retry_at_s = now_s + open_s
        return was_closed
