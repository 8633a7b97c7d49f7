"""The members of the fleet, and the sources that named them. Pure.

Workers join and leave at run time. Each is named by one or more sources: the configuration, the admin API,
a discovery (DNS or etcd). A worker that leaves is removed from the table at once, and finishes its
requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from pdserve.errors import PdserveError
from pdserve.router.fleet.worker import DISCOVERED, Role, Source, Worker

Act = Literal["join", "leave", "unjoin", "drain", "undrain", "gone"]
"""An act of the admin API, or `gone`: discovery no longer names the worker, so earlier acts on it have ended.

`unjoin` is the `leave` of a worker that only the admin API had named. It may join again if discovery names
it.
"""


class FleetError(PdserveError):
    """A worker cannot join or be drained as asked; `code` is `bad_url`, `unknown_worker` or `other_role`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Membership:
    """The table of workers. `on_changed` is called after each change of it."""

    def __init__(self, workers: Iterable[Worker], on_changed: Callable[[], None]) -> None:
        self._on_changed = on_changed
        self.by_id = {worker.id: worker for worker in workers}
        self.workers = tuple(self.by_id.values())
        self._kept: dict[str, Act] = {}
        """By worker id: an act of the admin API that discovery must not undo.

        After `leave` the worker stays out although it is named there. After `drain` it is drained as soon as
        it is named. An entry ends when discovery stops naming the worker.
        """
        self._discovery: Source = "etcd"
        """The discovered source of this router, once it has named workers."""
        self._left: list[Worker] = []
        """Workers out of the table that still finish requests."""
        self.told: Callable[[Act, str, Role], None] | None = None
        """Callback (act, base URL or id, role) that passes acts to the router's other processes."""

    @property
    def at_work(self) -> list[Worker]:
        """All workers of the table, and workers that have left and still finish requests.

        A worker that left and joined again is listed twice.
        """
        return [*self.workers, *(worker for worker in self._left if worker.in_flight)]

    def join(self, url: str, role: Role, source: Source = "admin") -> Worker:
        """Add a worker. It gets requests as soon as a probe finds it ready and compatible.

        Adding a member again has no effect. Raises FleetError `bad_url` for an invalid base URL, and
        `other_role` for a member in another role.
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
            joined.sources.add(
                self._discovery
            )  # it is named there too: the next `leave` must be kept as well
        if self.told is not None and source == "admin":
            self.told("join", url, role)
        return joined

    def leave(self, worker_id: str) -> Worker:
        """Remove a worker, whichever source named it. Its running requests may finish.

        The worker stays out until discovery has stopped naming it, or until the configuration that lists it
        is read again. Raises FleetError `unknown_worker`.
        """
        worker = self._get(worker_id)
        self._remove(worker)
        if worker.sources & DISCOVERED:
            self._kept[worker.id] = "leave"
        self._members_changed()
        if self.told is not None:
            act: Act = "unjoin" if worker.sources == {"admin"} else "leave"
            self.told(act, worker.id, worker.role)
        return worker

    def unjoin(self, worker_id: str) -> None:
        """Remove a worker unless discovery names it: it did not in the process where the worker left.

        Raises FleetError `unknown_worker`.
        """
        worker = self._get(worker_id)
        worker.sources &= DISCOVERED
        if not worker.sources:
            self.leave(worker_id)

    def drain(self, worker_id: str, draining: bool) -> Worker:
        """Stop or resume new requests to a worker. Raises FleetError `unknown_worker`."""
        worker = self._get(worker_id)
        worker.drained = draining
        self._on_changed()
        if self.told is not None:
            self.told("drain" if draining else "undrain", worker.id, worker.role)
        return worker

    def expect(self, act: Act, worker_id: str) -> None:
        """Keep an act of another process for a worker that discovery may name here later."""
        if worker_id in self.by_id:
            return
        if act in ("leave", "drain"):
            self._kept[worker_id] = act
        elif act == "undrain" and self._kept.get(worker_id) == "drain":
            del self._kept[worker_id]

    def sync(self, source: Source, urls: Mapping[str, Role]) -> tuple[list[Worker], list[Worker]]:
        """Make `urls` (base URL → role) the complete list of `source`. Returns (joined, left).

        A worker whose role or scheme changes leaves and joins again. Raises FleetError, without any change,
        for an invalid base URL and for a worker that another source names in another role.
        """
        wanted = {worker.id: worker for worker in self._made(source, urls)}
        if source in DISCOVERED:
            self._discovery = source
            wanted = self._as_kept(wanted)
        else:  # the configuration was read again: workers that it lists are members
            self._kept = {id_: act for id_, act in self._kept.items() if id_ not in wanted}
        left: list[Worker] = []
        joined: list[Worker] = []
        for worker in self.workers:
            new = wanted.get(worker.id)
            same = new is not None and (new.role, new.is_tls) == (worker.role, worker.is_tls)
            if source in worker.sources and not same:
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
        """The workers of `named` that may be members, after the acts in `_kept`. Ends acts that are over."""
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
        """Raises FleetError `other_role` if a source other than `source` names the worker in another role."""
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
        self._on_changed()
