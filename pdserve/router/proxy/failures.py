"""What each failure of a worker means, a budget for retries, and waits for another worker. Pure but for the
waits.

When much fails, trying everything twice would only double the load. Every request pays in `ratio` of a retry,
time pays in `min_per_s`, a retry costs 1; at most ten seconds' and a hundred requests' worth is kept. So with
few failures every one is retried, and when all workers fail the added load stays near `ratio`.
Source: retry budgets of Finagle, https://twitter.github.io/finagle/guide/
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeAlias, TypeVar

from pdserve.errors import PdserveError
from pdserve.router.api.request_body import UNREADABLE
from pdserve.router.fleet.registry import Fleet
from pdserve.router.http.tls import UpstreamError

RATIO = 0.2
MIN_PER_S = 10.0
KEPT_S = 10.0
KEPT_REQUESTS = 100


class RetryBudget:
    """Retries that may be made now."""

    def __init__(self, now_s: float, ratio: float | None = None, min_per_s: float | None = None) -> None:
        """By default with `RATIO` and `MIN_PER_S`."""
        ratio = RATIO if ratio is None else ratio
        min_per_s = MIN_PER_S if min_per_s is None else min_per_s
        self._ratio = ratio
        self._min_per_s = min_per_s
        self._most = min_per_s * KEPT_S + ratio * KEPT_REQUESTS
        self._balance = min_per_s * KEPT_S
        self._paid_s = now_s
        self.requests = 0
        """Begun, and not paid in yet. Whoever begins one counts it."""

    @property
    def balance(self) -> float:
        """Retries left, as of the last `take`."""
        return min(self._most, self._balance + self.requests * self._ratio)

    def take(self, now_s: float) -> bool:
        """Whether a retry may be made now; it is then paid for."""
        self._balance = min(self._most, self.balance + (now_s - self._paid_s) * self._min_per_s)
        self._paid_s, self.requests = now_s, 0
        if self._balance < 1:
            return False
        self._balance -= 1
        return True


_WORKER_STATUSES: Final = frozenset((502, 503, 504))
"""Statuses that speak of the worker and not of the request."""


class WorkerAnswerError(PdserveError):
    """A worker answered with an error status."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.body = body


Failure: TypeAlias = UpstreamError | WorkerAnswerError
FAILURES: Final = (UpstreamError, WorkerAnswerError, *UNREADABLE)
"""Everything that a request to a worker, and reading its JSON answer, can raise."""


def outcome_of(error: BaseException) -> str:
    """One word for a failure out of `FAILURES`, for metrics and the plan's words."""
    if isinstance(error, UpstreamError):
        return error.kind
    return f"status-{error.status}" if isinstance(error, WorkerAnswerError) else "garbage"


def is_workers_fault(error: BaseException) -> bool:
    """Whether the failure counts against the worker's circuit. A status outside `_WORKER_STATUSES` can be the
    request's doing, and `busy` is this router's own bound on connections.
    """
    if isinstance(error, WorkerAnswerError):
        return error.status in _WORKER_STATUSES
    return not (isinstance(error, UpstreamError) and error.kind == "busy")


def may_be_death(error: BaseException) -> bool:
    """The connection ended as it does when the worker's process ends."""
    return isinstance(error, UpstreamError) and error.kind in ("closed", "cut", "down")


def may_come_back(error: BaseException) -> bool:
    """The worker may be at its end or at its start: once a probe finds it ready, it can be asked again."""
    if isinstance(error, WorkerAnswerError):
        return error.status == 503
    return may_be_death(error) or (isinstance(error, UpstreamError) and error.kind == "connect")


def words_of(error: BaseException) -> str:
    """For a log line."""
    return f"unreadable answer ({error})" if isinstance(error, UNREADABLE) else str(error)


T = TypeVar("T")


class WorkerWait:
    """Looks again after each event of the fleet (`Fleet.watchers`)."""

    def __init__(self, fleet: Fleet) -> None:
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Future[None] | None = None
        fleet.watchers.append(self._wake)

    async def until(self, find: Callable[[], T | None], end_s: float) -> T | None:
        """What `find` returns, as soon as it is not None; None at `end_s` on the loop's clock."""
        while (found := find()) is None and (left_s := end_s - self._loop.time()) > 0:
            if self._news is None:
                self._news = self._loop.create_future()
            await asyncio.wait({self._news}, timeout=left_s)
        return found

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set_result(None)
            self._news = None
