"""What follows from each failure of a worker.

| phase | trouble | what happens |
|---|---|---|
| settle | anything | go on: missing pages are computed again |
| direct | a worker of the pair fails before the answer begins | the pool's way, else another pair |
| prefill | the request's own fault (400, 413, 422) | the client gets that answer |
| prefill | anything else | the decode worker computes the prompt; counted against the worker's circuit
  unless the request may be at fault: a 500 counts once another worker has answered |
| decode, nothing sent yet | no connection, broken answer, 5xx | another decode worker, else 502 or the
  worker's error |
| decode, no other worker | no connection, a lost one, 503 | the next one that comes or comes back, within
  `wait_for_worker_s`, else 503 |
| any | the request has ended two workers | 400, see `suspicion` |
| decode, nothing sent yet | too late | 504 |
| decode, stream begun | anything | another decode worker continues the stream where `resume` allows it, else
  an error event ends the stream |
| any | client gone, total deadline | every request for the call is cut, which aborts it in the workers |

`decode_attempts` and the retry budget bound the attempts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdserve.errors import RequestError
from pdserve.router.api.errors import NoWorkerError, error_type
from pdserve.router.fleet.worker import Worker
from pdserve.router.placement.planner import choose_alternate
from pdserve.router.proxy.decode import Decode
from pdserve.router.proxy.failures import Failure, WorkerAnswerError, may_come_back, outcome_of
from pdserve.router.proxy.parts import Parts
from pdserve.router.proxy.suspicion import POISON
from pdserve.router.request.request import Losses, Request
from pdserve.router.request.stream_marks import may_resume


class Recovery:
    """Has other workers answer, or tells the client."""

    def __init__(self, parts: Parts, decode: Decode) -> None:
        self._parts = parts
        self._decode = decode
        self._attempts = parts.config.limits.decode_attempts
        self._continue = parts.config.continue_streams

    async def retry(self, request: Request, failed: Worker, failure: Failure) -> None:
        """A worker has failed: have the next ones answer, or tell the client."""
        fleet = self._parts.fleet
        while (worker := await self._next_worker(request, failed, failure)) is not None:
            request.words += ("retried",)
            self._parts.stats.on_placed("decode", "retry")
            request.trial = fleet.on_selected(worker, self._parts.loop.time())
            try:
                again = await self._decode.attempt(request, worker)
            finally:
                fleet.on_released(worker)
            if again is None:
                return
            failed, failure = worker, again
        await self.give_up(request, failed, failure)

    async def _next_worker(self, request: Request, failed: Worker, failure: Failure) -> Worker | None:
        """The decode worker that tries next; None: the request has failed. Where none is ready that has not
        failed it, wait for one that comes, or comes back. Raises RequestError for poison, and NoWorkerError
        after the wait, with nothing sent.
        """
        now_s, is_started, outcome = self._parts.loop.time(), request.is_started, outcome_of(failure)
        losses = request.losses
        if losses is None:
            until_s = now_s + self._parts.limits_s.wait_for_worker_s - request.outage_s
            losses = request.losses = Losses(until_s)
        losses.tried[failed.id] = failed.probes_ready
        is_late = outcome == "timeout" and not is_started
        if is_late or request.facts.holder:
            return None
        waits = may_come_back(failure) and now_s < losses.retry_until_s
        if is_started and not self._successors(request, failed, (failed,)):
            waits = False
        if not (waits and outcome == "connect"):  # else no worker has got the request
            losses.attempts += 1
        if losses.attempts >= self._attempts:
            return None
        if is_started and await self._parts.suspects.is_poison(request):
            await request.break_off(400, POISON, "poisoned_request")
            return None
        await self._parts.suspects.check(request)
        worker = self._alternate(request, failed, losses.tried)
        if worker is None and waits:

            def find() -> Worker | None:
                return self._alternate(request, failed, self._still_lost(losses))

            worker = await self._parts.wait.until(find, losses.retry_until_s)
            if worker is None and not is_started:
                raise NoWorkerError(
                    "The worker was lost, and no other became ready in time; try again shortly."
                )
        elif worker is not None and not self._parts.budget.take(now_s):
            self._parts.stats.retries_refused += 1
            return None
        if worker is not None:
            counts = self._parts.stats.continued if is_started else self._parts.stats.decode_retries
            counts[outcome] += 1
        return worker

    def _still_lost(self, losses: Losses) -> list[str]:
        """The workers that failed the request and have not said since that they are ready."""
        members = self._parts.fleet.by_id
        return [
            id_ for id_, seen in losses.tried.items() if id_ in members and members[id_].probes_ready <= seen
        ]

    def _alternate(self, request: Request, failed: Worker, tried: Iterable[str]) -> Worker | None:
        """A decode worker that can try next, not one of `tried`."""
        candidates: Sequence[Worker] = self._parts.fleet.snapshot(
            request.model, self._parts.loop.time()
        ).decode
        if request.is_started:
            candidates = self._successors(request, failed, candidates)
        return choose_alternate(candidates, tried)

    def _successors(self, request: Request, failed: Worker, candidates: Sequence[Worker]) -> Sequence[Worker]:
        """The candidates that can continue the stream of `failed`."""
        if request.marks is None or not request.marks.tells_all:
            return ()
        if may_resume(request.endpoint, request.body, self._continue, seeds_count=False):
            return candidates
        if may_resume(request.endpoint, request.body, self._continue, seeds_count=_samples_by_seed(failed)):
            return tuple(worker for worker in candidates if _samples_by_seed(worker))
        return ()

    async def give_up(self, request: Request, worker: Worker, failure: Failure) -> None:
        """No other worker is tried: tell the client in whatever way is still open."""
        outcome = outcome_of(failure)
        if request.is_started:
            self._parts.stats.stream_errors[outcome] += 1
            await request.break_off(502, f"The worker broke off its answer ({outcome}).", "worker_lost")
        elif isinstance(failure, WorkerAnswerError):
            await request.send_worker_error(failure.status, failure.body)
        else:
            if failure.kind == "timeout":
                request.end = "worker"
            who = f"Worker {worker.id}" if request.shows_insides else "The worker"
            status = {"timeout": 504, "busy": 503}.get(failure.kind, 502)
            raise RequestError(
                status,
                f"{who} did not answer ({failure.kind}), and no other could be tried.",
                type_=error_type(status),
                code="worker_unavailable",
            )


def _samples_by_seed(worker: Worker) -> bool:
    """The request's seed determines what the worker samples."""
    return worker.info is not None and worker.info.deterministic
