"""One attempt at one decode or aggregated worker: it answers the request, or continues a stream that another
worker began.

A stream (server-sent events) is passed on as it comes, up to the end of the last whole event. If the worker
breaks off inside an event, the client can still read the error event that follows. Any other answer is passed
on when it is whole, or when it is long. Nothing is sent before the body's first byte; until then another
worker can be tried. The pieces of an answer go from one connection to the other in the callback that has read
them (`on_piece`, then `Request.relay`); the request's coroutine waits for the end.
"""

from __future__ import annotations

import logging
import math
from typing import Final

from pdserve.router.api.endpoints import new_id
from pdserve.router.api.request_body import with_member
from pdserve.router.fleet.worker import Worker
from pdserve.router.http.tls import UpstreamError
from pdserve.router.http.worker_connection import NOT_PASSED_ON, WorkerConnection
from pdserve.router.metrics.names import CACHES, TIERS
from pdserve.router.native.heads import joined
from pdserve.router.proxy.failures import Failure, WorkerAnswerError, outcome_of
from pdserve.router.proxy.parts import MAX_ERROR_BYTES, Parts
from pdserve.router.proxy.prefill import cached_before_line, count_prompt
from pdserve.router.request.reports import CACHED_HEADER, parse_cached
from pdserve.router.request.request import Request, told
from pdserve.router.request.stream_marks import MARKS_HEADER, MARKS_REQUEST, StreamMarks
from pdserve.router.sessions.table import SessionEntry

logger = logging.getLogger(__name__)

HELD_BYTES = 8 * 1024 * 1024
"""A longer answer goes to the client as it comes, and another worker can no longer be tried."""
TAIL_BYTES: Final = 4096
_NOT_OF_A_WHOLE: Final = NOT_PASSED_ON - {b"cache-control", b"x-accel-buffering"}
"""Headers of an answer that is no stream which are not passed on."""
_NOT_A_STREAM: Final = "the answer, or the rest of it, is no stream"


class Decode:
    """Asks decode and aggregated workers."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._is_talkative = logger.isEnabledFor(logging.DEBUG)
        self._limits_s = parts.limits_s
        self._suspicion = parts.suspicion
        self._marks_request = b"" if parts.config.continue_streams == "never" else MARKS_REQUEST

    async def attempt(self, request: Request, worker: Worker) -> Failure | None:
        """Have the claimed worker answer. Returns None when the client has the whole answer, else what went
        wrong; the client may have a part of a stream then.
        """
        parts, limits_s = self._parts, self._limits_s
        if self._is_talkative:
            request.name_logs()
            logger.debug("%r, %s", worker, ", ".join(request.words))
        request.between_s = limit_s = limits_s.between_chunks_s
        if not request.is_started:
            limit_s = limits_s.first_byte_s if request.streams else limits_s.whole_answer_s
        if self._suspicion.is_active:
            request.has_turn = await parts.suspects.take_turn(request)
        request.plan_words, request.worker = told(request.words), worker
        request.is_begun = request.is_relayed = False
        endpoint, body = request.endpoint, request.body
        target, lines = endpoint.target, request.lines + request.cached_before + request.turns_line
        if endpoint.is_resumable:
            lines += self._marks_request
        if request.is_started or endpoint.stored_as or request.room_line:
            target, lines, body = self._question(request, worker, lines)
        try:
            up = await parts.upstream.exchange(request, worker, target, lines, body, limit_s, self.on_piece)
            if not request.is_begun:
                self._begin(request, up)
            if up.status >= 400:
                await self._refuse(request, up.status, up.take())
            else:
                rest = self._rest(request, up)
                if request.connection.is_full:
                    await request.connection.drained()
                request.send(rest, more=False)
        except (UpstreamError, WorkerAnswerError) as error:
            await self._failed(request, worker, error)
            return error
        finally:
            request.up = None
            if request.has_turn:
                request.has_turn = False
                parts.suspects.pass_turn()
        if worker.circuit.failures:
            parts.fleet.on_success(worker)
        if self._suspicion.is_active:
            self._suspicion.on_answered(endpoint.path, request.body)
        if request.suspects and up.status < 400:
            parts.on_answered(request)
        if request.turn is not None and up.status < 400:
            self._note_answered(request, request.turn)
        return None

    def _question(self, request: Request, worker: Worker, lines: bytes) -> tuple[bytes, bytes, bytes]:
        """(target, header lines, body): the request with what only some have, or what the worker needs to
        continue it.
        """
        target, body = request.endpoint.target, request.body
        if request.endpoint.stored_as:
            assert request.tenant is not None
            body = with_member(body, request.endpoint.stored_as, new_id(worker.id, request.tenant.name))
        if request.is_started:
            assert request.marks is not None
            target, body = b"/pd/continue?endpoint=" + target, request.marks.continue_body(body)
        return target, lines + request.room_line, body

    def on_piece(self, up: WorkerConnection) -> None:
        """The head of an answer is here, or its first pieces; called by the worker's connection."""
        request = up.owner
        assert isinstance(request, Request)
        request.up = up
        if request.connection.is_full:
            up.pause()
        elif up.status >= 400:
            if sum(map(len, up.pieces)) > MAX_ERROR_BYTES:
                up.fail(UpstreamError("protocol", f"answer is longer than {MAX_ERROR_BYTES} bytes"))
        else:
            if not request.is_begun:
                self._begin(request, up)
            if not up.pieces:
                return
            up.deadline_s = up.clock.now_s + request.between_s
            if not up.is_stream and (request.is_started or request.is_early):
                up.fail(UpstreamError("protocol", _NOT_A_STREAM))
            elif up.is_stream:
                self._begin_stream(request, up)
                up.sink = request.relay
                request.relay(up)
            elif sum(map(len, up.pieces)) > HELD_BYTES:
                _begin_whole(request, up, None)
                up.sink = _relay_long
                _relay_long(up)

    def _begin(self, request: Request, up: WorkerConnection) -> None:
        """The worker has begun to answer: note it."""
        worker = request.worker
        up.read_head()
        request.is_begun = True
        if request.queued_tokens:
            self._parts.fleet.on_queued(worker, -request.queued_tokens)
            request.queued_tokens = 0
        request.decode_id = worker.id_header
        if up.status >= 400:
            return
        if not (request.is_prompt_counted and request.cached_before) and CACHED_HEADER in up.said:
            self._read_cached(request, up)
        facts = request.facts
        if facts.prefix is not None or facts.session is not None:
            request.turn = self._parts.placer.on_answering(
                facts,
                request.plan,
                worker,
                request.worker_id.decode(),
                self._parts.loop.time(),
                request.found_tokens,
            )
        if not up.is_stream:
            request.quiet_s = math.inf  # what comes is no stream

    def _read_cached(self, request: Request, up: WorkerConnection) -> None:
        """The worker says what it had of the prompt, and no other one has said so before."""
        tokens = parse_cached(up.said[CACHED_HEADER].decode("latin-1"))
        if tokens and not request.is_prompt_counted:
            count_prompt(self._parts.stats, request, [tokens.get(tier, 0) for tier in TIERS])
            # of several prompts the worker may know only the first one yet
            if "computed" in tokens and request.meter is not None and not request.facts.has_several_prompts:
                request.meter.prompt_tokens = sum(tokens.values())
        if tokens and up.is_stream and not (request.is_started or request.cached_before):
            device, host, pool = (tokens.get(tier, 0) for tier in CACHES)
            request.cached_before = cached_before_line([(device, host, pool)])

    def _begin_stream(self, request: Request, up: WorkerConnection) -> None:
        """The first byte of a stream, or of its rest, is here."""
        parts, marks = self._parts, request.marks
        if marks is None:
            request.marks = marks = StreamMarks(MARKS_HEADER in up.said)
            if request.meter is not None:
                request.meter.marks = marks
        else:
            marks.begin(MARKS_HEADER in up.said)
        request.is_relayed = True
        if request.has_turn:
            request.has_turn = False
            parts.suspects.pass_turn()
        if request.trial:
            parts.fleet.on_trial_answering(request.worker, request.trial, parts.loop.time())
        if request.suspects:
            parts.on_answered(request)

    async def _refuse(self, request: Request, status: int, body: bytes) -> None:
        """The worker answered with an error. Raises WorkerAnswerError where another worker may do better."""
        if len(body) > MAX_ERROR_BYTES:
            raise UpstreamError("protocol", f"answer is longer than {MAX_ERROR_BYTES} bytes")
        if status >= 500 or request.is_started:
            raise WorkerAnswerError(status, body)
        await request.send_worker_error(status, body)

    def _rest(self, request: Request, up: WorkerConnection) -> bytes:
        """The last piece of an answer, or all of it with its head. Raises UpstreamError for what may not
        follow what was sent.
        """
        data, meter = up.take(), request.meter
        if up.is_stream:
            if not request.is_relayed:
                self._begin_stream(request, up)
            marks = request.marks
            assert marks is not None
            data = marks.take_last(data)
            if not request.is_started:
                request.begin_stream(up)
            if data and meter is not None and marks.used is None:
                meter.count(data, request.ends_line)
            return data
        if request.rest is not None:
            data = request.rest + data
        elif request.is_started or request.is_early:
            raise UpstreamError("protocol", _NOT_A_STREAM)
        else:
            _begin_whole(request, up, len(data))
        if meter is not None:
            meter.count_whole(data)
        return data

    async def _failed(self, request: Request, worker: Worker, error: Failure) -> None:
        """Pass on what came before, and note whose fault it is."""
        rest = error.rest if isinstance(error, UpstreamError) else b""
        if rest and request.is_stream and request.marks is not None:  # its client was slow to read
            await request.pass_on(request.marks.take(rest), more=True)
        request.decode_id = b""
        is_long = not request.streams and outcome_of(error) == "timeout"  # no sign of a worker's fault
        consequence = "another worker is tried, if there is one"
        self._parts.suspects.on_failure(request, worker, error)
        self._parts.on_failure(request, worker, error, consequence, is_blamed=not is_long)

    def _note_answered(self, request: Request, turn: SessionEntry) -> None:
        """The session's last turn is this one."""
        tokens = 0
        if request.plan.places is not None and request.meter is not None:
            tokens = request.meter.total(request.is_stream)[1]
        self._parts.placer.on_answered(request.facts, turn, tokens, self._parts.loop.time())


def _begin_whole(request: Request, up: WorkerConnection, length: int | None) -> None:
    """Send the head of an answer that is no stream. `length`: of its body, None: as the worker says."""
    lines = joined(up.pairs, _NOT_OF_A_WHOLE)
    if length is None and b"content-length" in up.said:
        length = int(up.said[b"content-length"])
    request.answer(up.status, lines, length)
    request.is_stream = False  # also where it goes in chunks: its end cannot be told as an event


def _relay_long(up: WorkerConnection) -> None:
    """Pass on a long answer as it comes. If the worker breaks off, the client's connection is closed before
    the answer's end.
    """
    request = up.owner
    assert isinstance(request, Request)
    if request.connection.is_full:
        up.pause()
        return
    up.deadline_s = up.clock.now_s + request.between_s
    data = (request.rest or b"") + up.take()
    cut = max(data.rfind(b"}") + 1, len(data) - TAIL_BYTES, 0)  # the meter reads whole numbers
    request.rest = data[cut:]
    if cut:
        if request.meter is not None:
            request.meter.count_whole(data[:cut])
        request.send(data[:cut], more=True)
