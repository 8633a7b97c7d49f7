"""The fleet: the health and load of each worker, and the workers eligible for new requests. Pure.

Method calls with `now_s` report probes and outcomes of requests. `snapshot` lists the eligible workers. A
worker is eligible if its last probe said ready, it was not refused, it is not draining, and its circuit is
not open. `membership` has the table of workers.

If the circuits of all ready decode workers are open, these workers are used nevertheless: an attempt serves
the client better than a 503. Prefill workers are not, since a decode worker does not need them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Final

import msgspec

from pdserve.discovery.dns import is_dns_name
from pdserve.router.config.router import Mode, RouterConfig
from pdserve.router.fleet.body_limit import LARGEST_BODY_BYTES, body_limit_bytes
from pdserve.router.fleet.compatibility import find_mismatch
from pdserve.router.fleet.membership import Membership
from pdserve.router.fleet.models import Models
from pdserve.router.fleet.worker import BOTH, ROLES, Role, Worker, WorkerInfo, WorkerLoad

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
    prefill: tuple[Worker, ...] = ()
    """Prefill workers, then elastic ones."""
    decode: tuple[Worker, ...] = ()
    """Decode workers that compute prompts, then elastic ones; aggregated workers if there are none."""
    elastic: tuple[Worker, ...] = ()
    """Those of `prefill` and `decode` that are elastic."""
    direct_prefill: tuple[Worker, ...] = ()
    """Those of `prefill` that can also hand over directly."""
    direct_decode: tuple[Worker, ...] = ()
    """Decode workers of the direct hand-off."""
    slots: int = 0
    """Requests that the decode workers of both kinds should have at a time, all together."""
    resting: tuple[Worker, ...] = ()
    """Elastic workers that answer no new request at present (see `placement.elastic`)."""
    draining: tuple[Worker, ...] = ()
    """Workers that answer no new request, but can still be asked about earlier ones."""
    members: frozenset[str] = frozenset()
    """Ids of all workers, healthy or not, that are not draining."""
    valid_until_s: float = math.inf

    def without(self, ids: Container[str]) -> Snapshot:
        """The same without these workers."""
        kept = {
            name: tuple(worker for worker in getattr(self, name) if worker.id not in ids)
            for name in ("prefill", "decode", "direct_prefill", "direct_decode")
        }
        return msgspec.structs.replace(self, **kept)


class Fleet:
    """All workers."""

    def __init__(
        self,
        workers: Iterable[Worker],
        *,
        circuit_failures: int = 3,
        circuit_open_s: float = 5.0,
        models: Models | None = None,
    ) -> None:
        self._wanted = models or Models()
        self._circuit_failures = circuit_failures
        self._circuit_open_s = circuit_open_s
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
        """Model → tokens of a request that its workers take at most, as they say; 0: unknown."""
        self.has_direct = False
        """Some decode worker takes prompts directly."""
        self.body_limit_bytes = LARGEST_BODY_BYTES
        """No usual request of any model is larger."""
        self.adapters: dict[str, tuple[str, ...]] = {}
        """Model → LoRA adapters that all of its workers have."""
        self.priority_signs: dict[str, frozenset[int]] = {}
        """Model → what a `priority` is multiplied with at its workers, for more to be more urgent: 1, -1,
        both where they do not agree. Empty: they do not look at priorities."""
        self._next_incarnation = 0
        self.members = Membership(workers, self._facts_changed)

    @classmethod
    def from_config(cls, config: RouterConfig) -> Fleet:
        """A fleet of the workers that `config` lists. None of them is ready yet."""
        fleet = cls(
            (),
            circuit_failures=config.probe.circuit_failures,
            circuit_open_s=config.probe.circuit_open_s,
            models=Models(config.models),
        )
        fleet.members.sync("config", listed_workers(config))
        return fleet

    def _facts_changed(self) -> None:
        joined = [w.info for w in self.workers if w.info and not w.refused]
        models = {info.model for info in joined}
        self.longest_context = {
            m: max(0, *(info.context_length for info in joined if info.model == m)) for m in models
        }
        self.body_limit_bytes = body_limit_bytes(joined)
        self.has_direct = any(w.role == "decode" and w.is_direct for w in self.workers)
        self.tasks = {info.model: frozenset(info.tasks) for info in joined}
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
    def mode(self) -> Mode:
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

    def takes_salt_header(self, model: str) -> bool:
        """Every worker of `model` keeps caches apart by the header with the salt."""
        return all(w.info.takes_salt_header for w in self._of(model) if w.info)

    def takes_plain_salts(self, model: str) -> bool:
        """Some worker of `model` takes no salt with other characters than letters and digits."""
        return any(w.info.plain_salts for w in self._of(model) if w.info)

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
            prefill=(*closed["prefill"], *closed["elastic"]),
            decode=decode,
            elastic=closed["elastic"],
            direct_prefill=tuple(
                w for w in closed["prefill"] or (() if decode else ready["prefill"]) if w.is_direct
            ),
            direct_decode=direct_decode,
            slots=sum(SLOTS_PER_RUNNING * w.max_running or UNKNOWN_SLOTS for w in answering),
            draining=tuple(w for role in ("decode", *BOTH) for w in there[role] if w.draining),
            members=frozenset(w.id for w in self.workers if not w.draining),
            valid_until_s=min(openings, default=math.inf),
        )

    # --- events

    def on_selected(self, worker: Worker, now_s: float) -> int:
        """Count a planned request as in flight at `worker`.

        Returns the number of the circuit breaker's trial that this request is. 0: the circuit is closed.
        """
        worker.in_flight += 1
        if not worker.circuit.retry_at_s:
            return 0
        self._snapshots.clear()
        return worker.circuit.on_selected(now_s, self._circuit_open_s)

    def on_released(self, worker: Worker) -> None:
        """The request counted by `on_selected` is over."""
        worker.in_flight -= 1

    def on_queued(self, worker: Worker, tokens: int) -> None:
        """Add prompt tokens sent to `worker` to be computed. Negative: they were computed or dropped."""
        worker.queued_here += tokens

    def on_load(self, worker: Worker, load: WorkerLoad | None, *, pool_up: bool = False) -> None:
        """The worker reported its load. None: it does not know it, so only this router's requests count."""
        worker.pool_up = pool_up
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
        return worker.circuit.on_failure(now_s, self._circuit_failures, self._circuit_open_s)

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
    lists: tuple[tuple[Role, tuple[str, ...]], ...] = (
        ("prefill", config.prefill),
        ("decode", config.decode),
        ("agg", config.agg),
        ("elastic", config.elastic),
    )
    return {url: role for role, urls in lists for url in urls if not is_dns_name(url)}
