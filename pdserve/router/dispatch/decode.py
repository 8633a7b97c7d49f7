"""The decode stage: ask a worker, and relay its answer.

Relaying a decode worker's answer to the client, its bytes unchanged.

A stream (server-sent events) is passed on as it comes, up to the end of the last whole event. If the worker
breaks off inside an event, the client can still read the error event that follows. Any other answer is passed
on when it is whole, or when it is long. Nothing is sent before the body's first byte; until
then another worker can be tried.
The pieces of a running stream go from one connection to the other without waking the call's task. The task
handles a slow client and the stream's end.

One attempt at one decode worker: it answers the call, or continues a stream that another worker began.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from pdserve.router.api.endpoints import new_id
from pdserve.router.api.request_body import with_member
from pdserve.router.config.limits import Deadlines
from pdserve.router.config.router import RouterConfig
from pdserve.router.dispatch.job import (
    MAX_ERROR_BYTES,
    Claim,
    Failure,
    Job,
    WorkerAnswerError,
    WorkerRequests,
    cached_before_header,
    header_words,
    outcome_of,
)
from pdserve.router.dispatch.stream_marks import MARKS_HEADER, MARKS_REQUEST, StreamMarks
from pdserve.router.dispatch.suspicion import Attempt, Suspects
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import Worker
from pdserve.router.metrics.names import CACHES
from pdserve.router.metrics.stats import Stats
from pdserve.router.placement.placer import Placer
from pdserve.router.request.answer import STREAM_HEADERS
from pdserve.router.request.call import (
    TIMING_HEADER,
    Call,
    cached_tokens,
    finish_parts,
    pull_s,
    server_timing,
)
from pdserve.router.sessions.table import SessionEntry
from pdserve.router.upstream.client import Upstream
from pdserve.router.upstream.connection import Response, UpstreamError

HELD_BYTES = 8 * 1024 * 1024
"""A longer answer goes to the client as it comes, and another worker can no longer be tried."""
TAIL_BYTES = 4096
_OWN_HEADERS = frozenset(
    (
        b"connection",
        b"content-length",
        b"date",
        b"keep-alive",
        b"server",
        b"server-timing",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"x-pdserve-marks",
        b"x-request-id",
    )
)
"""Headers that belong to one connection or that the router sets itself."""
_OF_STREAMS = frozenset(name for name, _ in STREAM_HEADERS)


def is_event_stream(exchange: Response) -> bool:
    """Whether the answer is a stream of server-sent events."""
    for name, value in exchange.headers:
        if name == b"content-type":
            return value.startswith(b"text/event-stream")
    return False


def passed_headers(exchange: Response) -> list[tuple[bytes, bytes]]:
    """The worker's headers that go to the client."""
    return [pair for pair in exchange.headers if pair[0] not in _OWN_HEADERS]


async def relay_whole(call: Call, response: Response, first_byte_s: float, between_s: float) -> None:
    """Pass on an answer that is not a stream, once it is whole or `HELD_BYTES` of it are here. Raises
    UpstreamError; `call.answer.is_started` says whether anything was sent.
    """
    if response.complete:
        body = response.take()
    else:
        body = await response.read_some(first_byte_s)
        if not response.at_end:
            body = await _read_much(response, body, between_s)
    if response.at_end:
        call.answer.start(response.status, passed_headers(response), len(body))
        await call.answer.write(body, more=False)
    else:
        await _relay_long(call, response, body, between_s)


async def _read_much(response: Response, body: bytes, between_s: float) -> bytes:
    parts, size = [body], len(body)
    while not response.at_end and size <= HELD_BYTES:
        parts.append(await response.read_some(between_s))
        size += len(parts[-1])
    return b"".join(parts)


async def _relay_long(call: Call, response: Response, body: bytes, between_s: float) -> None:
    """Pass on a long answer as it comes. If the worker breaks off, the client's connection is closed before
    the answer's end.
    """
    lengths = [int(value) for name, value in response.headers if name == b"content-length"]
    call.answer.start(response.status, passed_headers(response), lengths[0] if lengths else None)
    call.answer.is_stream = False  # also where it goes in chunks: its end cannot be told as an event
    while not response.at_end:
        cut = max(body.rfind(b"}") + 1, len(body) - TAIL_BYTES)  # the meter reads whole numbers
        if cut > 0:
            await call.answer.write(body[:cut], more=True)
        body = body[cut:] + await response.read_some(between_s)
    await call.answer.write(body, more=False)


async def relay_events(
    call: Call, response: Response, marks: StreamMarks, data: bytes, between_s: float
) -> None:
    """Pass on a stream, of which `data` has been read. Raises UpstreamError when the worker breaks off;
    `call.answer.is_started` says whether anything was sent.
    """
    answer = call.answer
    client, take, write_now = answer.client, marks.take, answer.write_now

    def pass_on(data: bytes) -> bool:
        if not client.takes_now:
            return False
        if ready := take(data, False):
            write_now(ready)
        return True

    while True:
        at_end = response.at_end
        ready = marks.take(data, at_end)
        if ready or at_end:
            if not answer.is_started:
                _start_stream(call, response)
            await answer.write(ready, more=not at_end)
            if at_end:
                return
        if answer.is_started:
            data = await response.give(pass_on, between_s)
        else:
            data = await response.read_some(between_s)


def _start_stream(call: Call, response: Response) -> None:
    """The first event is here: send the head, with the parts of the time until now."""
    now_s = time.monotonic()
    finish_parts(call.parts_s, call.asked_s, pull_s(response.headers), call.started_s, now_s)
    headers = [pair for pair in passed_headers(response) if pair[0] not in _OF_STREAMS]
    headers += (*STREAM_HEADERS, (TIMING_HEADER, server_timing(call.parts_s)))
    call.answer.start(response.status, headers, None)
    call.phase = "stream"


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
        suspects: Suspects,
    ) -> None:
        self._deadlines: Deadlines = config.deadlines
        self._asks_marks = config.continue_streams != "never"
        self._fleet = fleet
        self._upstream = upstream
        self._workers = workers
        self._stats = stats
        self._placer = placer
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
            call.facts,
            job.plan,
            worker,
            call.worker_request_id.decode(),
            self._loop.time(),
            job.found_tokens,
        )
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
        self._note_answered(call, job, turn)

    def _count_prompt(self, call: Call, job: Job, tokens: Mapping[str, int]) -> None:
        if job.is_prompt_counted:
            return
        job.count_prompt(self._stats, tokens)
        meter = call.answer.meter
        # of several prompts the worker may know only the first one yet
        if "computed" in tokens and meter is not None and not call.facts.has_several_prompts:
            meter.prompt_tokens = sum(tokens.values())

    def _note_answered(self, call: Call, job: Job, turn: SessionEntry | None) -> None:
        tokens = 0
        if job.plan.places is not None:
            meter = call.answer.meter
            tokens = 0 if meter is None else meter.total(call.answer.is_stream)[1]
        self._placer.on_answered(call.facts, turn, tokens, self._loop.time())


def _found_header(tokens: Mapping[str, int]) -> bytes:
    """What the first worker of a stream found cached, for a worker that continues the stream: that one finds
    what the first one computed. Empty where the first worker did not say.
    """
    if not tokens:
        return b""
    device, host, pool = (tokens.get(tier, 0) for tier in CACHES)
    return cached_before_header([(device, host, pool)])
