"""What a request asks for: its view of the body, its model, its session, and the facts that its plan is made
from.

A body is read once, by msgspec, and passed on byte for byte. Prompts stay undecoded; media is looked for only
where some worker of the model takes any, or where tenants must be kept from other hosts' (`tenants.rights`).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from operator import attrgetter
from random import getrandbits
from typing import Final

from pdserve.errors import RequestError
from pdserve.router.admission.gate import Gate
from pdserve.router.api.endpoints import find_holder
from pdserve.router.api.errors import NoWorkerError
from pdserve.router.api.nonces import HEAD_BYTES, MARK, STRIPPED_HEADER, without_nonce
from pdserve.router.api.request_body import (
    BOM,
    TRUE,
    UNREADABLE,
    RequestView,
    asks_about_prompt,
    count_candidates,
    count_choices,
    count_prompts,
    decode_request,
    estimate_prompt_tokens,
    has_media,
    parse_request,
    read_form,
    read_prompt,
    with_member,
)
from pdserve.router.config.router import RouterConfig
from pdserve.router.config.tenants import SHARED
from pdserve.router.fleet.registry import Fleet
from pdserve.router.metrics.stats import Stats
from pdserve.router.placement.planner import RequestFacts
from pdserve.router.placement.prefix_index import prefix_of
from pdserve.router.request.request import Request
from pdserve.router.sessions.canonical import Chains
from pdserve.router.sessions.history import History, asks_diagnosis
from pdserve.router.sessions.keys import FINAL_HEADERS, find_session_key, is_final, parse_sources
from pdserve.router.tenants.retained import (
    RETAIN_HEADER,
    RETAINED_HEADER,
    check_hints,
    keep,
    seconds_marked,
    seconds_of,
)
from pdserve.router.tenants.rights import (
    PRIORITY_HEADER,
    check_fields,
    check_media,
    decode_tenant_request,
    empty_tenant_request,
    isolated,
    parse_tenant_request,
    priority_of,
    salt_line,
)
from pdserve.router.tenants.tenant import TenantState

_says_more: Final = attrgetter(
    *("user", "prompt_cache_key", "metadata", "n", "best_of", "sampling_params", "cache_salt", "priority"),
    "diagnostics",
)
"""Fields of which each makes a request unusual."""
_WISHES: Final = frozenset((*FINAL_HEADERS, PRIORITY_HEADER, RETAIN_HEADER))


class Understanding:
    """Reads requests. Keeps how many came for each model."""

    def __init__(
        self, config: RouterConfig, fleet: Fleet, gate: Gate, stats: Stats, *, needs_prefix: bool
    ) -> None:
        """`needs_prefix`: of the prompts, for their plans."""
        self._stats = stats
        self._history = History(config.session.ttl_s)
        self._chains = Chains()
        self._keeps_nonces = config.keep_nonces
        self._fleet = fleet
        self._gate = gate
        self._needs_prefix = needs_prefix
        self._sources = sources = parse_sources(config.session.sources)
        of_sessions = (one.header for one in sources if one.header)
        self.told_by: Final = frozenset((*of_sessions, PRIORITY_HEADER, RETAIN_HEADER))
        """Headers by which clients say more of a request."""
        kinds = {one.kind for one in sources if not one.header}
        self._looks_further = bool(kinds - {"user", "prompt_cache_key", "metadata.user_id"})
        self._shows_load = config.access.show_load
        self._limits = config.limits
        self._loop = asyncio.get_running_loop()
        self._turns: defaultdict[str, int] = defaultdict(int)

    def read(self, request: Request) -> RequestView:
        """Read what does not depend on workers, and put a model in place of an alias. Raises RequestError."""
        has_keys, body = self._gate.tenants.has_keys, request.body
        if request.endpoint.is_form:
            view = _view_of_form(request, has_keys=has_keys)
        else:
            try:
                view = decode_tenant_request(body) if has_keys else decode_request(body)
            except UNREADABLE:
                if body[:3] == BOM:
                    request.body = body = body[3:]
                view = parse_tenant_request(body) if has_keys else parse_request(body)  # says what is wrong
        start = body
        if len(body) > HEAD_BYTES:
            first = view.system or view.instructions or view.messages or view.input
            start = bytes(memoryview(first)[:HEAD_BYTES])
        if MARK in start and not self._keeps_nonces:
            view = self._without_nonce(request, view, has_keys=has_keys)
        request.streams = view.stream is True
        if view.model not in self._fleet.tasks or view.model in self._gate.aliases:
            model = self._gate.named(view.model)
            if model != view.model:
                view.model = model
                if not request.endpoint.is_form:
                    request.body = with_member(request.body, "model", model)
        return view

    def _without_nonce(self, request: Request, view: RequestView, *, has_keys: bool) -> RequestView:
        """What the request says without a line at its start that changes each time, see `api.nonces`."""
        request.body, name = without_nonce(request.body, view)
        if not name:
            return view
        self._stats.nonces += 1
        request.more_headers = [*request.more_headers, (STRIPPED_HEADER, name)]
        if request.endpoint.is_form:
            return _view_of_form(request, has_keys=has_keys)
        return parse_tenant_request(request.body) if has_keys else parse_request(request.body)

    def understand(self, request: Request, tenant: TenantState, view: RequestView) -> None:
        """Fill in what planning needs, of the workers that there are now. Raises RequestError."""
        endpoint, fleet, model = request.endpoint, self._fleet, view.model
        if model is None or endpoint.task not in fleet.tasks.get(model, ()):
            model = self._gate.model_of(request, view.model)
        request.model = model
        self._turns[model] = turn = self._turns[model] + 1
        takes_media = model not in fleet.text_only
        prompt, several, tokens = read_prompt(view, endpoint.prompt_fields, may_be_media=takes_media)
        request.prompt = prompt
        says_more = several or any(_says_more(view))
        is_usual = (
            request.is_plain
            and endpoint.is_usual
            and not (
                says_more or self._looks_further or self._gate.tenants.has_keys or tenant.limits.retain_tokens
            )
        )
        request.facts = RequestFacts(
            endpoint=endpoint,
            model=view.model,
            prompt_tokens_estimate=tokens,
            charged_tokens=tokens,
            has_several_prompts=several,
            has_media=takes_media and has_media(view),
            can_be_direct=fleet.has_direct and is_usual and not asks_about_prompt(view),
            turn=turn,
            draw=getrandbits(32),
        )
        if is_usual:
            if self._needs_prefix:
                request.facts.prefix = prefix_of(view, prompt, view.model or model)
        else:
            self._look_closer(request, tenant, view, says_more=says_more)
            request.set_lines()

    def _look_closer(
        self, request: Request, tenant: TenantState, view: RequestView, *, says_more: bool
    ) -> None:
        """The facts of a request about which anything is unusual. Raises RequestError."""
        endpoint, facts, has_keys = request.endpoint, request.facts, self._gate.tenants.has_keys
        scope = view.model or request.model
        session = find_session_key(self._sources, request.fields, view, request.body, self._chains)
        if session is not None:
            facts.session = session.of_model(scope, tenant.name if has_keys else "")
            facts.is_turn = endpoint.task == "generate"
        if has_keys:
            self._keep_apart(request, tenant, view)
        elif view.cache_salt and endpoint.salt == "body" and request.model in self._fleet.plain_salts:
            request.body = isolated(request.body, view.cache_salt, SHARED, is_plain=True)
        if (
            says_more
            or not (endpoint.is_usual and facts.prompt_tokens_estimate and _WISHES.isdisjoint(request.fields))
            or tenant.limits.retain_tokens
        ):
            self._look_further(request, tenant, view)
        if self._fleet.has_direct and endpoint.is_prefillable and not endpoint.stored_as:
            has_one = facts.answers == 1 and not facts.has_several_prompts
            facts.can_be_direct = has_one and not asks_about_prompt(view)
        if self._needs_prefix and endpoint.task is not None:
            facts.prefix = prefix_of(view, request.prompt, f"{tenant.cache}/{scope}" if has_keys else scope)
        if facts.is_turn or (view.diagnostics and endpoint.task == "generate"):
            self._compare(request, view)

    def _look_further(self, request: Request, tenant: TenantState, view: RequestView) -> None:
        """What few requests say beside their prompt and their session. Raises RequestError."""
        endpoint, facts, fields = request.endpoint, request.facts, request.fields
        facts.is_final = facts.session is not None and is_final(fields)
        before, may_be_media = 0, request.model not in self._fleet.text_only
        for name in endpoint.preamble_fields:
            before += estimate_prompt_tokens(getattr(view, name), may_be_media=may_be_media)
        computes = endpoint.task is not None  # tokenizing does not: it leaves no pages behind
        tokens = facts.prompt_tokens_estimate + before if computes else 0
        charged = tokens or before + estimate_prompt_tokens(view.prompt_json(endpoint.charged_fields))
        if endpoint.bytes_per_token:
            charged = len(request.body) // endpoint.bytes_per_token
        facts.prompt_tokens_estimate, facts.charged_tokens = tokens, charged
        if computes:
            self._count(facts, view, request.prompt)
        if view.priority or PRIORITY_HEADER in fields:
            facts.urgency = self._urgency(request, tenant, view)
        if endpoint.continues:
            facts.holder = self._holder(request, tenant, view)
        if endpoint.is_hint or RETAIN_HEADER in fields or tenant.limits.retain_tokens:
            self._retain(request, tenant, view)

    def _keep_apart(self, request: Request, tenant: TenantState, view: RequestView) -> None:
        """Tenants share neither caches nor sessions, nor see others' load. Raises RequestError for what it
        may not ask.
        """
        limits, salt, given = tenant.limits, request.endpoint.salt, view.cache_salt
        if not limits.controls_engine:
            check_fields(view, "kv_hints" if request.endpoint.is_hint else "")
        check_media(request.body, view, limits.media_domains)
        request.shows_insides = self._shows_load
        if salt == "body":
            is_plain = request.model in self._fleet.plain_salts
            request.body = isolated(request.body, given, tenant.cache, is_plain=is_plain)
        elif salt == "header":
            if request.model in self._fleet.without_salt_header:
                raise NoWorkerError(
                    f"Some workers cannot keep tenants apart at {request.endpoint.path} yet; try again later."
                )
            request.salt_line = salt_line(given, tenant.cache)
        request.worker_id = tenant.mark + request.id

    def _compare(self, request: Request, view: RequestView) -> None:
        """Tell what the client changed since the session's last turn, where it names the session."""
        session, words = request.facts.session, b""
        if session is not None and session.is_named:
            is_known, change = self._history.follow(session, view, self._loop.time())
            if change is not None:
                words = change.words()
                request.missed += (words,)
            elif not is_known:
                words = b"previous_message_not_found"
        if view.diagnostics and request.endpoint.errors == "anthropic":
            said = words if asks_diagnosis(view.diagnostics) else b""
            request.keep_line += b"x-pdserve-changed: %b\r\n" % (said or b"none")

    def _retain(self, request: Request, tenant: TenantState, view: RequestView) -> None:
        """Have the pool keep the conversation for as long as its client wants, if the tenant may. Raises
        RequestError for a hint that it may not give.
        """
        facts, now_s = request.facts, self._loop.time()
        if request.endpoint.is_hint:
            name, tokens = _conversation(request), facts.charged_tokens
            check_hints(tenant, view.kv_hints, name, tokens, now_s)
            return
        seconds, said = 0, request.fields.get(RETAIN_HEADER)
        if facts.endpoint.task == "generate":
            seconds = seconds_marked(request.body, view) if said is None else seconds_of(said)
        tokens = facts.prompt_tokens_estimate
        if keep(tenant, _conversation(request), tokens, seconds, now_s):
            request.keep_line += b"x-pdserve-keep: %d\r\n" % seconds
        elif said is None:  # marks that clients send to whomever, or none
            return
        else:
            seconds = 0
        request.more_headers = [*request.more_headers, (RETAINED_HEADER, b"%d" % seconds)]

    def _holder(self, request: Request, tenant: TenantState, view: RequestView) -> str:
        """The worker that holds what the request continues. Raises RequestError (404) if nobody does."""
        name = request.endpoint.continues
        id_: str | None = getattr(view, name)
        if not id_:
            return ""
        holder = find_holder(id_, self._fleet.by_id, tenant.name)
        if holder is None:
            raise RequestError(404, f"Response with id {id_[:200]!r} not found.", param=name)
        return holder

    def _urgency(self, request: Request, tenant: TenantState, view: RequestView) -> int:
        """What the request's priority means for the queue. One in the header goes to workers in the body.
        Raises RequestError (400) for one that the tenant may not have.
        """
        header = request.fields.get(PRIORITY_HEADER)
        signs, limits = self._fleet.priority_signs.get(request.model, ()), tenant.limits
        is_bound = self._gate.tenants.has_keys and not limits.controls_engine
        asked = priority_of(view.priority, header, signs, limits.max_priority if is_bound else None)
        if asked.to_send is not None and signs and request.endpoint.takes_priority:
            request.body = with_member(request.body, "priority", asked.to_send)
        return asked.urgency

    def _count(self, facts: RequestFacts, view: RequestView, prompt: bytes) -> None:
        """Prompts, and answers to each. Raises RequestError (400)."""
        endpoint, candidates, choices = facts.endpoint, 1, 1
        is_embedding = endpoint.task == "embed"
        if facts.has_several_prompts or is_embedding:
            facts.prompts = count_prompts(prompt, self._limits.prompts, may_be_objects=is_embedding)
        if view.n or view.best_of or view.sampling_params:
            candidates = count_candidates(view, endpoint.sampling_field)
            choices = count_choices(view, endpoint.sampling_field)
        if facts.prompts > self._limits.prompts:
            raise RequestError(400, f"A request may have at most {self._limits.prompts} prompts.")
        if candidates > self._limits.choices:
            message = f"A request may ask for at most {self._limits.choices} answers to a prompt."
            raise RequestError(400, message, param="n")
        facts.answers, facts.choices = facts.prompts * candidates, choices


def _view_of_form(request: Request, *, has_keys: bool) -> RequestView:
    """Raises RequestError (400)."""
    fields = read_form(request.body, request.fields.get(b"content-type", b""))
    view = empty_tenant_request() if has_keys else RequestView()
    view.model, view.stream = fields.get("model"), fields.get("stream", "").strip().lower() in TRUE
    return view


def _conversation(request: Request) -> str:
    """A name for it, of one tenant."""
    session = request.facts.session
    return f"{request.model}/{request.id.decode() if session is None else session.name}"
