"""What is done for a request, in order: the table of contents of the router."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from pdserve.errors import RequestError
from pdserve.router.admission.gate import Gate
from pdserve.router.admission.start_by import HEADERS
from pdserve.router.api.endpoints import ENDPOINTS, fold
from pdserve.router.api.errors import NoWorkerError, error_of
from pdserve.router.api.request_body import RequestView
from pdserve.router.config.router import RouterConfig
from pdserve.router.fleet.registry import Fleet, Snapshot
from pdserve.router.http.cors import Cors
from pdserve.router.http.driven import in_task
from pdserve.router.http.listening import LAST_WORD_S
from pdserve.router.http.worker_connection import Upstream
from pdserve.router.metrics.stats import Stats
from pdserve.router.proxy.account import Account, begin_trace
from pdserve.router.proxy.bodies import Bodies
from pdserve.router.proxy.decode import Decode
from pdserve.router.proxy.direct import DirectWay
from pdserve.router.proxy.failures import WorkerAnswerError
from pdserve.router.proxy.parts import Parts
from pdserve.router.proxy.place import first_plan, last_turn, plan
from pdserve.router.proxy.prefill import prefill, release_prefill, settle
from pdserve.router.proxy.recover import Recovery
from pdserve.router.proxy.understand import Understanding
from pdserve.router.request.request import Request
from pdserve.router.request.traces import TraceFile
from pdserve.router.tenants.tenant import TenantState
from pdserve.tracing import Tracer

logger = logging.getLogger(__name__)


class Proxy:
    """Serves `ENDPOINTS`. Its constructor needs a running event loop."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        gate: Gate,
        upstream: Upstream,
        stats: Stats,
        tracer: Tracer | None = None,
        cors: Cors | None = None,
        trace_file: TraceFile | None = None,
    ) -> None:
        self.targets: Final = {path.encode("ascii"): path for path in ENDPOINTS}
        """Path by request target."""
        self._parts = parts = Parts(config, fleet, gate, upstream, stats)
        self._fleet = fleet
        self.placer: Final = parts.placer
        self._gate = gate
        self._stats = stats
        self._loop = parts.loop
        self.running: Final = upstream.deadlines.watched
        """The requests that are served now."""
        self._tracer = tracer
        self._cors = cors
        self._has_extras = tracer is not None or cors is not None
        self._account = Account(config, stats, trace_file, has_traces=tracer is not None)
        self._total_s = config.deadlines.total_s
        self._early_head_s = config.deadlines.early_head_s
        self._bodies = Bodies(config, fleet)
        self._understanding = Understanding(
            config, fleet, gate, stats, needs_prefix=parts.placer.needs_prefix
        )
        told_by = *HEADERS, *self._understanding.told_by, b"content-encoding"
        self.request: Final[Callable[..., Request]] = Request.maker(self.handle, told_by)
        """Makes the requests that are served here."""
        self._decode = Decode(parts)
        self._recovery = Recovery(parts, self._decode)
        self._direct = DirectWay(parts, self._decode, self._recovery)

    def find(self, path: str) -> str | None:
        """The endpoint that a target's path means, see `api.endpoints`."""
        folded = fold(path)
        return folded if folded in ENDPOINTS else None

    async def handle(self, request: Request) -> None:
        """Serve one request. Never raises: whatever happens is answered, or ends with the connection."""
        bodies, gate, understanding, size = self._bodies, self._gate, self._understanding, len(request.body)
        self.running.add(request)
        if self._has_extras:
            self._begin_extras(request)
        try:
            if (
                request.more_body
                or request.method != b"POST"
                or size > bodies.at_once_bytes
                or bodies.held_bytes + size > bodies.limit_bytes
                or (not request.is_plain and b"content-encoding" in request.fields)
            ):
                request.total_s = request.started_s + bodies.limit_s
                tenant = await self._admit(request)
                if tenant is None:
                    return
            else:  # nearly always
                request.total_s = request.started_s + self._total_s
                tenants = gate.tenants
                request.tenant = tenant = gate.whose(request) if tenants.has_keys else tenants.anonymous
                request.held_bytes = size
                bodies.held_bytes += size
            request.phase = "plan"
            view, now_s, fleet = understanding.read(request), self._loop.time(), self._fleet
            snapshot = fleet.snapshot(view.model, now_s) if view.model in fleet.tasks else None
            if snapshot is not None and snapshot.slots:
                understanding.understand(request, tenant, view)
                if not gate.start(request, tenant, snapshot.slots, now_s):
                    await gate.enter(request, tenant)
                    snapshot = None
            else:
                await self._hold(request, tenant, view)
                snapshot = None
            try:
                if request.trace is not None:
                    request.planned_s = time.monotonic()
                await self._dispatch(request, snapshot, now_s)
            finally:
                gate.leave(request, tenant)
        except RequestError as error:
            if request.phase == "body":
                await self._bodies.refuse(request, error)
            else:
                await request.send_error(error)
        except WorkerAnswerError as answer:  # the prefill worker finds the request at fault
            await request.send_worker_error(answer.status, answer.body)
        except asyncio.CancelledError:
            await self._on_cancelled(request)
        except Exception:  # the boundary of a request: a bug in the router must not leave the client hanging
            request.name_logs()
            logger.exception("a request failed inside the router")
            await request.break_off(500, "Internal error in the router.", "internal_error")
        finally:
            self.running.discard(request)
            bodies.held_bytes -= request.held_bytes
            self._account.end(request)

    async def _hold(self, request: Request, tenant: TenantState, view: RequestView) -> None:
        """Wait for a worker of the request's model, which has none, and until it may run. Raises
        RequestError.
        """
        gate = self._gate
        held = await gate.hold(request, view.model)
        try:
            self._understanding.understand(request, tenant, view)
        except BaseException:
            if held is not None:
                gate.release(held)
            raise
        await gate.enter(request, tenant, held)

    async def _dispatch(self, request: Request, snapshot: Snapshot | None, now_s: float) -> None:
        """Have workers answer. `snapshot`: those of its model now, `now_s`, where they are known. Both
        workers are claimed while the last turn settles. Raises RequestError, and WorkerAnswerError when the
        request itself is at fault. On cancellation all load is released.
        """
        parts, fleet, last = self._parts, self._fleet, None
        if parts.suspicion.is_active:
            await parts.suspects.check(request)
            snapshot = None
        if snapshot is None:
            now_s = parts.loop.time()
        if request.facts.session is not None:
            last = last_turn(parts, request, now_s)
        try:
            made = plan(parts, request, last, now_s, (), snapshot)
        except NoWorkerError:
            made = await first_plan(parts, request, last)
            now_s = parts.loop.time()
        parts.budget.requests += 1
        if request.streams and request.endpoint.streams:
            request.quiet_s = now_s + self._early_head_s
        if made.handoff == "direct":
            if await self._direct.answer(request, last):
                return
            made, now_s = request.plan, parts.loop.time()
        decode, first, tokens = made.decode, made.prefill, made.uncached_tokens
        if first is None:
            request.queued_tokens = tokens
        else:
            fleet.on_selected(first, now_s, tokens, 1)
            request.prefills, request.prefill_tokens = first, tokens
        request.trial = fleet.on_selected(decode, now_s, request.queued_tokens)
        try:
            if made.settle is not None:
                word = await settle(parts, request, made.settle)
                request.words += (word,)
            if first is not None:
                word = await prefill(parts, request, first)
                request.words += (word,)
            else:
                request.asked_s = time.monotonic()
            request.phase = "decode"
            failure = await self._decode.attempt(request, decode)
        finally:
            fleet.on_released(decode, request.queued_tokens)
            if request.prefills is not None:
                release_prefill(parts, request)
        if failure is not None:
            request.queued_tokens = 0
            await self._recovery.retry(request, decode, failure)

    async def _admit(self, request: Request) -> TenantState | None:
        """Whose request it is, once its body is here. None: it is not to be served; its client was told, or
        left.
        """
        if request.method != b"POST":
            await self._serve_other_method(request)
            return None
        try:
            request.tenant = tenant = self._gate.whose(request)
            body = await self._bodies.read(request)
        except RequestError as error:
            await self._bodies.refuse(request, error)
            return None
        if body is None:
            request.end = "client"
            self._stats.client_aborts[request.phase] += 1
            return None
        request.body = body
        request.total_s = request.started_s + self._total_s
        if not request.connection.is_reading:  # for a large body, which was read
            request.connection.read_on()
        return tenant

    async def _serve_other_method(self, request: Request) -> None:
        cors = self._cors
        if cors is not None and (said := cors.preflight(request.method.decode("ascii"), request.fields)):
            request.more_headers = said
            await request.send_json(200, b"")
            return
        error = RequestError(405, "Only POST is allowed here.")
        await request.send_json(405, error_of(error, request.endpoint.errors), [(b"allow", b"POST")])

    def _begin_extras(self, request: Request) -> None:
        """A trace of the request, and headers for pages of other origins."""
        if self._tracer is not None:
            begin_trace(self._tracer, request)
        if self._cors is not None:
            request.more_headers = self._cors.headers(request.fields)

    async def _on_cancelled(self, request: Request) -> None:
        """The request was ended from outside: by its client, by its deadline, or by the server that stops."""
        if request.end == "client":
            self._stats.client_aborts[request.phase] += 1
            logger.debug("client left (%s)", request.phase)
            return
        if request.phase == "body" and request.end == "deadline" and not request.is_started:
            error = RequestError(408, "The request's body did not come in time.", code="body_too_slow")
            await request.send_json(408, error_of(error, request.endpoint.errors), closes=True)
            return
        if request.end == "deadline":
            status, message, code = 504, "The request took longer than it may in all.", "deadline_exceeded"
        else:
            status, message, code = 503, "The router is stopping.", "router_stopping"
        if request.is_started:
            self._stats.stream_errors[code] += 1
        try:
            await in_task(request.break_off(status, message, code), LAST_WORD_S)
        except TimeoutError:
            logger.warning("client does not read, cut off")
