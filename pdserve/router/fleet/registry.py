"""The fleet: which models there are, which workers fit together, who is eligible. Pure.

Models. Workers say which model they serve. The workers of one model are a group with its own placement,
sessions, prefix table and queue. The configuration can name the expected models (`models`): a worker of
another model is refused. A request for an expected model that no worker serves yet gets a 503 instead of a
404.

Workers of one model exchange KV pages, so a page must mean the same at each of them. A worker whose pages
differ is refused when it joins. It is compared again when it, or another worker, has changed.

Method calls with `now_s` report probes and outcomes of requests. `snapshot` lists the eligible workers. A
worker is eligible if its last probe said ready, it was not refused, it is not draining, and its circuit is
not open. `membership` has the table of workers.

If the circuits of all ready decode workers are open, these workers are used nevertheless: an attempt serves
the client better than a 503. Prefill workers are not, since a decode worker does not need them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from pdserve.discovery.dns import is_dns_name
from pdserve.errors import RequestError
from pdserve.router.api.endpoints import Endpoint
from pdserve.router.api.errors import NoWorkerError
from pdserve.router.config.router import RouterConfig, base_of
from pdserve.router.fleet.eligible import NOBODY, Eligible, LoadLog
from pdserve.router.fleet.membership import Membership
from pdserve.router.fleet.worker import (
    BOTH,
    LARGEST_BODY_BYTES,
    ROLES,
    Role,
    Worker,
    WorkerInfo,
    WorkerLoad,
    body_limit_bytes,
)


def find_mismatch(worker: Worker, others: Iterable[Worker]) -> str | None:
    """Why `worker` cannot serve beside those of `others` that have joined: one line, or None if it can.

    Workers with another tokenizer or chat template make other tokens of a prompt, so they would not find
    each other's pages. A worker that no longer answers, or drains, keeps no other worker out: it is compared
    again when it comes back.
    """
    info = worker.info
    if info is None:
        return None
    if info.role not in (worker.role, *BOTH):
        return f"worker {worker.id} is listed under '{worker.role}' but says its role is '{info.role}'"
    for other in others:
        is_away = other.stopping or (other.probe_failures and not other.ready)
        if other is worker or other.info is None or other.refused or is_away:
            continue
        field = differing_field(info, other.info)
        if field is not None:
            name, mine, theirs = field
            return (
                f"{worker.role} worker {worker.id} and {other.role} worker {other.id} differ in {name} "
                f"({mine!r} and {theirs!r}) and cannot share KV pages; give them the same settings and files"
            )
    return None


def joining_order(found: Sequence[tuple[Worker, WorkerInfo]], refused: Container[str]) -> list[Worker]:
    """The order in which workers join that were found together. The first worker decides which others fit,
    and which worker answered first is chance. So the workers whose ids are not in `refused` come first, then
    those that fit most of the workers found, then the order given counts.
    """
    fitting = {
        worker.id: sum(differing_field(info, theirs) is None for _, theirs in found) for worker, info in found
    }
    workers = [worker for worker, _ in found]
    return sorted(workers, key=lambda worker: (worker.id in refused, -fitting[worker.id]))


def differing_field(mine: WorkerInfo, theirs: WorkerInfo) -> tuple[str, Any, Any] | None:
    """(name, ours, theirs) of the first fact that keeps two workers from sharing pages; None: they may."""
    if mine.model != theirs.model and mine.namespace != theirs.namespace:
        return None
    for name in ("model", "engine", "tasks", "page_size"):
        if getattr(mine, name) != getattr(theirs, name):
            return name, getattr(mine, name), getattr(theirs, name)
    for key in sorted(mine.kv_geometry.keys() | theirs.kv_geometry.keys()):
        if mine.kv_geometry.get(key) != theirs.kv_geometry.get(key):
            return f"kv_geometry.{key}", mine.kv_geometry.get(key), theirs.kv_geometry.get(key)
    if mine.namespace != theirs.namespace:
        return "namespace", mine.namespace, theirs.namespace
    for name in ("tokenizer", "chat_template"):
        ours, others = getattr(mine, name), getattr(theirs, name)
        if ours and others and ours != others:
            return name.replace("_", " "), ours, others
    return None


DEFAULT_MODEL = "default"
"""SGLang's name for the model that it serves, as in the examples of its documentation."""
ANY = ""
"""The name of no model: while no worker has said what it serves, a request waits for any of them."""
MAX_ADAPTER_CHARS = 256
"""Session keys begin with the name that the client wrote, adapter included. So the name is bounded."""


class Models:
    """The models of one router."""

    def __init__(self, wanted: Sequence[str] = (), default: str = "") -> None:
        """`wanted`: the expected models; empty: any. `default`: the model of requests that name none."""
        self._wanted = tuple(wanted)
        self._default = default

    def refusal(self, model: str) -> str | None:
        """Why a worker of `model` is refused, or None."""
        if not self._wanted or model in self._wanted:
            return None
        return f"serves {model!r}, which is none of the configured models ({_names(self._wanted)})"

    def resolve(self, requested: str | None, endpoint: Endpoint, served: Mapping[str, frozenset[str]]) -> str:
        """The served model that a request to `endpoint` means. `BASE:ADAPTER` names a LoRA adapter of BASE,
        as in SGLang. `served`: what each model's workers can do.

        Raises NoWorkerError for an expected model that no worker serves yet. Raises RequestError 404 for an
        unknown model, and 400 when no model is named and several are served, when the model cannot do the
        endpoint's task, and for an adapter's name that is too long.
        """
        model = self.find(requested, served)
        if endpoint.task not in (None, "any") and endpoint.task not in served[model]:
            raise RequestError(
                400,
                f"The model {model!r} cannot do {endpoint.path}.",
                code="unsupported_endpoint",
                param="model",
            )
        return model

    def find(self, requested: str | None, served: Mapping[str, frozenset[str]]) -> str:
        """The served model of this name. Raises as `resolve`."""
        if requested and requested in served:
            return requested
        model = self.awaited(requested, served)
        if model not in served:
            raise NoWorkerError("No worker of this model has joined yet; try again shortly.")
        return model

    def awaited(
        self, requested: str | None, served: Mapping[str, frozenset[str]], known: Collection[str] = ()
    ) -> str:
        """The model whose workers a request needs, also while it has none: a served one; one of `known`,
        which were served before or have an alias; an expected one, or the default. ANY: no worker has said
        yet what it serves. Raises RequestError as `resolve`.
        """
        is_named = requested not in (None, "", DEFAULT_MODEL)
        name = requested if requested and is_named else self._default
        if not name:
            if len(served) > 1:
                message = f"'model' is missing; this server serves {_names(served)}."
                raise RequestError(400, message, param="model")
            return next(iter(served), ANY)
        names = (name, base_of(name) or name) if is_named else (name,)
        for there in (served, known, (*self._wanted, self._default)):
            for one in names:
                if one in there:
                    if len(name) - len(one) > MAX_ADAPTER_CHARS + 1:
                        message = f"An adapter's name has at most {MAX_ADAPTER_CHARS} characters."
                        raise RequestError(400, message, param="model")
                    return one
        if not served and not known:
            return ANY
        raise RequestError(
            404,
            f"The model {name[:200]!r} does not exist; this server serves {_names(served or known)}.",
            code="model_not_found",
            param="model",
        )


def _names(models: Collection[str]) -> str:
    return ", ".join(repr(name) for name in models)


MAX_CONTEXT: Final = 1 << 24
"""Tokens that no model takes, for workers that do not say how many theirs does, or more than this."""
SLOTS_PER_RUNNING: Final = 2
"""So a worker always has a request to go on with, while others are prefilled or answered."""
MAX_KNOWN_MODELS: Final = 256
"""Models that are remembered after their workers have left; the newest ones."""
UNKNOWN_SLOTS: Final = 4096
"""Of a worker that does not say how many requests it computes at a time: more than any engine does."""
SIGNS: Final = {"none": 0, "high_first": 1, "low_first": -1}


class Snapshot(msgspec.Struct, frozen=True):
    """The workers eligible for a request for one model. Its `Worker` objects are live, not copies."""

    models: tuple[str, ...]
    model: str = ""
    """The request's."""
    prefill: Eligible = NOBODY
    """Prefill workers, then elastic ones."""
    decode: Eligible = NOBODY
    """Decode workers that compute prompts, then elastic ones; aggregated workers if there are none."""
    elastic: tuple[Worker, ...] = ()
    """Those of `prefill` and `decode` that are elastic."""
    direct_prefill: Eligible = NOBODY
    """Those of `prefill` that can also hand over directly."""
    direct_decode: Eligible = NOBODY
    """Decode workers of the direct hand-off."""
    slots: int = 0
    """Requests that the decode workers of both kinds should have at a time from this process, together."""
    resting: tuple[Worker, ...] = ()
    """Elastic workers that answer no new request at present (see `placement.elastic`)."""
    draining: tuple[Worker, ...] = ()
    """Workers that answer no new request, but can still be asked about earlier ones."""
    members: frozenset[str] = frozenset()
    """Ids of all workers, healthy or not, that are not draining."""
    valid_until_s: float = math.inf

    def without(self, ids: Container[str]) -> Snapshot:
        """The same without these workers."""

        def kept(workers: Eligible) -> Eligible:
            return Eligible((worker for worker in workers if worker.id not in ids), workers.log)

        return msgspec.structs.replace(
            self,
            prefill=kept(self.prefill),
            decode=kept(self.decode),
            direct_prefill=kept(self.direct_prefill),
            direct_decode=kept(self.direct_decode),
        )

    def answering(self, worker_id: str) -> Worker | None:
        """The worker of this id, if it answers new requests."""
        return self.decode.by_id.get(worker_id) or self.direct_decode.by_id.get(worker_id)

    def holding(self, worker_id: str) -> Worker | None:
        """The worker of this id, if it can be asked about earlier requests."""
        found = self.answering(worker_id)
        if found is None and (self.resting or self.draining):
            found = next((w for w in (*self.resting, *self.draining) if w.id == worker_id), None)
        return found


CIRCUIT_OPEN_S: Final = 5.0
"""Until an open circuit lets one trial request through."""


class Fleet:
    """All workers."""

    def __init__(
        self,
        workers: Iterable[Worker],
        *,
        circuit_failures: int = 3,
        models: Models | None = None,
        running_per_worker: int = 0,
        processes: int = 1,
    ) -> None:
        """`running_per_worker`: requests at a time; 0: by what workers say. `processes`: of the router; each
        gives the workers its part of them.
        """
        self._wanted = models or Models()
        self._circuit_failures = circuit_failures
        self._running_per_worker = running_per_worker
        self._processes = processes
        self._snapshots: dict[str, Snapshot] = {}
        self.tasks: dict[str, frozenset[str]] = {}
        """Model → tasks of its workers. Unhealthy workers count, refused workers do not."""
        self.known: dict[str, None] = {}
        """Models that some worker serves or has served since the start; the one that was seen last is last.
        """
        self.watchers: list[Callable[[], None]] = []
        """Called after each event that can make a worker eligible, or shows that one is lost: a probe that
        says ready or finds a worker gone, a join, a leave, the end of a drain."""
        self.on_doubt: Callable[[Worker], None] | None = None
        """Has a worker probed at once, whose connection was lost."""
        self.longest_context: dict[str, int] = {}
        """Model → tokens of a request that its workers take at most, as they say, if that is credible."""
        self.has_direct = False
        """Some decode worker takes prompts directly."""
        self.body_limit_bytes = LARGEST_BODY_BYTES
        """No usual request of any model is larger."""
        self.text_only: frozenset[str] = frozenset()
        """Models none of whose workers takes media, as they say."""
        self.plain_salts: frozenset[str] = frozenset()
        """Models some of whose workers take no salt with other characters than letters and digits."""
        self.without_salt_header: frozenset[str] = frozenset()
        """Models some of whose workers do not keep caches apart by the header with the salt."""
        self.adapters: dict[str, tuple[str, ...]] = {}
        """Model → LoRA adapters that all of its workers have."""
        self.priority_signs: dict[str, frozenset[int]] = {}
        """Model → what a `priority` is multiplied with at its workers, for more to be more urgent: 1, -1,
        both where they do not agree. Empty: they do not look at priorities."""
        self._next_incarnation = 0
        self.log = LoadLog()
        """Workers whose load has changed. Only this class changes the load of a worker."""
        self.members = Membership(workers, self._facts_changed)

    @classmethod
    def from_config(cls, config: RouterConfig) -> Fleet:
        """A fleet of the workers that `config` lists. None of them is ready yet."""
        fleet = cls(
            (),
            circuit_failures=config.probe.circuit_failures,
            models=Models(config.models),
            running_per_worker=config.admission.running_per_worker,
            processes=config.processes,
        )
        fleet.members.sync("config", listed_workers(config))
        return fleet

    def _facts_changed(self) -> None:
        joined = [w.info for w in self.workers if w.info and not w.refused]
        models = {info.model for info in joined}
        longest = {m: max(info.context_length for info in joined if info.model == m) for m in models}
        self.longest_context = {m: n if 0 < n < MAX_CONTEXT else MAX_CONTEXT for m, n in longest.items()}
        self.body_limit_bytes = body_limit_bytes(joined)
        self.has_direct = any(w.role == "decode" and w.is_direct for w in self.workers)
        self.tasks = {info.model: frozenset(info.tasks) for info in joined}
        self.text_only = frozenset(models - {i.model for i in joined if i.is_multimodal is not False})
        self.plain_salts = frozenset(info.model for info in joined if info.plain_salts)
        self.without_salt_header = frozenset(info.model for info in joined if not info.takes_salt_header)
        self.adapters = {
            m: tuple(sorted(set[str].intersection(*(set(w.adapters) for w in joined if w.model == m))))
            for m in models
        }
        self.priority_signs = {
            m: frozenset(SIGNS[info.priorities] for info in joined if info.model == m) - {0} for m in models
        }
        for model in self.tasks:
            self.known.pop(model, None)
            self.known[model] = None
        while len(self.known) > MAX_KNOWN_MODELS:
            del self.known[next(iter(self.known))]
        self._snapshots.clear()
        self._tell()

    def _tell(self) -> None:
        for watcher in self.watchers:
            watcher()

    # --- questions

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All members."""
        return self.members.workers

    @property
    def by_id(self) -> dict[str, Worker]:
        """All members, by id."""
        return self.members.by_id

    @property
    def mode(self) -> Literal["disagg", "agg"]:
        """`disagg` if there are decode or elastic workers, healthy or not."""
        is_disagg = any(worker.role in ("decode", "elastic") for worker in self.workers)
        return "disagg" if is_disagg else "agg"

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the served models (see `tasks`)."""
        return tuple(self.tasks)

    def snapshot(self, model: str, now_s: float) -> Snapshot:
        """Eligible workers for `model`, one of `models`."""
        found = self._snapshots.get(model)
        if found is None or now_s >= found.valid_until_s:
            found = self._snapshots[model] = self._take_snapshot(model, now_s)
        return found

    def context_length(self, model: str) -> int:
        """Longest context in tokens that every worker of `model` accepts. 0: no worker reports one."""
        lengths = [w.info.context_length for w in self._of(model) if w.info and w.info.context_length > 0]
        return min(lengths, default=0)

    def _of(self, model: str, roles: Sequence[Role] = ROLES) -> list[Worker]:
        return [
            w for w in self.workers if w.role in roles and w.info and w.info.model == model and not w.refused
        ]

    def _take_snapshot(self, model: str, now_s: float) -> Snapshot:
        there = {role: [w for w in self._of(model, (role,)) if w.ready] for role in ROLES}
        ready = {role: [w for w in ws if not w.draining] for role, ws in there.items()}
        closed = {role: tuple(w for w in ws if w.circuit.lets_through(now_s)) for role, ws in ready.items()}
        openings = [
            w.circuit.retry_at_s for ws in ready.values() for w in ws if not w.circuit.lets_through(now_s)
        ]
        computing, direct = ([w for w in ready["decode"] if w.is_direct is of] for of in (False, True))
        let_through, direct_let_through = (
            tuple(w for w in of if w.circuit.lets_through(now_s)) for of in (computing, direct)
        )
        decode = (*let_through, *closed["elastic"]) or closed["agg"]
        decode = decode or (*computing, *ready["elastic"]) or tuple(ready["agg"])
        direct_decode = direct_let_through or (() if decode else tuple(direct))
        answering = (*decode, *direct_decode)
        return Snapshot(
            models=self.models,
            model=model,
            prefill=Eligible((*closed["prefill"], *closed["elastic"]), self.log),
            decode=Eligible(decode, self.log),
            elastic=closed["elastic"],
            direct_prefill=Eligible(
                (w for w in closed["prefill"] or (() if decode else ready["prefill"]) if w.is_direct),
                self.log,
            ),
            direct_decode=Eligible(direct_decode, self.log),
            slots=self._slots(answering),
            draining=tuple(w for role in ("decode", *BOTH) for w in there[role] if w.draining),
            members=frozenset(w.id for w in self.workers if not w.draining),
            valid_until_s=min(openings, default=math.inf),
        )

    def _slots(self, workers: Collection[Worker]) -> int:
        of_each = self._running_per_worker
        every = (of_each or SLOTS_PER_RUNNING * worker.max_running or UNKNOWN_SLOTS for worker in workers)
        return math.ceil(sum(every) / self._processes)

    # --- events

    def on_selected(self, worker: Worker, now_s: float, tokens: int = 0, prefills: int = 0) -> int:
        """Count a planned request as in flight at `worker`. Requests that arrive together see each other's
        load, so they do not all choose the same worker. `tokens`: of its prompt, to be computed there.
        `prefills`: 1 where another worker will answer.

        Returns the number of the circuit breaker's trial that this request is. 0: the circuit is closed.
        """
        worker.in_flight += 1
        if tokens or prefills:
            worker.queued_here += tokens
            worker.prefilling += prefills
        if self.log.is_read:
            self.log.moved.append(worker)
        if not worker.circuit.retry_at_s:
            return 0
        self._snapshots.clear()
        return worker.circuit.on_selected(now_s, CIRCUIT_OPEN_S)

    def on_released(self, worker: Worker, tokens: int = 0, prefills: int = 0) -> None:
        """The request counted by `on_selected` is over. `tokens`: those that were not computed."""
        worker.in_flight -= 1
        if tokens or prefills:
            worker.queued_here -= tokens
            worker.prefilling -= prefills
        if self.log.is_read:
            self.log.moved.append(worker)

    def on_queued(self, worker: Worker, tokens: int) -> None:
        """Add prompt tokens sent to `worker` to be computed. Negative: they were computed or dropped."""
        worker.queued_here += tokens
        self.log.moved.append(worker)

    def on_load(self, worker: Worker, load: WorkerLoad | None, *, pool_up: bool = False) -> None:
        """The worker reported its load. None: it does not know it, so only this router's requests count."""
        worker.pool_up = pool_up
        self.log.moved.append(worker)
        self.log.cut()
        if load is None:
            worker.elsewhere, worker.queued_elsewhere, worker.free_kv_tokens = 0, 0, None
            return
        worker.elsewhere = max(0, load.running_requests + load.waiting_requests - worker.in_flight)
        worker.queued_elsewhere = max(0, load.queued_tokens - worker.queued_here)
        worker.free_kv_tokens = load.free_kv_tokens
        if worker.max_running != load.max_running_requests:
            worker.max_running = load.max_running_requests
            self._snapshots.clear()

    def on_trial_answering(self, worker: Worker, trial: int, now_s: float) -> None:
        """The stream of a trial has begun without an error (see `CircuitBreaker`)."""
        if worker.circuit.on_trial_answering(trial, now_s):
            self._snapshots.clear()

    def on_success(self, worker: Worker) -> None:
        """The worker completed an answer."""
        if worker.circuit.on_success():
            self._snapshots.clear()

    def on_failure(self, worker: Worker, now_s: float) -> bool:
        """A request failed by the worker's fault. True if this opened the worker's circuit."""
        self._snapshots.clear()
        return worker.circuit.on_failure(now_s, self._circuit_failures, CIRCUIT_OPEN_S)

    def on_probe_ready(self, worker: Worker) -> bool:
        """A probe said ready. True if the worker was not ready before."""
        worker.probe_failures = 0
        worker.probes_ready += 1
        if self._set_stopping(worker, False):  # it had announced its end, so this is a new process
            self._set_ready(worker, False)
        is_new = self._set_ready(worker, True)
        self._tell()
        return is_new

    def on_probe_stopping(self, worker: Worker) -> bool:
        """The worker reported that it stops: it gets no new request and finishes its own.

        True if it had not reported this before.
        """
        worker.probe_failures = 0
        is_new = self._set_stopping(worker, True)
        self._tell()
        return is_new

    def on_probe_not_ready(self, worker: Worker) -> bool:
        """The worker reported not ready, or its port is closed. True if it was ready before."""
        worker.probe_failures += 1
        self._set_stopping(worker, False)
        return self._set_ready(worker, False)

    def on_probe_unanswered(self, worker: Worker, failures_to_down: int) -> bool:
        """A probe had no answer, which one busy moment can cause. True if this made the worker unhealthy."""
        worker.probe_failures += 1
        return worker.probe_failures >= failures_to_down and self._set_ready(worker, False)

    def on_info(self, worker: Worker, info: WorkerInfo) -> str | None:
        """Store the worker's info. Returns the reason why it is refused, or None if it may join."""
        worker.info = info
        unwanted = self._wanted.refusal(info.model)
        worker.refused = f"worker {worker.id} {unwanted}" if unwanted else find_mismatch(worker, self.workers)
        self._facts_changed()
        return worker.refused

    def _set_stopping(self, worker: Worker, stopping: bool) -> bool:
        if worker.stopping == stopping:
            return False
        worker.stopping = stopping
        self._snapshots.clear()
        return True

    def _set_ready(self, worker: Worker, ready: bool) -> bool:
        if worker.ready == ready:
            return False
        worker.ready = ready
        if ready:  # failures before its absence do not count any more
            worker.circuit.on_success()
            worker.incarnation = f"{worker.id}#{self._next_incarnation}"
            self._next_incarnation += 1
        self._snapshots.clear()
        if not ready:
            self._tell()
        return True


def listed_workers(config: RouterConfig) -> dict[str, Role]:
    """The workers that the configuration lists: base URL → role. Names for DNS are left out."""
    return {url: role for role in ROLES for url in getattr(config, role) if not is_dns_name(url)}
