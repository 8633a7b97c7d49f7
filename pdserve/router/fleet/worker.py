"""A worker as the router knows it, and whether it fits beside the others.

Pure. Workers of one model exchange KV pages; a worker whose pages would not mean the same as the others' is
refused when it joins, and used as soon as it, or they, have changed.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any, Literal

import msgspec

from pdserve.router.config.router import parse_base_url

Role = Literal["prefill", "decode", "agg"]
ROLES: tuple[Role, ...] = ("prefill", "decode", "agg")
Source = Literal["config", "admin", "etcd"]
"""Who said that a worker is there."""


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
    deterministic: bool = False
    """What it samples depends on the request's seed (SGLang: --enable-deterministic-inference)."""
    tasks: tuple[str, ...] = ("generate",)
    """What its model can do: generate, embed."""
    tokenizer: str = ""
    """A fingerprint; empty: it does not say."""
    chat_template: str = ""


class WorkerLoad(msgspec.Struct, frozen=True):
    """A worker's own word on how busy it is: `load` in its answer to `GET /pd/ready`."""

    running_requests: int = 0
    waiting_requests: int = 0
    queued_tokens: int = 0
    """Uncached prompt tokens of the waiting requests."""
    free_kv_tokens: int | None = None


class Worker:
    """One worker as the router sees it. `in_flight` is counted up at selection and down when the request
    ends.
    """

    __slots__ = (
        "circuit_failures",
        "drained",
        "elsewhere",
        "free_kv_tokens",
        "host",
        "id",
        "id_header",
        "in_flight",
        "incarnation",
        "info",
        "pool_up",
        "port",
        "probe_failures",
        "queued_tokens",
        "ready",
        "refused",
        "retry_at_s",
        "role",
        "sources",
        "stopping",
        "trial",
    )

    def __init__(self, role: Role, url: str) -> None:
        self.host, self.port = parse_base_url(url)
        self.role = role
        self.id = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        self.id_header = self.id.encode("ascii", "replace")
        self.incarnation = self.id
        """Another one whenever the worker comes back: what its memory held is lost then."""
        self.in_flight = 0
        self.elsewhere = 0
        """Requests that it has, by its own word, beyond this router's: those of other routers."""
        self.queued_tokens = 0
        """Prompt tokens that wait to be computed: its own word, and what was sent there since."""
        self.pool_up = False
        """It reaches the pool, so what it computes will be there."""
        self.free_kv_tokens: int | None = None
        """Room in its KV memory in tokens; None: it does not say."""
        self.sources: set[Source] = set()
        """It leaves when the last of them no longer names it."""
        self.ready = False
        self.drained = False
        """The admin API says that it is to be given nothing new."""
        self.stopping = False
        """It says so itself: it was asked to stop, and finishes what it has."""
        self.info: WorkerInfo | None = None
        self.refused: str | None = None
        self.probe_failures = 0
        self.circuit_failures = 0
        self.retry_at_s = 0.0
        """0: the circuit is closed. Otherwise it is open until this time, and half-open after it."""
        self.trial = 0
        """Number of the request that tries whether the worker is well; a failure raises it too."""

    def __repr__(self) -> str:
        return f"Worker({self.role} {self.id})"

    @property
    def draining(self) -> bool:
        """It finishes what it has and is given nothing new."""
        return self.drained or self.stopping

    @property
    def load(self) -> int:
        """Requests it has, from all routers as far as known."""
        return self.in_flight + self.elsewhere

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://{self.id}"


def find_mismatch(worker: Worker, others: Iterable[Worker]) -> str | None:
    """Why `worker` cannot serve beside those of `others` that have joined: one line, or None if it can.

    Workers of one model exchange KV pages, and workers of one namespace must have pages that mean the same.
    Those that make other tokens of a prompt would not find each other's pages, and answer other things.
    A worker that no longer answers does not keep others out: it is compared anew when it comes back.
    """
    info = worker.info
    if info is None:
        return None
    if info.role not in (worker.role, "agg"):
        return f"worker {worker.id} is listed under '{worker.role}' but says its role is '{info.role}'"
    for other in others:
        is_away = other.probe_failures and not other.ready
        if other is worker or other.info is None or other.refused or is_away:
            continue
        field = _differing_field(info, other.info)
        if field is not None:
            name, mine, theirs = field
            return (
                f"{worker.role} worker {worker.id} and {other.role} worker {other.id} differ in {name} "
                f"({mine!r} and {theirs!r}) and cannot share KV pages; give them the same settings and files"
            )
    return None


def joining_order(found: Sequence[tuple[Worker, WorkerInfo]], refused: Container[str]) -> list[Worker]:
    """In which order workers that were found together join: who is first decides who fits, and which of them
    answered first is chance. Those that others do not refuse (ids), before all, then those that fit most of
    the workers found, then in the order given.
    """
    fitting = {
        worker.id: sum(_differing_field(info, theirs) is None for _, theirs in found)
        for worker, info in found
    }
    workers = [worker for worker, _ in found]
    return sorted(workers, key=lambda worker: (worker.id in refused, -fitting[worker.id]))


def _differing_field(mine: WorkerInfo, theirs: WorkerInfo) -> tuple[str, Any, Any] | None:
    if mine.model != theirs.model and mine.namespace != theirs.namespace:
        return None
    for name in ("model", "tasks", "page_size"):
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
