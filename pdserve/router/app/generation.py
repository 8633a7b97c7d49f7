"""Generation endpoints: read the body, plan, dispatch, and account for every way it can end.

What is noted of a request that is over: metrics, and a line in the access log.

Generation endpoints: read the body, plan, dispatch, and account for every way it can end.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import defaultdict
from typing import Any, Final

import msgspec

from pdserve.errors import RequestError
from pdserve.logs import served_request
from pdserve.router.admission.gate import Gate
from pdserve.router.api.content_coding import CodedBody
from pdserve.router.api.diagnostics import asks_diagnosis
from pdserve.router.api.endpoints import ENDPOINTS, Endpoint, find_holder, fold
from pdserve.router.api.errors import NoWorkerError, error_headers, error_of
from pdserve.router.api.nonces import MARK, STRIPPED_HEADER, without_nonce
from pdserve.router.api.request_body import (
    BOM,
    TRUE,
    RequestView,
    asks_about_prompt,
    count_candidates,
    count_choices,
    count_prompts,
    estimate_prompt_tokens,
    has_media,
    has_several_prompts,
    parse_request,
    read_form,
    with_member,
)
from pdserve.router.config.limits import ServiceLevel
from pdserve.router.config.router import RouterConfig
from pdserve.router.config.tenants import SHARED
from pdserve.router.deadlines import Deadlines
from pdserve.router.dispatch.dispatcher import Dispatcher
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import LARGEST_BODY_BYTES
from pdserve.router.metrics.stats import Stats
from pdserve.router.placement.planner import RequestFacts
from pdserve.router.placement.prefix_index import prefix_of
from pdserve.router.request.answer import JSON
from pdserve.router.request.call import Call, begin_trace, end_trace
from pdserve.router.server.cors import Cors
from pdserve.router.server.request_cycle import Client
from pdserve.router.server.uvicorn_server import LAST_WORD_S
from pdserve.router.sessions.history import History
from pdserve.router.sessions.keys import find_session_key, is_final, parse_sources
from pdserve.router.tenants.retained import (
    RETAIN_HEADER,
    RETAINED_HEADER,
    Retained,
    marks_caches,
    seconds_marked,
    seconds_of,
)
from pdserve.router.tenants.rights import (
    PRIORITY_HEADER,
    check_fields,
    check_media,
    empty_tenant_request,
    isolated,
    parse_tenant_request,
    priority_of,
    salt_line,
)
from pdserve.tracing import Tracer

NO_LEVEL: Final = ServiceLevel()
ACCESS_LOG: Final = logging.getLogger("pdserve.router.access")


def account(call: Call, stats: Stats, now_s: float, level: ServiceLevel = NO_LEVEL) -> None:
    """Count the request."""
    answer = call.answer
    stats.in_flight -= 1
    if not answer.is_started:
        stats.requests[call.endpoint.path, "aborted"] += 1
        return
    stats.requests[call.endpoint.path, str(answer.status)] += 1
    stats.first_byte[call.endpoint.path].observe(answer.started_s - call.started_s)
    if answer.is_stream:
        for part, spent_s in call.parts_s.items():
            stats.first_token[part].observe(spent_s)
    if answer.is_complete and answer.status < 400 and call.facts.endpoint.task is not None:
        stats.model_request[call.model].observe(now_s - call.started_s)
        if answer.is_stream:
            first_s, between_s = answer.started_s - call.started_s, 0.0
            stats.model_first_token[call.model].observe(first_s)
            if (more := _tokens(call)[1] - 1) > 0:
                between_s = (now_s - answer.started_s) / more
                stats.model_inter_token[call.model].observe(between_s)
            if level.is_set:
                stats.slo_streams[call.model, level.kept(1e3 * first_s, 1e3 * between_s)] += 1


def log_access(call: Call, now_s: float) -> None:
    """Write the request's line. It holds no prompt, answer or key."""
    answer = call.answer
    prompt, output = _tokens(call)
    said: dict[str, Any] = {
        "route": call.endpoint.path,
        "status": answer.status or "aborted",
        "tenant": "" if answer.tenant is None else answer.tenant.name,
        "model": call.model,
        "stream": call.streams,
        "seconds": round(now_s - call.started_s, 4),
        "first_byte_s": round(answer.started_s - call.started_s, 4) if answer.is_started else None,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "plan": answer.plan_words.decode("ascii", "replace"),
        **{name.decode(): value.decode() for name, value in answer.worker_headers},
    }
    if call.end is not None:
        said["ended_by"] = call.end
    ACCESS_LOG.info("request", extra=said)


def _tokens(call: Call) -> tuple[int, int]:
    """Of the prompts and of the answer, as far as they are known."""
    meter = call.answer.meter
    return (0, 0) if meter is None else meter.total(call.answer.is_stream)


logger = logging.getLogger(__name__)

BODY_BYTES_S = 4096
"""A body that comes at this rate and faster is not too slow."""
DECODED_AT_ONCE_BYTES = 256 * 1024
DRAIN_S = 5.0
"""How long the rest of a refused body is read, so that the client, still sending, gets to see the answer."""


class GenerationHandler:
    """Serves `ENDPOINTS`, over any kind of client connection."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        gate: Gate,
        dispatcher: Dispatcher,
        deadlines: Deadlines,
        stats: Stats,
        tracer: Tracer | None = None,
        cors: Cors | None = None,
    ) -> None:
        self._cors = cors
        self.targets: Final = {path.encode("ascii"): path for path in ENDPOINTS}
        """Path by request target."""
        self._tracer = tracer
        self._fleet = fleet
        self._gate = gate
        self._dispatcher = dispatcher
        self._deadlines = deadlines
        self._stats = stats
        self._needs_prefix = dispatcher.placer.needs_prefix
        self._sources = parse_sources(config.session.sources)
        self._shows_load = config.access.show_load
        self._logs_access = config.access_log
        self.retained: Final = Retained()
        self._history = History()
        self._keeps_nonces = config.keep_nonces
        self._level = config.slo
        self._limits = config.limits
        self._held_limit_bytes = config.limits.held_body_bytes
        self._held_bytes = 0
        """The bodies of all requests in progress."""
        self._total_s = config.deadlines.total_s
        self._body_s = min(config.deadlines.body_s, self._total_s)
        self._loop = asyncio.get_running_loop()
        self._turns: defaultdict[str, int] = defaultdict(int)

    def find(self, path: str) -> str | None:
        """The endpoint that a target's path means, see `api.paths`."""
        folded = fold(path)
        return folded if folded in ENDPOINTS else None

    async def serve(self, client: Client) -> None:
        """One request. Never raises: whatever happens is answered, or ends with the connection."""
        now_s = time.monotonic()
        call = Call(client, now_s, now_s + self._body_s)
        served_request.set(call.request_id)
        if self._tracer is not None:
            begin_trace(self._tracer, call)
        self._stats.in_flight += 1
        self._deadlines.add(call)
        try:
            if self._cors is not None:
                call.answer.more_headers = self._cors.headers(call.headers)
            if client.method == "POST":
                await self._serve(call, client)
            elif self._cors is not None and (said := self._cors.preflight(client.method, call.headers)):
                call.answer.more_headers = said
                await call.answer.send(200, b"")
            else:
                error = RequestError(405, "Only POST is allowed here.")
                await call.answer.send(405, error_of(error, call.endpoint.errors), (b"allow", b"POST"))
        except asyncio.CancelledError:
            call.task.uncancel()
            await self._on_cancelled(call)
        except Exception:  # the boundary of a request: a bug in the router must not leave the client hanging
            logger.exception("a request failed inside the router")
            await call.answer.break_off(500, "Internal error in the router.", "internal_error")
        finally:
            self._deadlines.discard(call)
            self._held_bytes -= call.held_bytes
            now_s = time.monotonic()
            account(call, self._stats, now_s, self._level)
            if self._logs_access:
                log_access(call, now_s)
            if call.trace is not None:
                end_trace(call, now_s)

    async def _serve(self, call: Call, client: Client) -> None:
        try:
            call.tenant = call.answer.tenant = self._gate.authenticate(call.headers, client.address)
            body = await self._read_body(call, client)
        except RequestError as error:
            await self._refuse_body(call, client, error)
            return
        if body is None:
            call.end = "client"
            self._stats.client_aborts[call.phase] += 1
            return
        call.phase = "plan"
        call.deadline_s = call.started_s + self._total_s
        client.watch(call.on_client_gone, call.answer.keep_alive)
        try:
            view = self._read(call, body)
            held = await self._gate.hold(call, view.model)
            try:
                self._understand(call, view)
            except BaseException:
                if held is not None:
                    self._gate.release(held)
                raise
            ticket = await self._gate.enter(call, held)
            call.planned_s = time.monotonic()
            try:
                await self._dispatcher.serve(call)
            finally:
                self._gate.leave(call, ticket)
        except RequestError as error:
            await call.answer.send_error(error)
        finally:
            client.unwatch()

    def _read(self, call: Call, body: bytes) -> RequestView:
        """Read what does not depend on workers, and put a model in place of an alias. Raises RequestError."""
        call.body = body = body if call.endpoint.is_form else body.removeprefix(BOM)
        view = self._view(call, has_keys=self._gate.tenants.has_keys)
        if MARK in body and not self._keeps_nonces:
            view = self._without_nonce(call, view)
        call.streams = view.stream is True
        model = self._gate.named(view.model)
        if model != view.model:
            view.model = model
            if not call.endpoint.is_form:
                call.body = with_member(body, "model", model)
        return view

    def _without_nonce(self, call: Call, view: RequestView) -> RequestView:
        """What the request says without a line at its start that changes each time, see `nonces`."""
        call.body, name = without_nonce(call.body, view)
        if not name:
            return view
        self._stats.nonces += 1
        call.answer.more_headers.append((STRIPPED_HEADER, name))
        return self._view(call, has_keys=self._gate.tenants.has_keys)

    def _understand(self, call: Call, view: RequestView) -> None:
        """Fill in what planning needs, of the workers that there are now. Raises RequestError."""
        body = call.body
        session = find_session_key(self._sources, call.headers, view, body)
        has_keys = self._gate.tenants.has_keys
        call.model = model = self._gate.model_of(call, view.model)
        self._turns[model] += 1
        scope = view.model or model
        if session is not None:
            session = session.of_model(scope)
        if has_keys:  # tenants share neither caches nor sessions, nor see others' load
            limits = call.tenant.limits
            if not limits.controls_engine:
                check_fields(view)
            check_media(view, limits.media_domains)
            call.answer.shows_insides = self._shows_load
            self._isolate(call, view.cache_salt)
            if session is not None:
                session = session.within(call.tenant.name)
            scope = f"{call.tenant.cache}/{scope}"
        elif call.endpoint.salt == "body" and view.cache_salt and self._fleet.takes_plain_salts(model):
            call.body = isolated(body, view.cache_salt, SHARED, is_plain=True)
        endpoint = call.endpoint
        prompt = view.prompt_json(endpoint.prompt_fields)
        computes = endpoint.task is not None  # tokenizing does not: it leaves no pages behind
        several = has_several_prompts(prompt)
        prompts = candidates = choices = 1
        if computes:
            prompts, candidates, choices = self._counts(view, endpoint, prompt, several=several)
        before = 0
        for name in endpoint.preamble_fields:
            before += estimate_prompt_tokens(getattr(view, name))
        tokens = estimate_prompt_tokens(prompt) + before if computes else 0
        charged = tokens or before + estimate_prompt_tokens(view.prompt_json(endpoint.charged_fields))
        if endpoint.bytes_per_token:
            charged = len(body) // endpoint.bytes_per_token
        can_be_direct = (
            self._fleet.has_direct
            and endpoint.is_prefillable
            and not (endpoint.stored_as or several or candidates > 1 or asks_about_prompt(body))
        )
        call.facts = RequestFacts(
            endpoint=endpoint,
            model=view.model,
            session=session,
            is_final=session is not None and is_final(call.headers),
            prompt_tokens_estimate=tokens,
            charged_tokens=charged,
            prompts=prompts,
            has_several_prompts=several,
            has_media=has_media(view),
            can_be_direct=can_be_direct,
            answers=prompts * candidates,
            choices=choices,
            urgency=self._urgency(call, view),
            holder=self._holder(call, view) if endpoint.continues else "",
            turn=self._turns[model],
            draw=random.getrandbits(32),
            prefix=prefix_of(view, prompt, scope) if self._needs_prefix and computes else None,
        )
        if endpoint.hint or RETAIN_HEADER in call.headers or marks_caches(body, view):
            self._retain(call, view)
        if endpoint.task == "generate":
            self._compare(call, view)

    def _compare(self, call: Call, view: RequestView) -> None:
        """Tell what the client changed since the session's last turn, where it names the session."""
        session, words, change = call.facts.session, b"", None
        if session is not None and session.is_named:
            is_known, change = self._history.follow(session, view)
            words = b"" if is_known else b"previous_message_not_found"
        if change is not None:
            words = change.words()
            call.answer.missed.append(words)
        if view.diagnostics and call.endpoint.errors == "anthropic":
            call.diagnose(words if asks_diagnosis(view.diagnostics) else b"")

    def _retain(self, call: Call, view: RequestView) -> None:
        """Have the pool keep the conversation for as long as its client wants, if the tenant may. Raises
        RequestError for a hint that it may not give.
        """
        facts, now_s = call.facts, self._loop.time()
        if hint := call.endpoint.hint:
            self.retained.check_hint(call.tenant, hint, _conversation(call), facts.charged_tokens, now_s)
            return
        seconds, said = 0, call.headers.get(RETAIN_HEADER)
        if facts.endpoint.task == "generate":
            seconds = seconds_marked(call.body, view) if said is None else seconds_of(said)
        tokens = facts.prompt_tokens_estimate
        if self.retained.take(call.tenant, _conversation(call), tokens, seconds, now_s):
            call.keep(seconds)
        elif said is None:  # marks that clients send to whomever
            return
        else:
            seconds = 0
        call.answer.more_headers.append((RETAINED_HEADER, b"%d" % seconds))

    def _view(self, call: Call, *, has_keys: bool) -> RequestView:
        """What is to be read of the body. Raises RequestError (400)."""
        if not call.endpoint.is_form:
            return parse_tenant_request(call.body) if has_keys else parse_request(call.body)
        fields = read_form(call.body, call.headers.get(b"content-type", b""))
        view = empty_tenant_request() if has_keys else RequestView()
        view.model, view.stream = fields.get("model"), fields.get("stream", "").strip().lower() in TRUE
        return view

    def _holder(self, call: Call, view: RequestView) -> str:
        """The worker that holds what the request continues. Raises RequestError (404) if nobody does."""
        name = call.endpoint.continues
        id_: str | None = getattr(view, name)
        if not id_:
            return ""
        holder = find_holder(id_, self._fleet.by_id, call.tenant.name)
        if holder is None:
            raise RequestError(404, f"Response with id {id_[:200]!r} not found.", param=name)
        return holder

    def _urgency(self, call: Call, view: RequestView) -> int:
        """What the request's priority means for the queue. One in the header goes to workers in the body.
        Raises RequestError (400) for one that the tenant may not have.
        """
        header = call.headers.get(PRIORITY_HEADER)
        if header is None and not view.priority:
            return 0
        signs, limits = self._fleet.priority_signs.get(call.model, ()), call.tenant.limits
        is_bound = self._gate.tenants.has_keys and not limits.controls_engine
        asked = priority_of(view.priority, header, signs, limits.max_priority if is_bound else None)
        if asked.to_send is not None and signs and call.endpoint.takes_priority:
            call.body = with_member(call.body, "priority", asked.to_send)
        return asked.urgency

    def _isolate(self, call: Call, given: msgspec.Raw) -> None:
        """Keep the tenant's pages apart from those of others. `given`: the client's own salt."""
        salt, cache = call.endpoint.salt, call.tenant.cache
        if salt == "body":
            is_plain = self._fleet.takes_plain_salts(call.model)
            call.body = isolated(call.body, given, cache, is_plain=is_plain)
        elif salt == "header":
            if not self._fleet.takes_salt_header(call.model):
                raise NoWorkerError(
                    f"Some workers cannot keep tenants apart at {call.endpoint.path} yet; try again later."
                )
            call.salt_line = salt_line(given, cache)
        call.keep_apart()

    def _counts(
        self, view: RequestView, endpoint: Endpoint, prompt: bytes, *, several: bool
    ) -> tuple[int, int, int]:
        """(prompts, candidates for each, answers to each that are sent). Raises RequestError (400)."""
        prompts = candidates = choices = 1
        is_embedding = endpoint.task == "embed"
        if several or is_embedding:
            prompts = count_prompts(prompt, self._limits.prompts, may_be_objects=is_embedding)
        if view.n or view.best_of or view.sampling_params:
            candidates = count_candidates(view, endpoint.sampling_field)
            choices = count_choices(view, endpoint.sampling_field)
        if prompts > self._limits.prompts:
            raise RequestError(400, f"A request may have at most {self._limits.prompts} prompts.")
        if candidates > self._limits.choices:
            message = f"A request may ask for at most {self._limits.choices} answers to a prompt."
            raise RequestError(400, message, param="n")
        return prompts, candidates, choices

    async def _read_body(self, call: Call, client: Client) -> bytes | None:
        """The request's body, None if the client left before its end. Raises RequestError 413, or 503
        where the bodies of all requests together are too much.
        """
        limit = self._limits.body_bytes or self._fleet.body_limit_bytes
        length = call.headers.get(b"content-length", b"0")
        if length.isdigit() and int(length.lstrip(b"0")[:20] or b"0") > limit:  # int() has a bound
            raise _too_large(limit)
        coded = None
        if b"content-encoding" in call.headers:
            coded = CodedBody((said for name, said in client.headers if name == b"content-encoding"), limit)
        parts: list[bytes] = []
        size = 0
        while (piece := await client.read()) is not None:
            part, more = piece
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            if coded is not None:
                await self._decode(call, coded, part, parts)
                if not more:
                    coded.end()
            else:
                self._hold(call, len(part))
                if not more and not parts:
                    return part
                parts.append(part)
            if not more:
                return b"".join(parts)
            call.deadline_s = call.started_s + min(self._total_s, self._body_s + size / BODY_BYTES_S)
        return None

    async def _decode(self, call: Call, coded: CodedBody, data: bytes, parts: list[bytes]) -> None:
        """Add what `data` stands for to `parts`. Others have their turns meanwhile: it may be a thousand
        times as long. Raises RequestError.
        """
        unyielded = 0
        for decoded in coded.feed(data):
            self._hold(call, len(decoded))
            parts.append(decoded)
            unyielded += len(decoded)
            if unyielded >= DECODED_AT_ONCE_BYTES:
                unyielded = 0
                await asyncio.sleep(0)

    def _hold(self, call: Call, size: int) -> None:
        """Count bytes of a body that are held. Raises RequestError (503) where all together are too many."""
        call.held_bytes += size
        self._held_bytes += size
        if self._held_bytes > self._held_limit_bytes:
            raise RequestError(503, "The router holds too many large requests.", code="router_busy")

    async def _refuse_body(self, call: Call, client: Client, error: RequestError) -> None:
        """Answer while the client still sends: take in, bounded, what it sends until it reads, then close."""
        body = error_of(error, call.endpoint.errors)
        headers = [(b"content-type", JSON), *error_headers(error)]
        self._held_bytes -= call.held_bytes
        call.held_bytes = 0
        call.answer.start(error.status, headers, len(body), closes=True)
        await call.answer.write(body, more=True)
        left = self._limits.body_bytes or LARGEST_BODY_BYTES
        try:
            async with asyncio.timeout(DRAIN_S):
                while left > 0 and (piece := await client.read()) is not None:
                    part, more = piece
                    left = left - len(part) if more else 0
        except TimeoutError:
            pass
        await call.answer.write(b"", more=False)

    async def _on_cancelled(self, call: Call) -> None:
        """The call was ended from outside: by its client, by its deadline, or by the server that stops."""
        if call.end == "client":
            self._stats.client_aborts[call.phase] += 1
            logger.debug("client left (%s)", call.phase)
            return
        if call.phase == "body" and call.end == "deadline" and not call.answer.is_started:
            error = RequestError(408, "The request's body did not come in time.", code="body_too_slow")
            await call.answer.send(408, error_of(error, call.endpoint.errors), closes=True)
            return
        if call.end == "deadline":
            status, message, code = 504, "The request took longer than it may in all.", "deadline_exceeded"
        else:
            status, message, code = 503, "The router is stopping.", "router_stopping"
        if call.answer.is_started:
            self._stats.stream_errors[code] += 1
        try:
            async with asyncio.timeout(LAST_WORD_S):
                await call.answer.break_off(status, message, code)
        except TimeoutError:
            logger.warning("client does not read, cut off")


def _conversation(call: Call) -> str:
    """A name for it, of one tenant."""
    session = call.facts.session
    return f"{call.model}/{call.request_id.decode() if session is None else session.name}"


def _too_large(limit_bytes: int) -> RequestError:
    return RequestError(413, f"The request body is larger than {limit_bytes} bytes.", code="body_too_large")
