"""One call on its way through the stages: what is known of it, its load, requests to workers, retries, waits.

A budget for retries: when much fails, trying everything twice would only double the load.

Every request pays in `ratio` of a retry, time pays in `min_per_s`, a retry costs 1; at most ten seconds' and
a hundred requests' worth is kept. So with few failures every one is retried, and when all workers fail the
added load stays near `ratio`. Source: retry budgets of Finagle, https://twitter.github.io/finagle/guide/

What the dispatch of one call knows so far, and the load that it counts at a worker.

JSON requests to workers, and what each failure of a worker means.

Waiting for the fleet: for a worker that comes or comes back, or for what a probe finds.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias, TypeVar

from pdserve.errors import PdserveError
from pdserve.logs import ThrottledLog
from pdserve.router.api.request_body import UNREADABLE
from pdserve.router.dispatch.stream_marks import StreamMarks
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import Worker
from pdserve.router.metrics.names import turn_label
from pdserve.router.metrics.stats import Stats
from pdserve.router.placement.planner import Plan
from pdserve.router.request.call import Call
from pdserve.router.upstream.client import Upstream
from pdserve.router.upstream.connection import UpstreamError

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

    @property
    def balance(self) -> float:
        """Retries left, as of the last call."""
        return self._balance

    def on_request(self) -> None:
        """A request was begun."""
        self._balance = min(self._most, self._balance + self._ratio)

    def take(self, now_s: float) -> bool:
        """Whether a retry may be made now; it is then paid for."""
        self._balance = min(self._most, self._balance + (now_s - self._paid_s) * self._min_per_s)
        self._paid_s = now_s
        if self._balance < 1:
            return False
        self._balance -= 1
        return True


MAX_PROMPTS_TOLD = 1024
"""About 16 KiB of header."""


class Job:
    """One call on its way through the stages."""

    __slots__ = (
        "attempts",
        "cached_before",
        "found_tokens",
        "is_prompt_counted",
        "marks",
        "pairs",
        "plan",
        "retry_until_s",
        "room_line",
        "suspects",
        "tried",
        "turns_line",
        "words",
    )

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.words = list(plan.reasons)
        """What decided, and what became of each stage: for the log and `x-pdserve-plan`."""
        self.marks: StreamMarks | None = None
        """Of the answer, if it is a stream of events."""
        self.attempts = 0
        """Decode workers that got the request and failed."""
        self.pairs = 0
        """Pairs of workers that failed it by the direct way."""
        self.tried: dict[str, int] = {}
        """Ids of the decode workers that failed, and what `Worker.probes_ready` was then."""
        self.retry_until_s = math.inf
        """Until then the call may wait for a worker. Set at the first failure."""
        self.suspects: list[Worker] = []
        """Workers that answered with an error that may be theirs or the request's: see `WorkerRequests`."""
        self.cached_before = b""
        """Header line for the decode worker: prompt tokens that were cached before this call."""
        self.room_line = b""
        """Header line for two workers that hand over directly (see `direct`); empty: none do now."""
        self.turns_line = b""
        """Header line for the decode worker: which earlier answers have recorded tokens in the prompt that
        was prefilled. Empty: it chooses itself."""
        self.is_prompt_counted = False
        self.found_tokens = 0
        """Of the prompt, those that a cache had, as the first worker said that knew."""

    def count_prompt(self, stats: Stats, tokens: Mapping[str, int]) -> None:
        """Count where the prompt's tokens came from; `tokens`: by tier, of `names.TIERS`. Only the first
        worker that says so counts: a later one finds what the first one computed.
        """
        if tokens and not self.is_prompt_counted:
            self.is_prompt_counted = True
            self.found_tokens = sum(tokens.values()) - tokens.get("computed", 0)
            turn = turn_label(self.plan.turn)
            for tier, count in tokens.items():
                if count:
                    stats.turn_tokens[turn, tier] += count


class Claim:
    """A request's load at one worker, counted from the choice of the worker until `release`. Requests that
    arrive together see each other's claims, so they do not all choose the same worker.
    """

    __slots__ = ("_fleet", "_prefills", "_queued_tokens", "trial", "worker")

    def __init__(
        self, fleet: Fleet, worker: Worker, now_s: float, queued_tokens: int = 0, *, prefills: bool = False
    ) -> None:
        """`queued_tokens`: prompt tokens that the worker has to compute. `prefills`: another one answers."""
        self._fleet = fleet
        self._prefills = prefills
        if prefills:
            worker.prefilling += 1
        self._queued_tokens = queued_tokens
        self.worker = worker
        self.trial = fleet.on_selected(worker, now_s)
        """Number of the circuit's trial, see `Fleet.on_selected`."""
        if queued_tokens:
            fleet.on_queued(worker, queued_tokens)

    def on_computed(self) -> None:
        """The prompt waits no more. Can be called again."""
        if self._queued_tokens:
            self._fleet.on_queued(self.worker, -self._queued_tokens)
            self._queued_tokens = 0

    def release(self) -> None:
        """The worker has this request no more. Called once."""
        if self._queued_tokens:
            self.on_computed()
        if self._prefills:
            self.worker.prefilling -= 1
        self._fleet.on_released(self.worker)


def header_words(words: list[str]) -> bytes:
    """The plan's words as a header's value. Those of an added policy may hold anything."""
    said = ", ".join(words)
    if not said.isprintable():
        said = "".join(character if character.isprintable() else "?" for character in said)
    return said.encode("ascii", "replace")


def cached_before_header(cached_by_prompt: list[tuple[int, int, int]]) -> bytes:
    """The header line that tells a decode worker what each prompt had cached (device, host, pool) before an
    earlier worker computed it. Empty for more than MAX_PROMPTS_TOLD prompts.
    """
    if not 0 < len(cached_by_prompt) <= MAX_PROMPTS_TOLD:
        return b""
    return b"x-pdserve-prefilled: %b\r\n" % b",".join([b"%d/%d/%d" % each for each in cached_by_prompt])


def turns_header(turns: str) -> bytes:
    """The header line that has a decode worker use the tokens that a prefill worker used. `turns`: what that
    worker said, hexadecimal digits.
    """
    return b"x-pdserve-turns: %b\r\n" % (turns or "0").encode("ascii")


logger = logging.getLogger(__name__)

MAX_ERROR_BYTES: Final = 1024 * 1024
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


class WorkerRequests:
    """Requests to workers beside the client's own."""

    def __init__(self, fleet: Fleet, upstream: Upstream, connect_s: float) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._connect_s = connect_s
        self._loop = asyncio.get_running_loop()
        self._log = ThrottledLog(logger)

    async def post(
        self, call: Call, worker: Worker, target: str, body: bytes, limit_s: float, more_headers: bytes = b""
    ) -> bytes:
        """The body of a 200 answer, which comes within `limit_s`. `more_headers`: whole lines. Raises
        UpstreamError, or WorkerAnswerError for another status.
        """
        end_s = self._loop.time() + limit_s
        response = await self._upstream.ask(
            worker,
            target,
            call.upstream_headers + more_headers,
            body,
            connect_s=self._connect_s,
            head_s=limit_s,
        )
        try:
            if response.complete:
                answer = response.take()
            else:
                left_s = max(0.0, end_s - self._loop.time())
                answer = await response.read_all(left_s, MAX_ERROR_BYTES)
            if response.status != 200:
                raise WorkerAnswerError(response.status, answer)
            return answer
        finally:
            response.release()

    def on_failure(
        self, job: Job, worker: Worker, error: BaseException, consequence: str, *, is_blamed: bool = True
    ) -> None:
        """Log the failure. Count it against the worker's circuit if it is the worker's fault and `is_blamed`.

        A 500 can be the request's doing. Its worker is a suspect until another worker has answered the same
        request (`on_answered`): else a worker that fails fast would draw all requests.
        """
        self._log.warning(
            worker.id, "%s worker %s: %s; %s", worker.role, worker.id, _words(error), consequence
        )
        if is_blamed and is_workers_fault(error):
            self._blame(worker)
        elif isinstance(error, WorkerAnswerError) and error.status >= 500:
            job.suspects.append(worker)

    def on_answered(self, job: Job) -> None:
        """A worker has answered the request well, so the errors of the suspects were theirs."""
        for worker in job.suspects:
            self._blame(worker)
        job.suspects.clear()

    def _blame(self, worker: Worker) -> None:
        if self._fleet.on_failure(worker, self._loop.time()):
            logger.warning("%s worker %s: circuit opened", worker.role, worker.id)


def _words(error: BaseException) -> str:
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
