"""The worker table: who is there, who may be given work, and how loaded each is.

Pure: probes and request outcomes come in as method calls with `now_s`; `snapshot` says who is eligible. A
worker is eligible when its last probe said ready, it was not refused at join, is not draining, and its
circuit is not open.

Workers join and leave at run time, each on the word of one or more sources (the configuration, the admin API,
etcd). One that leaves is out of the table at once and finishes what it has: a `Worker` lives as long as its
requests.

The circuit, fed by the outcome of requests:

    closed --(circuit_failures in a row)--> open until `retry_at_s`
    open   --(retry_at_s passed)----------> half-open: eligible
    half-open --(selected)----------------> open: one request tries, not all
    open   --(its stream begins)----------> half-open: the next one may try, since a stream's end may be far
    any    --(success: a whole answer)----> closed

Decode workers whose circuits are all open are still used when their probes say ready: an attempt is worth
more to the client than a 503. Prefill workers are not, since the decode worker can do without them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from pdserve.errors import PdserveError
from pdserve.router.config.router import Mode, RouterConfig
from pdserve.router.fleet.compatibility import find_mismatch
from pdserve.router.fleet.models import Models
from pdserve.router.fleet.worker import ROLES, Role, Source, Worker, WorkerInfo, WorkerLoad

Act = Literal["join", "leave", "unjoin", "drain", "undrain", "gone"]
"""`gone`: etcd no longer names the worker, so what the admin API said of it is over."""


class FleetError(PdserveError):
    """A worker cannot join or be drained as asked; `code` is `bad_url`, `unknown_worker` or `other_role`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Snapshot(msgspec.Struct, frozen=True):
    """Who may be given a request for `model` now. Workers' `in_flight` in it is live."""

    models: tuple[str, ...]
    prefill: tuple[Worker, ...] = ()
    decode: tuple[Worker, ...] = ()
    """Decode workers, or aggregated ones where no decode worker is eligible."""
    draining: tuple[Worker, ...] = ()
    """Decode and aggregated workers that get no new request, but can still be asked about earlier ones."""
    members: frozenset[str] = frozenset()
    """Ids of all workers, healthy or not, that are not draining."""
    valid_until_s: float = math.inf


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
        self.by_id = {worker.id: worker for worker in workers}
        self.workers = tuple(self.by_id.values())
        self._circuit_failures = circuit_failures
        self._circuit_open_s = circuit_open_s
        self._snapshots: dict[str, Snapshot] = {}
        self.tasks: dict[str, frozenset[str]] = {}
        """What the workers of each model can do. The models are those that workers have said they serve,
        those now unhealthy included; refused workers are not asked.
        """
        self._kept: dict[str, Act] = {}
        """By worker id, what the admin API said and etcd must not undo: one that etcd names shall stay away
        (`leave`), or be drained once etcd names it (`drain`). Over when etcd does not name it.
        """
        self._left: list[Worker] = []
        """Out of the table, with requests to finish."""
        self._next_incarnation = 0
        self.told: Callable[[Act, str, Role], None] | None = None
        """Is told what the admin API does here, to tell the router's other processes, and whom etcd no longer
        names.
        """

    @classmethod
    def from_config(cls, config: RouterConfig) -> Fleet:
        """A fleet of the listed workers, none of them ready yet."""
        fleet = cls(
            (),
            circuit_failures=config.probe.circuit_failures,
            circuit_open_s=config.probe.circuit_open_s,
            models=Models(config.models),
        )
        fleet.sync("config", listed_workers(config))
        return fleet

    # --- membership

    def join(self, url: str, role: Role, source: Source = "admin") -> Worker:
        """A worker is there; it gets requests once a probe has found it ready and fitting. Again is a no-op.

        Raises FleetError for what is no base URL, and for a worker that is there in another role.
        """
        try:
            worker = Worker(role, url)
        except ValueError as error:
            raise FleetError("bad_url", str(error)) from None
        known = self.by_id.get(worker.id)
        if known is not None and known.role != role:
            raise FleetError(
                "other_role", f"worker {worker.id} is there as '{known.role}'; let it leave first"
            )
        if known is None:
            self.by_id[worker.id] = worker
            self._members_changed()
        joined = known or worker
        joined.sources.add(source)
        if self._kept.pop(worker.id, None) == "leave":
            joined.sources.add("etcd")  # which names it: should it leave again, it is to stay away again
        if self.told is not None and source == "admin":
            self.told("join", url, role)
        return joined

    def leave(self, worker_id: str) -> Worker:
        """A worker is gone, whoever named it; its running requests may finish. It stays away until etcd has
        stopped naming it, or the configuration is read anew. Raises FleetError.
        """
        worker = self._get(worker_id)
        self._remove(worker)
        if "etcd" in worker.sources:
            self._kept[worker.id] = "leave"
        self._members_changed()
        if self.told is not None:
            act: Act = "unjoin" if worker.sources == {"admin"} else "leave"
            self.told(act, worker.id, worker.role)
        return worker

    def unjoin(self, worker_id: str) -> None:
        """As `leave`, of a worker that etcd did not name where it was told to: if etcd names it, it stays.
        Raises FleetError.
        """
        worker = self._get(worker_id)
        worker.sources &= {"etcd"}
        if not worker.sources:
            self.leave(worker_id)

    def drain(self, worker_id: str, draining: bool) -> Worker:
        """Give a worker no new requests, or new ones again. Raises FleetError when it is not there."""
        worker = self._get(worker_id)
        worker.drained = draining
        self._snapshots.clear()
        if self.told is not None:
            self.told("drain" if draining else "undrain", worker.id, worker.role)
        return worker

    def expect(self, act: Act, worker_id: str) -> None:
        """What another process was told of a worker that this one may yet learn of from etcd."""
        if worker_id in self.by_id:
            return
        if act in ("leave", "drain"):
            self._kept[worker_id] = act
        elif act == "undrain" and self._kept.get(worker_id) == "drain":
            del self._kept[worker_id]

    def sync(self, source: Source, urls: Mapping[str, Role]) -> tuple[list[Worker], list[Worker]]:
        """Exactly `urls` are what `source` names from now on. Returns (joined, left).

        A worker whose role `source` changes leaves and joins anew. Raises FleetError, and changes nothing
        then, for what is no base URL and for a worker that another source has in another role.
        """
        wanted = {worker.id: worker for worker in self._made(source, urls)}
        if source == "etcd":
            wanted = self._as_kept(wanted)
        else:  # the configuration is read anew: what it lists is there
            self._kept = {id_: act for id_, act in self._kept.items() if id_ not in wanted}
        left: list[Worker] = []
        joined: list[Worker] = []
        for worker in self.workers:
            new = wanted.get(worker.id)
            if source in worker.sources and (new is None or new.role != worker.role):
                worker.sources.discard(source)
                if not worker.sources:
                    self._remove(worker)
                    left.append(worker)
        for worker in wanted.values():
            known = self.by_id.setdefault(worker.id, worker)
            known.sources.add(source)
            if known is worker:
                joined.append(worker)
        if left or joined:
            self._members_changed()
        if self.told is not None:
            for worker in left:
                self.told("gone", worker.id, worker.role)
        return joined, left

    def _as_kept(self, named: dict[str, Worker]) -> dict[str, Worker]:
        """What there is to be of the workers that etcd names."""
        for id_ in self._kept.keys() - named.keys():
            del self._kept[id_]
            if self.told is not None:
                self.told("gone", id_, "decode")
        for id_ in [id_ for id_, act in self._kept.items() if act == "drain"]:
            named[id_].drained = True
            del self._kept[id_]
        return {id_: worker for id_, worker in named.items() if id_ not in self._kept}

    def _made(self, source: Source, urls: Mapping[str, Role]) -> Iterable[Worker]:
        for url, role in urls.items():
            try:
                worker = Worker(role, url)
            except ValueError as error:
                raise FleetError("bad_url", str(error)) from None
            self.check(source, worker)
            yield worker

    def check(self, source: Source, worker: Worker) -> None:
        """May `source` name this worker? Raises FleetError where another has it in another role."""
        known = self.by_id.get(worker.id)
        if known is not None and known.role != worker.role and known.sources - {source}:
            named = ", ".join(sorted(known.sources - {source}))
            raise FleetError(
                "other_role",
                f"worker {worker.id} cannot be '{worker.role}': {named} has it as '{known.role}'",
            )

    def _get(self, worker_id: str) -> Worker:
        worker = self.by_id.get(worker_id)
        if worker is None:
            known = ", ".join(self.by_id) or "none"
            raise FleetError("unknown_worker", f"there is no worker {worker_id[:200]!r}; there are: {known}")
        return worker

    def _remove(self, worker: Worker) -> None:
        del self.by_id[worker.id]
        self._left = [w for w in (*self._left, worker) if w.in_flight]

    def _members_changed(self) -> None:
        self.workers = tuple(self.by_id.values())
        self._facts_changed()

    def _facts_changed(self) -> None:
        joined = (w.info for w in self.workers if w.info and not w.refused)
        self.tasks = {info.model: frozenset(info.tasks) for info in joined}
        self._snapshots.clear()

    # --- questions

    @property
    def mode(self) -> Mode:
        """`disagg` if there are decode workers, healthy or not."""
        return "disagg" if any(worker.role == "decode" for worker in self.workers) else "agg"

    @property
    def models(self) -> tuple[str, ...]:
        """The names of the models, see `tasks`."""
        return tuple(self.tasks)

    @property
    def at_work(self) -> list[Worker]:
        """Those of the table, and those that have left and finish what they have; one that has come again is
        in it twice.
        """
        return [*self.workers, *(worker for worker in self._left if worker.in_flight)]

    def snapshot(self, model: str, now_s: float) -> Snapshot:
        """Eligible workers for `model` (a name out of `models`)."""
        found = self._snapshots.get(model)
        if found is None or now_s >= found.valid_until_s:
            found = self._snapshots[model] = self._take_snapshot(model, now_s)
        return found

    def context_length(self, model: str) -> int:
        """Longest context in tokens that every worker of `model` takes; 0 if no worker says."""
        lengths = [w.info.context_length for w in self._of(model) if w.info and w.info.context_length > 0]
        return min(lengths, default=0)

    def _of(self, model: str, roles: Sequence[Role] = ROLES) -> list[Worker]:
        return [
            w for w in self.workers if w.role in roles and w.info and w.info.model == model and not w.refused
        ]

    def _take_snapshot(self, model: str, now_s: float) -> Snapshot:
        there = {role: [w for w in self._of(model, (role,)) if w.ready] for role in ROLES}
        ready = {role: [w for w in ws if not w.draining] for role, ws in there.items()}
        closed = {role: tuple(w for w in ws if now_s >= w.retry_at_s) for role, ws in ready.items()}
        openings = [w.retry_at_s for ws in ready.values() for w in ws if w.retry_at_s > now_s]
        return Snapshot(
            models=self.models,
            prefill=closed["prefill"],
            decode=closed["decode"] or closed["agg"] or tuple(ready["decode"]) or tuple(ready["agg"]),
            draining=tuple(w for role in ("decode", "agg") for w in there[role] if w.draining),
            members=frozenset(w.id for w in self.workers if not w.draining),
            valid_until_s=min(openings, default=math.inf),
        )

    # --- events

    def on_selected(self, worker: Worker, now_s: float) -> int:
        """The request that is planned counts from now on. Returns the number of the trial that it is of a
        circuit that is not closed; 0: none.
        """
        worker.in_flight += 1
        if not worker.retry_at_s:
            return 0
        worker.retry_at_s = now_s + self._circuit_open_s
        worker.trial += 1
        self._snapshots.clear()
        return worker.trial

    def on_released(self, worker: Worker) -> None:
        """The request counted by `on_selected` is over."""
        worker.in_flight -= 1

    def on_queued(self, worker: Worker, tokens: int) -> None:
        """So many prompt tokens were sent to be computed there; negative: they are, or will not be."""
        left = worker.queued_tokens + tokens
        worker.queued_tokens = left if left > 0 else 0

    def on_load(self, worker: Worker, load: WorkerLoad | None, *, pool_up: bool = False) -> None:
        """The worker said how busy it is, or that it does not know: then our own requests are what counts."""
        worker.pool_up = pool_up
        if load is None:
            worker.elsewhere, worker.free_kv_tokens = 0, None
            return
        worker.elsewhere = max(0, load.running_requests + load.waiting_requests - worker.in_flight)
        worker.queued_tokens = load.queued_tokens
        worker.free_kv_tokens = load.free_kv_tokens

    def on_trial_answering(self, worker: Worker, trial: int, now_s: float) -> None:
        """The stream of a trial has begun as it should. Says nothing any more if a request has failed since,
        or the circuit was closed: a worker that breaks off its streams begins one after the other.
        """
        if trial == worker.trial and worker.retry_at_s:
            worker.retry_at_s = now_s
            self._snapshots.clear()

    def on_success(self, worker: Worker) -> None:
        """The worker answered as it should, to the end."""
        if worker.circuit_failures or worker.retry_at_s:
            worker.circuit_failures = 0
            worker.retry_at_s = 0.0
            self._snapshots.clear()

    def on_failure(self, worker: Worker, now_s: float) -> bool:
        """The worker failed a request through no fault of the client. True if this opened its circuit."""
        worker.circuit_failures += 1
        if worker.circuit_failures < self._circuit_failures:
            return False
        worker.trial += 1
        was_closed = worker.retry_at_s == 0.0
        worker.retry_at_s = now_s + self._circuit_open_s
        self._snapshots.clear()
        return was_closed

    def on_probe_ready(self, worker: Worker) -> bool:
        """A probe said ready. True if the worker was not before."""
        worker.probe_failures = 0
        if self._set_stopping(worker, False):  # another one than before
            self._set_ready(worker, False)
        return self._set_ready(worker, True)

    def on_probe_stopping(self, worker: Worker) -> bool:
        """The worker itself said that it stops: no new request, but what it has it finishes. True if that is
        news.
        """
        worker.probe_failures = 0
        return self._set_stopping(worker, True)

    def on_probe_not_ready(self, worker: Worker) -> bool:
        """The worker itself said not ready, or nothing listens there. True if it was ready before."""
        worker.probe_failures += 1
        self._set_stopping(worker, False)
        return self._set_ready(worker, False)

    def on_probe_unanswered(self, worker: Worker, failures_to_down: int) -> bool:
        """A probe timed out or broke: a busy worker may do that once. True if this made it unhealthy."""
        worker.probe_failures += 1
        return worker.probe_failures >= failures_to_down and self._set_ready(worker, False)

    def on_info(self, worker: Worker, info: WorkerInfo) -> str | None:
        """The worker described itself. Returns why it is refused, or None if it may join."""
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
        if ready:  # what failed before it went away says nothing about it now
            worker.circuit_failures, worker.retry_at_s = 0, 0.0
            worker.incarnation = f"{worker.id}#{self._next_incarnation}"
            self._next_incarnation += 1
        self._snapshots.clear()
        return True


def listed_workers(config: RouterConfig) -> dict[str, Role]:
    """The workers that the configuration lists: base URL → role."""
    lists: tuple[tuple[Role, tuple[str, ...]], ...] = (
        ("prefill", config.prefill),
        ("decode", config.decode),
        ("agg", config.agg),
    )
    return {url: role for role, urls in lists for url in urls}
