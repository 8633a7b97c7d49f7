"""Which workers there are, on whose word. Pure.

Workers join and leave at run time, each named by one or more sources: the configuration, the admin API, etcd.
A worker that leaves is out of the table at once and finishes its requests: a `Worker` lives as long as these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from pdserve.errors import PdserveError
from pdserve.router.fleet.worker import Role, Source, Worker

Act = Literal["join", "leave", "unjoin", "drain", "undrain", "gone"]
"""`gone`: etcd no longer names the worker, so what the admin API said of it is over."""


class FleetError(PdserveError):
    """A worker cannot join or be drained as asked; `code` is `bad_url`, `unknown_worker` or `other_role`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Membership:
    """The table of workers. `on_changed` is called after each change."""

    def __init__(self, workers: Iterable[Worker], on_changed: Callable[[], None]) -> None:
        self._on_changed = on_changed
        self.by_id = {worker.id: worker for worker in workers}
        self.workers = tuple(self.by_id.values())
        self._kept: dict[str, Act] = {}
        """By worker id, what the admin API said and etcd must not undo: a worker that etcd names stays away
        (`leave`), or is drained once etcd names it (`drain`). Over when etcd does not name it.
        """
        self._left: list[Worker] = []
        """Out of the table, with requests to finish."""
        self.told: Callable[[Act, str, Role], None] | None = None
        """Is told what the admin API does here, and which workers etcd no longer names, to tell the router's
        other processes.
        """

    @property
    def at_work(self) -> list[Worker]:
        """Those of the table, and those that have left and finish what they have; one that has come again is
        in it twice.
        """
        return [*self.workers, *(worker for worker in self._left if worker.in_flight)]

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
        self._on_changed()
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
        self._on_changed()
