"""Carrying out a plan: settle, prefill, decode, with what becomes of every failure on the way.

| phase | trouble | what happens |
|---|---|---|
| settle | anything | go on: missing pages are recomputed |
| prefill | the request's own fault (400, 413, 422) | answered to the client |
| prefill | anything else | the decode worker does it alone; counted against the worker's circuit |
| decode, nothing sent yet | no connection, broken answer, 5xx | another decode worker, else 502, 503 or
the worker's error | | decode, nothing sent yet | too late | 504 |
| decode, stream begun | anything | an error event ends the stream |
| any | client gone, total deadline | everything in flight for it is cut, which aborts it in the workers |

Load is counted at the moment of choosing, so that requests that arrive together do not all choose the same
worker.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from pdserve.errors import PdserveError, RequestError
from pdserve.router.call import Call
from pdserve.router.config import RouterConfig
from pdserve.router.exchange import UpstreamError
from pdserve.router.fleet import Fleet, Worker
from pdserve.router.metrics import Stats
from pdserve.router.openai_errors import error_type
from pdserve.router.placer import Placer
from pdserve.router.plan import Plan, Settle, choose_alternate, resolve_model
from pdserve.router.relay import is_event_stream, relay_events, relay_whole
from pdserve.router.throttle import ThrottledLog
from pdserve.router.upstream import Upstream

logger = logging.getLogger(__name__)

SETTLE_SLACK_S = 0.25
"""On top of the time that the worker itself was given to wait."""
MAX_ERROR_BYTES = 1024 * 1024
CLIENT_FAULTS = frozenset((400, 413, 422))
"""Prefill's answers that are final. Others, like 404 or 429, may be the worker's own trouble; if they are
not, the decode worker will say the same."""
UNFIT = frozenset((502, 503, 504))
"""Answers that speak of the worker and not of the request: counted against its circuit."""


class PrefillReport(msgspec.Struct):
    """A prefill worker's 200 answer."""

    prompt_tokens: int
    published_pages: int
    missing_pages: int
    cached: dict[str, int] = {}
    prefill_ms: float = 0.0
    publish_ms: float = 0.0


class SettledReport(msgspec.Struct):
    """A decode worker's answer to `/pd/settled`."""

    known: bool
    settled: bool


class WorkerAnswerError(PdserveError):
    """A worker answered with an error status."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.body = body


_report_decoder = msgspec.json.Decoder(PrefillReport)
_settled_decoder = msgspec.json.Decoder(SettledReport)


class Dispatcher:
    """Serves calls with the fleet's workers."""

    def __init__(self, config: RouterConfig, fleet: Fleet, upstream: Upstream, stats: Stats) -> None:
        self._deadlines = config.deadlines
        self._decode_attempts = config.limits.decode_attempts
        self._fleet = fleet
        self._upstream = upstream
        self._stats = stats
        self._loop = asyncio.get_running_loop()
        self._failures = ThrottledLog(logger)
        self.placer = Placer(config, fleet)

    async def serve(self, call: Call) -> None:
        """Answer the call. Raises RequestError with nothing sent; on cancellation everything is released."""
        now_s = self._loop.time()
        facts = call.facts
        model = resolve_model(facts.model, self._fleet.models)
        last = self.placer.last_turn(facts, now_s)
        plan = self.placer.plan(facts, self._fleet.snapshot(model, now_s), last, now_s)
        self._fleet.on_selected(plan.decode, now_s)
        decode = plan.decode
        try:
            words = list(plan.reasons)
            if plan.prefill is not None:
                self._fleet.on_selected(plan.prefill, now_s)
                self._fleet.on_queued(plan.prefill, plan.uncached_tokens)
                try:
                    if plan.settle is not None:
                        words.append(await self._settle(call, plan.settle))
                    words.append(await self._prefill(call, plan, plan.prefill))
                finally:
                    self._fleet.on_queued(plan.prefill, -plan.uncached_tokens)
                    self._fleet.on_released(plan.prefill)
            else:
                self._fleet.on_queued(decode, plan.uncached_tokens)
                call.queued_tokens = plan.uncached_tokens
                if plan.settle is not None:
                    words.append(await self._settle(call, plan.settle))
            call.phase = "decode"
            tried: list[str] = []
            while True:
                error = await self._decode(call, plan, decode, words)
                if error is None:
                    return
                tried.append(decode.id)
                alternate = self._alternate(plan, tried, error)
                if alternate is None:
                    await self._give_up(call, decode, error)
                    return
                self._fleet.on_selected(alternate, self._loop.time())
                self._release(call, decode)
                decode = alternate
                words.append("retried")
        except WorkerAnswerError as answer:  # from prefill, and final
            await call.answer_worker_error(answer.status, answer.body)
        finally:
            self._release(call, decode)

    def _release(self, call: Call, decode: Worker) -> None:
        self._computed(call, decode)
        self._fleet.on_released(decode)

    def _computed(self, call: Call, decode: Worker) -> None:
        """The call's prompt no longer waits to be computed by its decode worker. May be called again."""
        self._fleet.on_queued(decode, -call.queued_tokens)
        call.queued_tokens = 0

    # --- settle

    async def _settle(self, call: Call, settle: Settle) -> str:
        """Wait, bounded, until the previous turn's pages are in the pool. Never fails."""
        wait_s = self._deadlines.settle_s
        if wait_s <= 0:
            return "settle=off"
        call.phase = "settle"
        body = msgspec.json.encode({"request_id": settle.request_id, "timeout_s": wait_s})
        try:
            answer = await self._post_json(call, settle.worker, "/pd/settled", body, wait_s + SETTLE_SLACK_S)
            report = _settled_decoder.decode(answer)
            outcome: str = "unknown" if not report.known else "settled" if report.settled else "unsettled"
        except UpstreamError as error:
            outcome = error.kind
        except WorkerAnswerError as error:
            outcome = f"status-{error.status}"
        except msgspec.MsgspecError:
            outcome = "garbage"
        self._stats.settle[outcome] += 1
        return f"settle={outcome}"

    # --- prefill

    async def _prefill(self, call: Call, plan: Plan, worker: Worker) -> str:
        """Have the prompt computed and published. Raises WorkerAnswerError when the request itself is at
        fault.
        """
        call.phase = "prefill"
        limit_s = self._deadlines.prefill_s + self._deadlines.publish_s
        outcome: str
        try:
            answer = await self._post_json(
                call, worker, f"/pd/prefill?endpoint={call.path}", call.body, limit_s
            )
            report = _report_decoder.decode(answer)
        except UpstreamError as error:
            outcome, what = error.kind, str(error)
        except WorkerAnswerError as error:
            if error.status in CLIENT_FAULTS:
                self._stats.prefill["client-error"] += 1
                self._fleet.on_success(worker)
                raise
            outcome, what = f"status-{error.status}", str(error)
        except msgspec.MsgspecError as error:
            outcome, what = "garbage", f"its answer is no prefill report: {error}"
        else:
            self._fleet.on_success(worker)
            self.placer.on_prefilled(
                call.facts,
                plan,
                worker,
                report.cached,
                report.published_pages,
                report.missing_pages,
                self._loop.time(),
            )
            call.workers.append((b"x-pdserve-prefill", worker.id_header))
            return f"stage={self._count_prefill(report)}"
        self._stats.prefill[outcome] += 1
        opened = self._fleet.on_failure(worker, self._loop.time())
        self._failures.warning(
            worker.id, "prefill worker %s: %s; the decode worker does it alone", worker.id, what
        )
        if opened:
            logger.warning("prefill worker %s: circuit opened", worker.id)
        return f"stage={outcome}"

    def _count_prefill(self, report: PrefillReport) -> str:
        stats = self._stats
        outcome = "partial" if report.missing_pages else "ok"
        stats.prefill[outcome] += 1
        stats.prompt_tokens += report.prompt_tokens
        stats.missing_pages += report.missing_pages
        for source, tokens in report.cached.items():
            if source in ("device", "host", "pool"):
                stats.cached_tokens[source] += tokens
        return outcome

    async def _post_json(self, call: Call, worker: Worker, target: str, body: bytes, limit_s: float) -> bytes:
        """A 200 answer's body. Raises UpstreamError, or WorkerAnswerError for another status."""
        end_s = self._loop.time() + limit_s
        exchange = await self._upstream.post(
            worker, target, call.upstream_headers, body, connect_s=self._deadlines.connect_s, head_s=limit_s
        )
        try:
            answer = await exchange.read_all(max(0.0, end_s - self._loop.time()), MAX_ERROR_BYTES)
            if exchange.status != 200:
                raise WorkerAnswerError(exchange.status, answer)
            return answer
        finally:
            exchange.release()

    # --- decode

    async def _decode(
        self, call: Call, plan: Plan, worker: Worker, words: list[str]
    ) -> UpstreamError | WorkerAnswerError | None:
        """Have `worker` answer the call. Returns None when it is answered, or what went wrong with nothing
        sent.
        """
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("request %s: %r, %s", call.request_id.decode(), worker, ", ".join(words))
        first_s = self._deadlines.first_byte_s
        end_s = self._loop.time() + first_s
        call.plan_words = ", ".join(words).encode("ascii", "replace")
        decode_header = (b"x-pdserve-decode", worker.id_header)
        exchange = None
        try:
            exchange = await self._upstream.post(
                worker,
                call.path,
                call.upstream_headers,
                call.body,
                connect_s=self._deadlines.connect_s,
                head_s=first_s,
            )
            first_s = max(0.0, end_s - self._loop.time())
            self._computed(call, worker)
            call.workers.append(decode_header)
            if exchange.status >= 400:
                body = await exchange.read_all(first_s, MAX_ERROR_BYTES)
                if exchange.status >= 500:
                    call.workers.remove(decode_header)
                    return self._failed(worker, WorkerAnswerError(exchange.status, body))
                await call.answer_worker_error(exchange.status, body)
            else:
                turn = self.placer.on_answering(
                    call.facts, plan, worker, call.request_id.decode(), self._loop.time()
                )
                relay = relay_events if is_event_stream(exchange) else relay_whole
                await relay(call, exchange, first_s, self._deadlines.between_chunks_s)
                self.placer.on_answered(
                    call.facts,
                    plan,
                    worker,
                    turn,
                    exchange.tail(),
                    exchange.received_bytes,
                    self._loop.time(),
                )
            self._fleet.on_success(worker)
            return None
        except UpstreamError as error:
            failed = self._failed(worker, error)
            if not call.is_started:
                if decode_header in call.workers:
                    call.workers.remove(decode_header)
                return failed
            self._stats.stream_errors[error.kind] += 1
            await call.break_off(502, f"The worker broke off its answer ({error.kind}).", "worker_lost")
            return None
        finally:
            if exchange is not None:
                exchange.release()

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
        self, plan: Plan, tried: list[str], error: UpstreamError | WorkerAnswerError
    ) -> Worker | None:
        is_late = isinstance(error, UpstreamError) and error.kind == "timeout"
        if is_late or len(tried) >= self._decode_attempts:
            return None
        alternate = choose_alternate(plan.candidates, tried)
        if alternate is not None:
            reason = error.kind if isinstance(error, UpstreamError) else f"status-{error.status}"
            self._stats.decode_retries[reason] += 1
        return alternate

    async def _give_up(self, call: Call, worker: Worker, error: UpstreamError | WorkerAnswerError) -> None:
        if isinstance(error, WorkerAnswerError):
            await call.answer_worker_error(error.status, error.body)
            return
        status = {"timeout": 504, "busy": 503}.get(error.kind, 502)
        raise RequestError(
            status,
            f"Worker {worker.id} did not answer ({error.kind}), and no other could be tried.",
            type_=error_type(status),
            code="worker_unavailable",
        )
