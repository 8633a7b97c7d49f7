"""The worker table: who is there, who may be given work, and how loaded each is.

Pure: probes and request outcomes come in as method calls with `now_s`; `snapshot` says who is eligible. A
worker is eligible when its last probe said ready, it was not refused at join, and its circuit is not open.

The circuit, fed by the outcome of requests:

    closed --(circuit_failures in a row)--> open until `retry_at_s`
    open   --(retry_at_s passed)----------> half-open: eligible
    half-open --(selected)----------------> open until the outcome is known: one request tries, not all
    any    --(success)--------------------> closed

Decode workers whose circuits are all open are still used when their probes say ready: an attempt is worth
more to the client than a 503. Prefill workers are not, since the decode worker can do without them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from pdserve.router.config import RouterConfig, parse_base_url

Role = Literal["prefill", "decode", "agg"]


class WorkerInfo(msgspec.Struct, frozen=True):
    """A worker's answer to `GET /pd/info`; fields that it has beyond these are not looked at."""

    role: Role
    model: str
    context_length: int = 0
    page_size: int = 0
    namespace: str = ""
    kv_geometry: dict[str, Any] = {}
    model_path: str = ""
    pdserve_version: str = ""
    sglang_version: str = ""


class Worker:
    """One worker as the router sees it. `in_flight` is counted up at selection and down when the request
    ends.
    """

    __slots__ = (
        "circuit_failures",
        "host",
        "id",
        "id_header",
        "in_flight",
        "info",
        "port",
        "probe_failures",
        "ready",
        "refused",
        "retry_at_s",
        "role",
    )

    def __init__(self, role: Role, url: str) -> None:
        self.host, self.port = parse_base_url(url)
        self.role = role
        self.id = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        self.id_header = self.id.encode("ascii", "replace")
        self.in_flight = 0
        self.ready = False
        self.info: WorkerInfo | None = None
        self.refused: str | None = None
        self.probe_failures = 0
        self.circuit_failures = 0
        self.retry_at_s = 0.0
        """0: the circuit is closed. Otherwise it is open until this time, and half-open after it."""

    def __repr__(self) -> str:
        return f"Worker({self.role} {self.id})"

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://{self.id}"


class Snapshot(msgspec.Struct, frozen=True):
    """Who may be given a request for `model` now. Workers' `in_flight` in it is live."""

    models: tuple[str, ...]
    prefill: tuple[Worker, ...] = ()
    decode: tuple[Worker, ...] = ()
    """Decode workers, or aggregated ones where no decode worker is eligible."""
    valid_until_s: float = math.inf


class Fleet:
    """All workers that the configuration lists."""

    def __init__(
        self, workers: Iterable[Worker], *, circuit_failures: int = 3, circuit_open_s: float = 5.0
    ) -> None:
        self.workers = tuple(workers)
        self.by_id = {worker.id: worker for worker in self.workers}
        self._circuit_failures = circuit_failures
        self._circuit_open_s = circuit_open_s
        self._snapshots: dict[str, Snapshot] = {}
        self._models: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: RouterConfig) -> Fleet:
        """A fleet of the listed workers, none of them ready yet."""
        roles: tuple[tuple[Role, tuple[str, ...]], ...] = (
            ("prefill", config.prefill),
            ("decode", config.decode),
            ("agg", config.agg),
        )
        return cls(
            (Worker(role, url) for role, urls in roles for url in urls),
            circuit_failures=config.probe.circuit_failures,
            circuit_open_s=config.probe.circuit_open_s,
        )

    @property
    def models(self) -> tuple[str, ...]:
        """Models that workers have said they serve, those now unhealthy included; refused workers are not
        asked.
        """
        return self._models

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

    def _of(self, model: str, roles: Sequence[Role] = ("prefill", "decode", "agg")) -> list[Worker]:
        return [
            w for w in self.workers if w.role in roles and w.info and w.info.model == model and not w.refused
        ]

    def _take_snapshot(self, model: str, now_s: float) -> Snapshot:
        ready = {
            role: [w for w in self._of(model, (role,)) if w.ready] for role in ("prefill", "decode", "agg")
        }
        closed = {role: tuple(w for w in ws if now_s >= w.retry_at_s) for role, ws in ready.items()}
        openings = [w.retry_at_s for ws in ready.values() for w in ws if w.retry_at_s > now_s]
        return Snapshot(
            models=self._models,
            prefill=closed["prefill"],
            decode=closed["decode"] or closed["agg"] or tuple(ready["decode"]) or tuple(ready["agg"]),
            valid_until_s=min(openings, default=math.inf),
        )

    # --- events

    def on_selected(self, worker: Worker, now_s: float) -> None:
        """The request that is planned counts from now on; a half-open circuit has its one trial."""
        worker.in_flight += 1
        if worker.retry_at_s:
            worker.retry_at_s = now_s + self._circuit_open_s
            self._snapshots.clear()

    def on_released(self, worker: Worker) -> None:
        """The request counted by `on_selected` is over."""
        worker.in_flight -= 1

    def on_success(self, worker: Worker) -> None:
        """The worker answered as it should."""
        if worker.circuit_failures or worker.retry_at_s:
            worker.circuit_failures = 0
            worker.retry_at_s = 0.0
            self._snapshots.clear()

    def on_failure(self, worker: Worker, now_s: float) -> bool:
        """The worker failed a request through no fault of the client. True if this opened its circuit."""
        worker.circuit_failures += 1
        if worker.circuit_failures < self._circuit_failures:
            return False
        was_closed = worker.retry_at_s == 0.0
        worker.retry_at_s = now_s + self._circuit_open_s
        self._snapshots.clear()
        return was_closed

    def on_probe_ready(self, worker: Worker) -> bool:
        """A probe said ready. True if the worker was not before."""
        worker.probe_failures = 0
        return self._set_ready(worker, True)

    def on_probe_not_ready(self, worker: Worker) -> bool:
        """The worker itself said not ready, or nothing listens there. True if it was ready before."""
        worker.probe_failures += 1
        return self._set_ready(worker, False)

    def on_probe_unanswered(self, worker: Worker, failures_to_down: int) -> bool:
        """A probe timed out or broke: a busy worker may do that once. True if this made it unhealthy."""
        worker.probe_failures += 1
        return worker.probe_failures >= failures_to_down and self._set_ready(worker, False)

    def on_info(self, worker: Worker, info: WorkerInfo) -> str | None:
        """The worker described itself. Returns why it is refused, or None if it may join."""
        worker.info = info
        worker.refused = find_mismatch(worker, self.workers)
        models = (w.info.model for w in self.workers if w.info and not w.refused)
        self._models = tuple(dict.fromkeys(models))
        self._snapshots.clear()
        return worker.refused

    def _set_ready(self, worker: Worker, ready: bool) -> bool:
        if worker.ready == ready:
            return False
        worker.ready = ready
        if ready:  # what failed before it went away says nothing about it now
            worker.circuit_failures, worker.retry_at_s = 0, 0.0
        self._snapshots.clear()
        return True


def find_mismatch(worker: Worker, others: Iterable[Worker]) -> str | None:
    """Why `worker` cannot serve beside those of `others` that have joined: one line, or None if it can.

    Workers of one model exchange KV pages, and workers of one namespace must have pages that mean the same.
    """
    info = worker.info
    if info is None:
        return None
    if info.role not in (worker.role, "agg"):
        return f"worker {worker.id} is listed under '{worker.role}' but says its role is '{info.role}'"
    for other in others:
        if other is worker or other.info is None or other.refused:
            continue
        field = _differing_field(info, other.info)
        if field is not None:
            name, mine, theirs = field
            return (
                f"{worker.role} worker {worker.id} and {other.role} worker {other.id} differ in {name} "
                f"({mine!r} and {theirs!r}) and cannot share KV pages; start them with the same settings"
            )
    return None


def _differing_field(mine: WorkerInfo, theirs: WorkerInfo) -> tuple[str, Any, Any] | None:
    if mine.model != theirs.model and mine.namespace != theirs.namespace:
        return None
    for name in ("model", "page_size"):
        if getattr(mine, name) != getattr(theirs, name):
            return name, getattr(mine, name), getattr(theirs, name)
    for key in sorted(mine.kv_geometry.keys() | theirs.kv_geometry.keys()):
        if mine.kv_geometry.get(key) != theirs.kv_geometry.get(key):
            return f"kv_geometry.{key}", mine.kv_geometry.get(key), theirs.kv_geometry.get(key)
    if mine.namespace != theirs.namespace:
        return "namespace", mine.namespace, theirs.namespace
    return None
