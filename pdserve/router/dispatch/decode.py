"""One attempt at one decode worker: it answers the call, or continues a stream that another worker began."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from pdserve.router.api.held_ids import new_id
from pdserve.router.api.request_body import with_member
from pdserve.router.config.limits import Deadlines
from pdserve.router.config.router import RouterConfig
from pdserve.router.dispatch.job import Claim, Job, cached_before_header, header_words
from pdserve.router.dispatch.relay import is_event_stream, relay_events, relay_whole
from pdserve.router.dispatch.stream_marks import MARKS_HEADER, MARKS_REQUEST, StreamMarks
from pdserve.router.dispatch.suspects import Attempt, Suspects
from pdserve.router.dispatch.worker_request import (
    MAX_ERROR_BYTES,
    Failure,
    WorkerAnswerError,
    WorkerRequests,
    outcome_of,
)
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import Worker
from pdserve.router.metrics.names import CACHES
from pdserve.router.metrics.stats import Stats
from pdserve.router.placement.placer import Placer
from pdserve.router.request.cache_report import cached_tokens
from pdserve.router.request.call import Call
from pdserve.router.sessions.redis_table import SharedSessions
from pdserve.router.sessions.table import SessionEntry
from pdserve.router.upstream.client import Upstream
from pdserve.router.upstream.response import Response, UpstreamError

logger = logging.getLogger(__name__)


class DecodeStage:
    """Asks decode and aggregated workers."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        upstream: Upstream,
        workers: WorkerRequests,
        stats: Stats,
        placer: Placer,
        shared: SharedSessions | None,
        suspects: Suspects,
    ) -> None:
        self._deadlines: Deadlines = config.deadlines
        self._asks_marks = config.continue_streams != "never"
        self._fleet = fleet
        self._upstream = upstream
        self._workers = workers
        self._stats = stats
        self._placer = placer
        self._shared = shared
        self._suspects = suspects
        self._loop = asyncio.get_running_loop()

    async def attempt(self, call: Call, job: Job, claim: Claim) -> Failure | None:
        """Have the claimed worker answer. Returns None when the client has the whole answer, else what went
        wrong; the client may have a part of a stream then.
        """
        worker, answer, deadlines = claim.worker, call.answer, self._deadlines
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%r, %s", worker, ", ".join(job.words))
        resumes = answer.is_started
        if resumes:
            limit_s = deadlines.between_chunks_s
        else:
            limit_s = deadlines.first_byte_s if call.streams else deadlines.whole_answer_s
        attempt = await self._suspects.begin(call, worker)
        end_s = self._loop.time() + limit_s
        answer.plan_words = header_words(job.words)
        response = None
        try:
            target, headers, body = self._request(call, job, worker, resumes=resumes)
            response = await self._upstream.ask(
                worker, target, headers, body, connect_s=deadlines.connect_s, head_s=limit_s
            )
            claim.on_computed()
            answer.decode_id = worker.id_header
            left_s = max(0.0, end_s - self._loop.time())
            if response.status >= 400:
                await self._refused(call, response, left_s)
            else:
                await self._answered(call, job, claim, response, left_s, attempt)
        except (UpstreamError, WorkerAnswerError) as error:
            answer.decode_id = b""
            attempt.on_failure(error)
            is_long = not call.streams and outcome_of(error) == "timeout"  # no sign of a worker's fault
            consequence = "another worker is tried, if there is one"
            self._workers.on_failure(job, worker, error, consequence, is_blamed=not is_long)
            return error
        finally:
            if response is not None:
                response.release()
            attempt.end()
        self._fleet.on_success(worker)
        attempt.on_answered()
        return None

    def _request(self, call: Call, job: Job, worker: Worker, *, resumes: bool) -> tuple[str, bytes, bytes]:
        """(target, header lines, body): the call, or what the worker needs to continue it."""
        target, body = call.endpoint.path, call.body
        if call.endpoint.stored_as:
            body = with_member(body, call.endpoint.stored_as, new_id(worker.id, call.tenant.name))
        headers = call.upstream_headers + job.cached_before + job.turns_line + job.room_line
        if self._asks_marks and call.endpoint.is_resumable:
            headers += MARKS_REQUEST
        if resumes:
            assert job.marks is not None
            target, body = f"/pd/continue?endpoint={target}", job.marks.continue_body(body)
        return target, headers, body

    async def _refused(self, call: Call, response: Response, left_s: float) -> None:
        """The worker answered with an error. Raises WorkerAnswerError where another worker may do better."""
        body = await response.read_all(left_s, MAX_ERROR_BYTES)
        if response.status >= 500 or call.answer.is_started:
            raise WorkerAnswerError(response.status, body)
        await call.answer.send_worker_error(response.status, body)

    async def _answered(
        self, call: Call, job: Job, claim: Claim, response: Response, left_s: float, attempt: Attempt
    ) -> None:
        """The worker has begun to answer: note it, and relay the answer to its end."""
        worker, between_s = claim.worker, self._deadlines.between_chunks_s
        tokens = {} if job.is_prompt_counted and job.cached_before else cached_tokens(response.headers)
        self._count_prompt(call, job, tokens)
        turn = self._placer.on_answering(
            call.facts, job.plan, worker, call.worker_request_id.decode(), self._loop.time()
        )
        if self._shared is not None:
            self._share(self._shared, call, turn)
        if is_event_stream(response):
            if not (call.answer.is_started or job.cached_before):
                job.cached_before = _found_header(tokens)
            marks = job.marks = job.marks or StreamMarks()
            marks.begin(any(name == MARKS_HEADER for name, _ in response.headers))
            first = await response.read_some(left_s)
            attempt.on_first_byte()
            if claim.trial:
                self._fleet.on_trial_answering(worker, claim.trial, self._loop.time())
            if job.suspects:
                self._workers.on_answered(job)
            try:
                await relay_events(call, response, marks, first, between_s)
            finally:
                if call.answer.meter is not None:
                    call.answer.meter.marked_tokens = marks.token_count
                    call.answer.meter.used = marks.used
        elif call.answer.is_started or call.answer.is_early:
            raise UpstreamError("protocol", "the answer, or the rest of it, is no stream")
        else:
            call.answer.stop_awaiting()
            await relay_whole(call, response, left_s, between_s)
            if job.suspects:
                self._workers.on_answered(job)
        turn = self._note_answered(call, job, turn)
        if self._shared is not None:
            self._share(self._shared, call, turn)

    def _count_prompt(self, call: Call, job: Job, tokens: Mapping[str, int]) -> None:
        if job.is_prompt_counted:
            return
        job.count_prompt(self._stats, tokens)
        meter = call.answer.meter
        # of several prompts the worker may know only the first one yet
        if "computed" in tokens and meter is not None and not call.facts.has_several_prompts:
            meter.prompt_tokens = sum(tokens.values())

    def _note_answered(self, call: Call, job: Job, turn: SessionEntry | None) -> SessionEntry | None:
        tokens = 0
        if job.plan.places is not None:
            meter = call.answer.meter
            tokens = 0 if meter is None else meter.total(call.answer.is_stream)[1]
        return self._placer.on_answered(call.facts, turn, tokens, self._loop.time())

    @staticmethod
    def _share(shared: SharedSessions, call: Call, turn: SessionEntry | None) -> None:
        if turn is not None and call.facts.session is not None:
            shared.record(call.facts.session, turn)


def _found_header(tokens: Mapping[str, int]) -> bytes:
    """What the first worker of a stream found cached, for a worker that continues the stream: that one finds
    what the first one computed. Empty where the first worker did not say.
    """
    if not tokens:
        return b""
    device, host, pool, ssd = (tokens.get(tier, 0) for tier in CACHES)
    return cached_before_header([(device, host, pool + ssd)])
