"""Carrying out a plan: settle, prefill, decode, with what becomes of every failure on the way.

| phase | trouble | what happens |
|---|---|---|
| settle | anything | go on: missing pages are recomputed |
| prefill | the request's own fault (400, 413, 422) | answered to the client |
| prefill | anything else | the decode worker does it alone; counted against the worker's circuit, unless it
  may be the request's doing |
| decode, nothing sent yet | no connection, broken answer, 5xx | another decode worker, else 502, 503 or the
  worker's error |
| decode, nothing sent yet | too late | 504 |
| decode, stream begun | anything | another decode worker continues it, where the tokens so far
  determine the rest (see `trail`), else an error event ends the stream |
| any | client gone, total deadline | everything in flight for it is cut, which aborts it in the workers |

A second worker is tried only within `decode_attempts` and the retry budget.
Load is counted at the moment of choosing, so that requests that arrive together do not all choose the same
worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from pdserve.errors import RequestError
from pdserve.router.api.errors import error_type
from pdserve.router.config.router import RouterConfig
from pdserve.router.dispatch.prefill import (
    MAX_ERROR_BYTES,
    UNFIT,
    Stages,
    WorkerAnswerError,
    prefilled_header,
)
from pdserve.router.dispatch.relay import is_event_stream, relay_events, relay_whole
from pdserve.router.dispatch.resume import ASK, HEADER, Trail, may_continue
from pdserve.router.dispatch.retry_budget import RetryBudget
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import Worker
from pdserve.router.log_throttle import ThrottledLog
from pdserve.router.metrics.names import CACHES
from pdserve.router.metrics.stats import Stats
from pdserve.router.placement.placer import Placer
from pdserve.router.placement.planner import Plan, choose_alternate
from pdserve.router.request.cache_report import cached_tokens, own_memory_tokens
from pdserve.router.request.call import Call
from pdserve.router.sessions.redis_table import SharedSessions
from pdserve.router.sessions.table import SessionEntry
from pdserve.router.upstream.client import Upstream
from pdserve.router.upstream.response import Response, UpstreamError

logger = logging.getLogger(__name__)


class Dispatcher:
    """Serves calls with the fleet's workers."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        upstream: Upstream,
        stats: Stats,
        shared: SharedSessions | None = None,
    ) -> None:
        self._deadlines = config.deadlines
        self._decode_attempts = config.limits.decode_attempts
        self._fleet = fleet
        self._upstream = upstream
        self._stats = stats
        self._loop = asyncio.get_running_loop()
        self._failures = ThrottledLog(logger)
        self._continue = config.continue_streams
        self._budget = RetryBudget(config.limits.retry_ratio, config.limits.retries_per_s, self._loop.time())
        self.placer = Placer(config, fleet)
        self._shared = shared
        self._stages = Stages(config, fleet, upstream, stats, self.placer, self._budget, self._failures)

    async def serve(self, call: Call) -> None:
        """Answer the call. Raises RequestError with nothing sent; on cancellation everything is released."""
        now_s = self._loop.time()
        facts, model = call.facts, call.model
        last = self.placer.last_turn(facts, now_s)
        if self._shared is not None and facts.session is not None:
            found = await self._shared.get(facts.session)
            if found is not None and (last is None or found.is_after(last)):
                last = found  # of the same turn the own table knows more
        snapshot = self._fleet.snapshot(model, now_s)
        plan = self.placer.plan(facts, snapshot, last, now_s)
        for role, reason in plan.causes:
            self._stats.on_placed(role, reason)
        self._budget.on_request()
        call.trial = self._fleet.on_selected(plan.decode, now_s)
        decode = plan.decode
        try:
            words = list(plan.reasons)
            if plan.prefill is not None:
                self._fleet.on_selected(plan.prefill, now_s)
                self._fleet.on_queued(plan.prefill, plan.uncached_tokens)
                try:
                    if plan.settle is not None:
                        words.append(await self._stages.settle(call, plan.settle))
                    words.append(await self._stages.prefill(call, plan, plan.prefill))
                finally:
                    self._fleet.on_queued(plan.prefill, -plan.uncached_tokens)
                    self._fleet.on_released(plan.prefill)
            else:
                self._fleet.on_queued(decode, plan.uncached_tokens)
                call.queued_tokens = plan.uncached_tokens
                if plan.settle is not None:
                    words.append(await self._stages.settle(call, plan.settle))
            call.phase = "decode"
            call.asked_s = self._loop.time()
            trail, tried = Trail(), []
            while True:
                error = await self._decode(call, plan, decode, words, trail)
                if error is None:
                    return
                tried.append(decode.id)
                alternate = self._alternate(call, trail, decode, tried, error)
                if alternate is None:
                    await self._give_up(call, decode, error)
                    return
                call.trial = self._fleet.on_selected(alternate, self._loop.time())
                self._release(call, decode)
                decode = alternate
                words.append("retried")
                self._stats.on_placed("decode", "retry")
        except WorkerAnswerError as answer:  # from prefill, and final
            await call.answer_worker_error(answer.status, answer.body)
        finally:
            self._release(call, decode)

    def _release(self, call: Call, decode: Worker) -> None:
        self._computed(call, decode)
        self._fleet.on_released(decode)

    def _computed(self, call: Call, decode: Worker) -> None:
        """The call's prompt no longer waits to be computed by its decode worker. May be called again."""
        if call.queued_tokens:
            self._fleet.on_queued(decode, -call.queued_tokens)
            call.queued_tokens = 0

    def _share(self, call: Call, turn: SessionEntry | None) -> None:
        if self._shared is not None and turn is not None and call.facts.session is not None:
            self._shared.record(call.facts.session, turn)

    # --- decode

    async def _decode(
        self, call: Call, plan: Plan, worker: Worker, words: list[str], trail: Trail
    ) -> UpstreamError | WorkerAnswerError | None:
        """Have `worker` answer the call, or go on with an answer that another began. Returns None when it is
        answered to its end, or what went wrong.
        """
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%r, %s", worker, ", ".join(words))
        first_s = self._deadlines.between_chunks_s if call.is_started else self._deadlines.first_byte_s
        end_s = self._loop.time() + first_s
        call.plan_words = ", ".join(words).encode("ascii", "replace")
        decode_header = (b"x-pdserve-decode", worker.id_header)
        exchange = None
        try:
            exchange = await self._ask(call, worker, trail, first_s)
            first_s = max(0.0, end_s - self._loop.time())
            self._computed(call, worker)
            call.workers.append(decode_header)
            if exchange.status >= 400:
                body = await exchange.read_all(first_s, MAX_ERROR_BYTES)
                if exchange.status >= 500 or call.is_started:
                    call.workers.remove(decode_header)
                    return self._failed(worker, WorkerAnswerError(exchange.status, body))
                await call.answer_worker_error(exchange.status, body)
            else:
                known = call.prompt_counted and call.prefilled
                tokens = {} if known else cached_tokens(exchange.headers)
                if not call.prompt_counted:
                    self._count_prompt(call, plan, tokens)
                turn = self.placer.on_answering(
                    call.facts, plan, worker, call.request_id.decode(), self._loop.time()
                )
                self._share(call, turn)
                if is_event_stream(exchange):
                    if not (call.is_started or call.prefilled):
                        call.prefilled = _found_header(tokens)
                    trail.begin(any(name == HEADER for name, _ in exchange.headers))
                    call.is_sse = True
                    first = await exchange.read_some(first_s)
                    if call.trial:
                        self._fleet.on_trial_answering(worker, call.trial, self._loop.time())
                    await relay_events(call, exchange, trail, first, self._deadlines.between_chunks_s)
                elif call.is_started:
                    raise UpstreamError("protocol", "the rest of a stream is no stream")
                else:
                    await relay_whole(call, exchange, first_s, self._deadlines.between_chunks_s)
                self._share(call, self._answered(call, plan, worker, turn, exchange))
            self._fleet.on_success(worker)
            return None
        except UpstreamError as error:
            if decode_header in call.workers:
                call.workers.remove(decode_header)
            return self._failed(worker, error)
        finally:
            if exchange is not None:
                exchange.release()

    def _count_prompt(self, call: Call, plan: Plan, tokens: dict[str, int]) -> None:
        """What the worker says of the prompt; of several it may know only the first, when it begins."""
        self._stages.count_prompt(call, plan, tokens)
        if "computed" in tokens and call.meter is not None and not call.facts.has_several_prompts:
            call.meter.prompt_tokens = sum(tokens.values())

    def _answered(
        self, call: Call, plan: Plan, worker: Worker, turn: SessionEntry | None, exchange: Response
    ) -> SessionEntry | None:
        tokens, found = 0, None
        if plan.places is not None:
            tokens = 0 if call.meter is None else call.meter.total(call.is_sse)[1]
            found = own_memory_tokens(exchange.headers)
        return self.placer.on_answered(call.facts, plan, worker, turn, tokens, found, self._loop.time())

    async def _ask(self, call: Call, worker: Worker, trail: Trail, head_s: float) -> Response:
        """Send the call to `worker`, or what it needs to go on with the call."""
        target, headers, body = call.endpoint.path, call.upstream_headers + call.prefilled, call.body
        if self._continue != "never" and call.endpoint.is_resumable:
            headers += ASK
        if call.is_started:
            target, body = f"/pd/continue?endpoint={call.endpoint.path}", trail.continue_body(body)
        return await self._upstream.post(
            worker, target, headers, body, connect_s=self._deadlines.connect_s, head_s=head_s
        )

    def _failed(
        self, worker: Worker, error: UpstreamError | WorkerAnswerError
    ) -> UpstreamError | WorkerAnswerError:
        """Count a failure against the worker, unless it may be the request's doing."""
        what = f"status {error.status}" if isinstance(error, WorkerAnswerError) else error.kind
        counts = error.status in UNFIT if isinstance(error, WorkerAnswerError) else error.kind != "busy"
        self._failures.warning(worker.id, "%s worker %s: request failed: %s", worker.role, worker.id, what)
        if counts and self._fleet.on_failure(worker, self._loop.time()):
            logger.warning("%s worker %s: circuit opened", worker.role, worker.id)
        return error

    def _alternate(
        self,
        call: Call,
        trail: Trail,
        failed: Worker,
        tried: list[str],
        error: UpstreamError | WorkerAnswerError,
    ) -> Worker | None:
        """Who tries next after `failed`, of those that are there now."""
        is_late = isinstance(error, UpstreamError) and error.kind == "timeout" and not call.is_started
        if is_late or len(tried) >= self._decode_attempts:
            return None
        now_s = self._loop.time()
        candidates = self._fleet.snapshot(call.model, now_s).decode
        if call.is_started:
            candidates = self._successors(call, trail, failed, candidates)
        alternate = choose_alternate(candidates, tried)
        if alternate is None:
            return None
        if not self._budget.take(now_s):
            self._stats.retries_refused += 1
            return None
        reason = error.kind if isinstance(error, UpstreamError) else f"status-{error.status}"
        counts = self._stats.continued if call.is_started else self._stats.decode_retries
        counts[reason] += 1
        return alternate

    def _successors(
        self, call: Call, trail: Trail, failed: Worker, candidates: tuple[Worker, ...]
    ) -> tuple[Worker, ...]:
        """Those of the candidates that can go on with the stream of `failed`."""
        if not trail.is_marked:
            return ()
        if may_continue(call.endpoint, call.body, self._continue, seeds_count=False):
            return candidates
        if may_continue(call.endpoint, call.body, self._continue, seeds_count=_samples_by_seed(failed)):
            return tuple(worker for worker in candidates if _samples_by_seed(worker))
        return ()

    async def _give_up(self, call: Call, worker: Worker, error: UpstreamError | WorkerAnswerError) -> None:
        if call.is_started:
            kind = error.kind if isinstance(error, UpstreamError) else f"status-{error.status}"
            self._stats.stream_errors[kind] += 1
            await call.break_off(502, f"The worker broke off its answer ({kind}).", "worker_lost")
            return
        if isinstance(error, WorkerAnswerError):
            await call.answer_worker_error(error.status, error.body)
            return
        call.is_late = error.kind == "timeout"
        status = {"timeout": 504, "busy": 503}.get(error.kind, 502)
        raise RequestError(
            status,
            f"Worker {worker.id} did not answer ({error.kind}), and no other could be tried.",
            type_=error_type(status),
            code="worker_unavailable",
        )


def _samples_by_seed(worker: Worker) -> bool:
    """What it samples depends on the request's seed."""
    return worker.info is not None and worker.info.deterministic


def _found_header(tokens: Mapping[str, int]) -> bytes:
    """Tells who goes on with a stream what its first worker found cached; it finds itself what that one then
    computed. Empty where the first worker did not say.
    """
    if not tokens:
        return b""
    device, host, pool, ssd = (tokens.get(tier, 0) for tier in CACHES)
    return prefilled_header([(device, host, pool + ssd)])
