"""JSON requests to workers, and what each failure of a worker means."""

from __future__ import annotations

import asyncio
import logging
from typing import Final, TypeAlias

from pdserve.errors import PdserveError
from pdserve.logs import ThrottledLog
from pdserve.router.api.request_body import UNREADABLE
from pdserve.router.dispatch.job import Job
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import Worker
from pdserve.router.request.call import Call
from pdserve.router.upstream.client import Upstream
from pdserve.router.upstream.response import UpstreamError

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
