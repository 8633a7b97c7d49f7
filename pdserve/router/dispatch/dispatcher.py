"""Carrying out a plan: settle, prefill, decode, and what follows from each failure.

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

import asyncio
import time
from collections.abc import Container, Iterable, Sequence

import msgspec

from pdserve.errors import RequestError
from pdserve.router.api.errors import NoWorkerError, error_type
from pdserve.router.config.router import RouterConfig
from pdserve.router.dispatch.decode import DecodeStage
from pdserve.router.dispatch.direct import DirectStage, Outcome
from pdserve.router.dispatch.job import (
    Claim,
    Failure,
    Job,
    RetryBudget,
    WorkerAnswerError,
    WorkerRequests,
    WorkerWait,
    header_words,
    may_come_back,
    outcome_of,
)
from pdserve.router.dispatch.prefill import PrefillStage, SettleStage
from pdserve.router.dispatch.stream_marks import may_resume
from pdserve.router.dispatch.suspicion import POISON, Suspects
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import Worker
from pdserve.router.metrics.stats import Stats
from pdserve.router.placement.placer import Placer
from pdserve.router.placement.planner import Plan, choose_alternate
from pdserve.router.request.call import Call
from pdserve.router.sessions.table import SessionEntry
from pdserve.router.upstream.client import Upstream


class Dispatcher:
    """Serves calls with the fleet's workers."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        upstream: Upstream,
        stats: Stats,
    ) -> None:
        self._decode_attempts = config.limits.decode_attempts
        self._continue = config.continue_streams
        self._early_head_s = config.deadlines.early_head_s
        self._fleet = fleet
        self._stats = stats
        self._deadlines = upstream.deadlines
        self._loop = asyncio.get_running_loop()
        self._budget = RetryBudget(self._loop.time())
        self.placer = placer = Placer(config, fleet)
        self._worker_wait_s = config.deadlines.wait_for_worker_s
        self._wait = WorkerWait(fleet)
        self._suspects = suspects = Suspects(fleet, stats, self._wait)
        workers = WorkerRequests(fleet, upstream, config.deadlines.connect_s)
        self._settle = SettleStage(config.deadlines.settle_s, workers, stats)
        self._prefill = PrefillStage(config, fleet, workers, stats, placer, suspects)
        self._decode = DecodeStage(config, fleet, upstream, workers, stats, placer, suspects)
        self._direct = DirectStage(config.deadlines, workers, self._prefill, self._decode, stats)

    async def serve(self, call: Call) -> None:
        """Answer the call. Raises RequestError with nothing sent. On cancellation all load is released."""
        session, last = call.facts.session, None
        if session is not None:
            last = self.placer.sessions.get(session, self._loop.time())
        if call.facts.is_final:
            call.finish(0 if last is None else last.shared_tokens)
        if last is None and session is not None and session.parent:
            last = self.placer.parents_turn(call.facts, self._loop.time())
        await self._suspects.check(call)
        plan = await self._first_plan(call, last)
        job = Job(plan)
        self._budget.on_request()
        if call.streams and call.endpoint.streams:
            call.answer.plan_words = header_words(job.words)
            call.answer.await_events(self._early_head_s)
            self._deadlines.add(call.answer)
        try:
            if job.plan.handoff == "direct":
                await self._directly(call, job, last)
            else:
                await self._by_pool(call, job)
        except WorkerAnswerError as answer:  # the prefill worker finds the request at fault
            await call.answer.send_worker_error(answer.status, answer.body)
        finally:
            self._deadlines.discard(call.answer)

    async def _first_plan(self, call: Call, last: SessionEntry | None) -> Plan:
        """The plan; if the last worker has gone since the call was let in, that of the next one that comes.
        Raises NoWorkerError.
        """
        end_s = self._loop.time() + self._worker_wait_s - call.outage_s
        while True:
            try:
                return self._plan(call, last, self._loop.time())
            except NoWorkerError:
                if self._has_worker(call) or not await self._wait.until(
                    lambda: self._has_worker(call), end_s
                ):
                    raise

    def _has_worker(self, call: Call) -> bool | None:
        snapshot = self._fleet.snapshot(call.model, self._loop.time())
        return bool(snapshot.decode or snapshot.direct_decode) or None

    def _plan(self, call: Call, last: SessionEntry | None, now_s: float, lost: Container[str] = ()) -> Plan:
        """The plan of a call. `lost`: workers of the direct way that failed it. Raises NoWorkerError."""
        snapshot = self._fleet.snapshot(call.model, now_s)
        if lost:
            plan = self.placer.plan(call.facts, snapshot.without(lost), last, now_s, "pool")
            plan = msgspec.structs.replace(plan, settle=None)  # that wait is over
        else:
            plan = self.placer.plan(call.facts, snapshot, last, now_s)
        for role, reason in plan.causes:
            self._stats.on_placed(role, reason)
        return plan

    async def _directly(self, call: Call, job: Job, last: SessionEntry | None) -> None:
        """Have a pair of workers answer. If one of them is lost first, the pool is the way, or another pair.
        Raises as `serve`, and WorkerAnswerError.
        """
        lost: dict[Worker, int] = {}
        end_s = self._loop.time() + self._worker_wait_s - call.outage_s
        while (plan := job.plan).handoff == "direct":
            assert plan.prefill is not None
            outcome = await self._pair(call, job, plan.prefill)
            if outcome.lost is None:
                return
            job.words.append(f"direct={outcome.word}")
            if call.answer.is_started and outcome.failure is not None:
                await self._retry(call, job, outcome.lost, outcome.failure)
                return
            lost[outcome.lost] = outcome.lost.probes_ready
            job.pairs += 1
            await self._suspects.check(call)
            try:
                job.plan = await self._next_plan(call, job, last, lost, end_s)
            except NoWorkerError:
                if outcome.failure is None:
                    raise
                await self._give_up(call, outcome.lost, outcome.failure)
                return
            job.words += job.plan.reasons
        await self._by_pool(call, job)

    async def _next_plan(
        self, call: Call, job: Job, last: SessionEntry | None, lost: dict[Worker, int], end_s: float
    ) -> Plan:
        """A plan without the workers that failed the direct way and have not said since that they are ready;
        until `end_s` it waits for a worker. `lost`: what their `probes_ready` was. Raises NoWorkerError.
        """
        refusal = NoWorkerError("No worker is ready to serve this model; try again shortly.")

        def plan() -> Plan | None:
            nonlocal refusal
            gone = [worker.id for worker, probes_ready in lost.items() if worker.probes_ready <= probes_ready]
            try:
                return self._plan(call, last, self._loop.time(), gone)
            except NoWorkerError as error:
                refusal = error
                return None

        found = await self._wait.until(plan, end_s if job.pairs < self._decode_attempts else 0.0)
        if found is None:
            raise refusal
        if found.handoff == "direct" and job.pairs >= self._decode_attempts:
            raise NoWorkerError("Several pairs of workers failed this request; try again shortly.")
        return found

    async def _pair(self, call: Call, job: Job, prefill: Worker) -> Outcome:
        """One try of the direct way."""
        plan, now_s = job.plan, self._loop.time()
        sender, claim = (
            Claim(self._fleet, prefill, now_s, plan.uncached_tokens),
            Claim(self._fleet, plan.decode, now_s),
        )
        try:
            if plan.settle is not None:
                job.words.append(await self._settle.run(call, plan.settle))
            call.phase = "decode"
            call.asked_s = time.monotonic()
            return await self._direct.run(call, job, prefill, claim)
        finally:
            sender.release()
            claim.release()

    async def _by_pool(self, call: Call, job: Job) -> None:
        """Have a worker answer that computes what it does not find. Raises as `_directly`. Both workers are
        claimed while the last turn settles.
        """
        plan, now_s = job.plan, self._loop.time()
        decode = Claim(self._fleet, plan.decode, now_s, 0 if plan.prefill else plan.uncached_tokens)
        prefill = None
        if plan.prefill is not None:
            prefill = Claim(self._fleet, plan.prefill, now_s, plan.uncached_tokens, prefills=True)
        try:
            if plan.settle is not None:
                job.words.append(await self._settle.run(call, plan.settle))
            if prefill is not None:
                claim, prefill = prefill, None  # the stage releases it
                job.words.append(await self._prefill.run(call, job, claim))
            call.phase = "decode"
            call.asked_s = time.monotonic()
            failure = await self._decode.attempt(call, job, decode)
        finally:
            decode.release()
            if prefill is not None:
                prefill.release()
        if failure is not None:
            await self._retry(call, job, plan.decode, failure)

    async def _retry(self, call: Call, job: Job, failed: Worker, failure: Failure) -> None:
        """A worker has failed: have the next ones answer, or tell the client."""
        while (worker := await self._next_worker(call, job, failed, failure)) is not None:
            job.words.append("retried")
            self._stats.on_placed("decode", "retry")
            claim = Claim(self._fleet, worker, self._loop.time())
            try:
                again = await self._decode.attempt(call, job, claim)
            finally:
                claim.release()
            if again is None:
                return
            failed, failure = worker, again
        await self._give_up(call, failed, failure)

    async def _next_worker(self, call: Call, job: Job, failed: Worker, failure: Failure) -> Worker | None:
        """The decode worker that tries next; None: the call has failed. Where none is ready that has not
        failed it, wait for one that comes, or comes back. Raises RequestError for poison, and NoWorkerError
        after the wait, with nothing sent.
        """
        now_s, is_started, outcome = self._loop.time(), call.answer.is_started, outcome_of(failure)
        job.tried[failed.id] = failed.probes_ready
        job.retry_until_s = min(job.retry_until_s, now_s + self._worker_wait_s - call.outage_s)
        is_late = outcome == "timeout" and not is_started
        if is_late or call.facts.holder:
            return None
        waits = may_come_back(failure) and now_s < job.retry_until_s
        if is_started and not self._successors(call, job, failed, (failed,)):
            waits = False
        if not (waits and outcome == "connect"):  # else no worker has got the request
            job.attempts += 1
        if job.attempts >= self._decode_attempts:
            return None
        if is_started and await self._suspects.is_poison(call):
            await call.answer.break_off(400, POISON, "poisoned_request")
            return None
        await self._suspects.check(call)
        worker = self._alternate(call, job, failed, job.tried)
        if worker is None and waits:

            def find() -> Worker | None:
                return self._alternate(call, job, failed, self._still_lost(job))

            worker = await self._wait.until(find, job.retry_until_s)
            if worker is None and not is_started:
                raise NoWorkerError(
                    "The worker was lost, and no other became ready in time; try again shortly."
                )
        elif worker is not None and not self._budget.take(now_s):
            self._stats.retries_refused += 1
            return None
        if worker is not None:
            counts = self._stats.continued if is_started else self._stats.decode_retries
            counts[outcome] += 1
        return worker

    def _still_lost(self, job: Job) -> list[str]:
        """The workers that failed the call and have not said since that they are ready."""
        members = self._fleet.by_id
        return [
            id_ for id_, seen in job.tried.items() if id_ in members and members[id_].probes_ready <= seen
        ]

    def _alternate(self, call: Call, job: Job, failed: Worker, tried: Iterable[str]) -> Worker | None:
        """A decode worker that can try next, not one of `tried`."""
        candidates: Sequence[Worker] = self._fleet.snapshot(call.model, self._loop.time()).decode
        if call.answer.is_started:
            candidates = self._successors(call, job, failed, candidates)
        return choose_alternate(candidates, tried)

    def _successors(
        self, call: Call, job: Job, failed: Worker, candidates: Sequence[Worker]
    ) -> Sequence[Worker]:
        """The candidates that can continue the stream of `failed`."""
        if job.marks is None or not job.marks.is_marked:
            return ()
        if may_resume(call.endpoint, call.body, self._continue, seeds_count=False):
            return candidates
        if may_resume(call.endpoint, call.body, self._continue, seeds_count=_samples_by_seed(failed)):
            return tuple(worker for worker in candidates if _samples_by_seed(worker))
        return ()

    async def _give_up(self, call: Call, worker: Worker, failure: Failure) -> None:
        """No other worker is tried: tell the client in whatever way is still open."""
        outcome = outcome_of(failure)
        if call.answer.is_started:
            self._stats.stream_errors[outcome] += 1
            await call.answer.break_off(502, f"The worker broke off its answer ({outcome}).", "worker_lost")
        elif isinstance(failure, WorkerAnswerError):
            await call.answer.send_worker_error(failure.status, failure.body)
        else:
            if failure.kind == "timeout":
                call.end = "worker"
            who = f"Worker {worker.id}" if call.answer.shows_insides else "The worker"
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
