"""Admission: who may send a request, and when it may run.

The gate: whose request it is, whether it may run now, and what it has used when it is over.

`Tenants` and `FairQueue` decide. The gate has the clock, a future for each waiting request, and a timer that
runs while requests wait.

Metrics of tenants and of the queue.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from pdserve.errors import RequestError
from pdserve.logs import ThrottledLog
from pdserve.metric import Labels
from pdserve.router.admission.queue import FairQueue, Lane, State, Ticket
from pdserve.router.admission.start_by import CODE, HEADERS, start_within_s
from pdserve.router.api.errors import NoWorkerError, TooManyError
from pdserve.router.config.router import RouterConfig
from pdserve.router.config.tenants import OTHERS
from pdserve.router.fleet.registry import ANY, DEFAULT_MODEL, MAX_CONTEXT, UNKNOWN_SLOTS, Fleet, Models
from pdserve.router.metrics.stats import Histogram
from pdserve.router.native.slots import copied
from pdserve.router.request.request import Request
from pdserve.router.request.token_usage import ONE_ANSWER, Meter
from pdserve.router.tenants.api_keys import admin_key, check_open, load_keys
from pdserve.router.tenants.tenant import Tenants, TenantState
from pdserve.security.failed_logins import FailedLogins
from pdserve.security.tokens import bearer, digest, same

T = TypeVar("T")
logger = logging.getLogger(__name__)

MAX_SHOWN_BYTES = 512
"""Of headers with a key, which a connection keeps."""
TICK_S = 0.1
"""Bound on how late a waiting request is refused, or learns of a new worker."""


class Gate:
    """Lets requests in. Make it inside the running loop."""

    def __init__(self, config: RouterConfig, fleet: Fleet) -> None:
        """Raises ConfigError for keys or tenants that cannot be used."""
        self._fleet = fleet
        self._models = Models(config.models, config.default_model)
        self._worker_wait_s = config.deadlines.wait_for_worker_s
        fleet.watchers.append(self._fill_waiting)
        self._loop = asyncio.get_running_loop()
        self.aliases = config.aliases
        """Names for clients → the models, or BASE:ADAPTER, that they stand for."""
        self._default = config.default_model
        self._admission = config.admission
        self._waiters: dict[Ticket, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._log = ThrottledLog(logger)
        self.queue = FairQueue(config.admission.queue_length)
        self.tenants = Tenants()
        self.queue_wait = Histogram()
        self.unknown_keys = 0
        """Requests refused because their key is unknown or missing."""
        self.unread_keys = 0
        """Requests refused because their address has sent too many wrong keys."""
        self._failed_logins = FailedLogins(config.access.proxies)
        self._admin_key = digest(admin_key(config.admin))
        self._config = config
        self.read_keys()

    def read_keys(self) -> None:
        """Read the keys, again too. Raises ConfigError, and then changes nothing."""
        config, keys = self._config, load_keys(self._config.access)
        check_open(config, keys)
        tenants = [tenant for tenant in config.tenants if tenant.name != OTHERS]
        self.tenants.configure(keys, tenants, config.tenant_defaults, self._loop.time())

    def authenticate(self, headers: dict[bytes, bytes], address: str) -> TenantState:
        """The tenant whose key the headers have: OpenAI's clients send it as `Authorization: Bearer KEY`,
        Anthropic's as `x-api-key: KEY`. `address`: the client's. Raises RequestError (401, or 429 for an
        address that guesses).
        """
        if not self.tenants.has_keys:
            return self.tenants.anonymous
        key = bearer(headers.get(b"authorization")) or headers.get(b"x-api-key", b"").decode("latin-1")
        tenant = self._looked_at(key, address, self.tenants.find)
        if tenant is None:
            raise self._unknown(key)
        return tenant

    def whose(self, request: Request) -> TenantState:
        """As `authenticate`. A connection shows the same key again and again, which is looked at once."""
        tenant: TenantState
        fields, keys, (known, then, tenant) = request.fields, self.tenants.by_prefix, request.connection.shown
        shown = b"%b\n%b" % (fields.get(b"authorization", b""), fields.get(b"x-api-key", b""))
        if then is keys and hmac.compare_digest(shown, known):
            return tenant
        tenant = self.authenticate(fields, request.address)
        if len(shown) <= MAX_SHOWN_BYTES:
            request.connection.shown = shown, keys, tenant
        return tenant

    def authenticate_admin(self, headers: dict[bytes, bytes], address: str) -> None:
        """Check the administrators' key. Raises RequestError as `authenticate`."""
        key = bearer(headers.get(b"authorization"))
        if not self._looked_at(key, address, lambda shown: same(shown, self._admin_key)):
            raise self._unknown(key)

    def _looked_at(self, key: str, address: str, find: Callable[[str], T]) -> T | None:
        """Whose key it is, by its digest. Raises TooManyError where the address has tried too many."""
        if not key:
            return None
        shown, now_s = digest(key), self._loop.time()
        key_id = shown.encode()
        if not self._failed_logins.may_try(address, key_id, now_s):
            self.unread_keys += 1
            self._log.warning("guesses", "keys from %s are not looked at: too many there were wrong", address)
            wait_s = self._failed_logins.wait_s(address, now_s)
            raise TooManyError("Your address has sent too many wrong keys.", wait_s, "too_many_wrong_keys")
        found = find(shown)
        if found:
            self._failed_logins.proved(address, key_id)
        else:
            self._failed_logins.failed(address, now_s)
        return found

    def _unknown(self, key: str) -> RequestError:
        self.unknown_keys += 1
        self._log.warning(
            "key", "a request was refused: %s", "its key is unknown" if key else "it has no key"
        )
        said = "Incorrect API key provided." if key else "A key is needed: `Authorization: Bearer KEY`."
        return RequestError(401, said, type_="authentication_error", code="invalid_api_key")

    def model_of(self, request: Request, requested: str | None) -> str:
        """The served model that a call means. Raises RequestError, NoWorkerError as `Models.resolve`."""
        return self._models.resolve(requested, request.endpoint, self._fleet.tasks)

    def named(self, requested: str | None) -> str | None:
        """`requested`, or the model for which it stands if it is an alias."""
        name = self._default if requested in (None, "", DEFAULT_MODEL) else requested
        return self.aliases.get(name or "", requested)

    def served_model(self, requested: str | None) -> str:
        """The served model of this name. Raises RequestError, NoWorkerError as `Models.find`."""
        return self._models.find(self.named(requested), self._fleet.tasks)

    async def hold(self, request: Request, requested: str | None) -> Ticket | None:
        """Where the model that a request means has no worker that is ready, wait for one. Returns the slot
        that it has then, for `enter` or `release`; None where there is a worker. So nothing that depends on
        the workers is read from the request before.

        Raises RequestError: 404 for an unknown model, 503 if no worker comes in time, 429 if those that wait
        are too many.
        """
        name = self._awaited(requested)
        if name == ANY:
            self.release(await self._hold(request, name))
            name = self._awaited(requested)
        return None if self._slots(name, self._loop.time()) else await self._hold(request, name)

    def release(self, ticket: Ticket) -> None:
        """A slot is not used after all."""
        self._wake(self.queue.leave(ticket, self._loop.time()))

    def start(self, request: Request, tenant: TenantState, slots: int, now_s: float) -> bool:
        """Let a request that has come run, where nobody waits and nothing keeps it from that; it must `leave`
        then. False: it must `enter`. `slots`: those of its model now. Raises RequestError (429) if its tenant
        is over a rate.
        """
        if not (request.is_plain or HEADERS.isdisjoint(request.fields)):
            return False
        lane = self.queue.free_lane(request.model, tenant, slots)
        if lane is None:
            return False
        facts = request.facts
        if tenant.has_rates:
            tenant.take(facts.charged_tokens, now_s, facts.answers)
        lane.start(tenant)
        request.lane, request.entered_s = lane, now_s
        tenant.use.requests += 1
        if facts.answers == 1:
            request.meter = meter = copied(ONE_ANSWER[request.path])
            meter.charged_tokens = facts.charged_tokens
        else:
            request.meter = _meter(request)
        return True

    async def enter(self, request: Request, tenant: TenantState, held: Ticket | None = None) -> None:
        """Wait until a request that has come may run; it must `leave` then. `held`: the slot from `hold`,
        which is used or released. Raises RequestError: 429 if its tenant is over a rate, if it waits too long
        or too many do, 503 if its model has no worker for too long.
        """
        facts, now_s = request.facts, self._loop.time()
        if held is not None and held.lane != request.model:
            self.release(held)
            held = None
        try:
            tenant.take(facts.charged_tokens, now_s, facts.answers)
        except BaseException:
            if held is not None:
                self.release(held)
            raise
        if held is None:
            try:
                held = self._arrive(request, tenant, now_s)
                await self._wait_for_slot(request, held)
            except BaseException:  # refused, or the client left
                tenant.settle(facts.charged_tokens, 0, 0, self._loop.time())
                raise
        self._entered(request, tenant, self.queue.lane(held), held.started_s)

    def _arrive(self, request: Request, tenant: TenantState, now_s: float) -> Ticket:
        facts, settings = request.facts, self._admission
        head_start_s = settings.head_start_s(facts.urgency) if facts.urgency else 0.0
        wait_s = min(settings.queue_s, self._time_to_begin(request, tenant))
        head_start_s += settings.queue_s - wait_s  # so the queue's order is that of deadlines
        left_s = self._worker_wait_s - request.outage_s
        ticket = Ticket(tenant, request.model, now_s, now_s + wait_s, head_start_s, left_s)
        self._wake(self.queue.arrive(ticket, self._slots(request.model, now_s), now_s))
        return ticket

    def _entered(self, request: Request, tenant: TenantState, lane: Lane, now_s: float) -> None:
        request.lane, request.entered_s = lane, now_s
        tenant.use.requests += 1
        request.meter = _meter(request)

    def _time_to_begin(self, request: Request, tenant: TenantState) -> float:
        """How long the call may still wait, as its client says. Raises RequestError: 400, or 429 if it cannot
        begin in time, however the queue is ordered.
        """
        within_s = start_within_s(request.fields)
        if within_s == math.inf:
            return within_s
        left_s = within_s - (time.monotonic() - request.started_s)
        if left_s <= self.queue.next_slot_s(request.model, self._slots(request.model, self._loop.time())):
            tenant.use.refused += 1
            retry_s = self.queue.retry_after_s(request.model)
            raise TooManyError("The answer cannot begin within the request's deadline.", retry_s, CODE)
        return left_s

    def _awaited(self, requested: str | None) -> str:
        served = self._fleet.tasks
        if requested is not None and requested in served:
            return requested
        return self._models.awaited(requested, served, {*self._fleet.known, *self.aliases.values()})

    async def _hold(self, request: Request, name: str) -> Ticket:
        now_s = self._loop.time()
        left_s = self._worker_wait_s - request.outage_s
        if left_s <= 0:
            raise NoWorkerError("No worker is ready to serve this model; try again shortly.")
        assert request.tenant is not None
        ticket = Ticket(request.tenant, name, now_s, now_s + self._admission.queue_s, 0.0, left_s)
        changed = self.queue.arrive(ticket, self._slots(name, now_s), now_s)
        self._wake(changed)
        try:
            await self._wait_for_slot(request, ticket)
        finally:
            request.outage_s += self._loop.time() - now_s
        return ticket

    async def _wait_for_slot(self, request: Request, ticket: Ticket) -> None:
        """Raises RequestError as `wait`; the ticket is over then."""
        now_s = self._loop.time()
        try:
            if ticket.state is State.WAITING:
                request.phase = "queue"
                await self._wait(ticket)
                waited_s = self._loop.time() - now_s
                request.parts_s["queue"] = request.parts_s.get("queue", 0.0) + waited_s
            if ticket.state is State.REFUSED:
                self._refuse(ticket)
        except BaseException:  # refused, or the client left
            self.release(ticket)
            raise

    def leave(self, request: Request, tenant: TenantState) -> None:
        """A request that ran is over: charge what it used, and let a waiting one run."""
        meter, now_s = request.meter, self._loop.time()
        assert meter is not None
        try:
            request.used = prompt, output = meter.total(request.is_stream)
            is_charged = 0 < request.status < 400 or request.end is not None
            if is_charged or meter.prompt_tokens is not None:
                if prompt + output > self._fleet.longest_context.get(request.model, 0):
                    prompt, output = self._credible(request, prompt, output)
            else:  # refused, or failed, before any worker said that it computed the prompt
                prompt = output = 0
            tenant.settle(meter.charged_tokens, prompt, output, now_s)
        finally:  # a slot that is not given back is lost for good
            changed = self.queue.end(request.lane, tenant, request.entered_s, now_s)
            if changed:
                self._wake(changed)

    def _credible(self, request: Request, prompt: int, output: int) -> tuple[int, int]:
        """What workers say counts as far as it can be: a worker's lie must not lock a tenant out."""
        facts = request.facts
        context = self._fleet.longest_context.get(request.model, MAX_CONTEXT)
        if prompt > context * facts.prompts:
            prompt = min(prompt, max(len(request.body), context * facts.prompts))
        return prompt, min(output, context * facts.answers)

    def _fill_waiting(self) -> None:
        if self._waiters:
            self.fill()

    def fill(self) -> None:
        """Let waiting calls run where there are more workers now, or a tenant has a larger share."""
        now_s = self._loop.time()
        for model in self.queue.busy_lanes:
            self._wake(self.queue.resize(model, self._slots(model, now_s), now_s))

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _slots(self, model: str, now_s: float) -> int:
        if model == ANY:
            return UNKNOWN_SLOTS if self._fleet.tasks else 0
        return self._fleet.snapshot(model, now_s).slots

    async def _wait(self, ticket: Ticket) -> None:
        self._waiters[ticket] = waiter = self._loop.create_future()
        if self._timer is None:
            self._timer = self._loop.call_later(TICK_S, self._tick)
        try:
            await waiter
        finally:
            self._waiters.pop(ticket, None)
            self.queue_wait.observe(self._loop.time() - ticket.arrived_s)

    def _refuse(self, ticket: Ticket) -> None:
        waited_s = self._loop.time() - ticket.arrived_s
        if ticket.is_without_worker:
            self._log.warning("worker", "a request was refused: no worker came in %.1f s", waited_s)
            raise NoWorkerError("No worker became ready to serve this model in time; try again shortly.")
        ticket.tenant.use.refused += 1
        self._log.warning(
            ticket.tenant.name,
            "tenant %s: a request was refused after %.1f s in the queue; %d wait",
            ticket.tenant.name,
            waited_s,
            self.queue.waiting,
        )
        raise TooManyError("The server is busy.", self.queue.retry_after_s(ticket.lane), "overloaded")

    def _wake(self, changed: Iterable[Ticket]) -> None:
        for ticket in changed:
            waiter = self._waiters.get(ticket)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    def _tick(self) -> None:
        self._wake(self.queue.expire(self._loop.time()))
        self.fill()
        self._timer = self._loop.call_later(TICK_S, self._tick) if self._waiters else None


def _meter(request: Request) -> Meter:
    facts = request.facts
    return Meter(facts.charged_tokens, request.endpoint.usage, facts.choices, facts.prompts)


def gate_metrics(gate: Gate) -> dict[str, dict[Labels, int]]:
    """Counters and gauges by name, then by labels. Tenants are as many as the keys file names."""
    tenants = gate.tenants.all
    requests: dict[Labels, int] = {}
    tokens: dict[Labels, int] = {}
    for tenant in tenants:
        requests[tenant.name, "admitted"] = tenant.use.requests
        requests[tenant.name, "refused"] = tenant.use.refused
        tokens[tenant.name, "prompt"] = tenant.use.prompt_tokens
        tokens[tenant.name, "output"] = tenant.use.output_tokens
    return {
        "tenant_requests": requests,
        "tenant_tokens": tokens,
        "tenant_running": {(tenant.name,): tenant.running for tenant in tenants},
        "tenant_waiting": {(tenant.name,): tenant.waiting for tenant in tenants},
        "unknown_keys": {(): gate.unknown_keys},
        "unread_keys": {(): gate.unread_keys},
    }
