"""The members of the fleet: what sources name, and what administrators have ordered. Pure.

A worker is a member if a source names it (the configuration, or a discovery: DNS or etcd) and no order keeps
it out, or if an administrator has let it join. The orders are whole state, and the same in all of a router's
processes (`router/sharing`): each computes the members from what it has been named and from them. A worker
that leaves is removed from the table at once, and finishes its requests.

An order holds until another replaces it. It ends with the worker that it is about: when discovery names that
no longer. A removal also ends when a configuration that lists the worker is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec

from pdserve.errors import PdserveError
from pdserve.router.fleet.worker import DISCOVERED, ROLES, Role, Source, Worker


class FleetError(PdserveError):
    """A worker cannot join or be drained as asked; `code` is `bad_url`, `unknown_worker` or `other_role`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Order(msgspec.Struct, frozen=True, omit_defaults=True):
    """What administrators want of one worker."""

    url: str = ""
    """It joins, by this base URL and in this role."""
    role: Role = "decode"
    is_removed: bool = False
    """It stays out, whichever source names it."""
    is_drained: bool = False
    """It gets no new requests."""


class Synced(NamedTuple):
    """What a source's list has changed."""

    joined: list[Worker]
    left: list[Worker]
    problems: list[str]
    """Why workers of the list are left out: an invalid base URL, or another role than another source says."""


Orders = Mapping[str, Order]
"""By worker id. A worker of which nothing is wanted has none."""
NONE = Order()


def after_reload(orders: Orders, before: Collection[str], now: Collection[str]) -> dict[str, Order]:
    """The orders that remain after the configuration was read again. `before`, `now`: ids of the workers that
    it listed and lists. A listed worker is a member even if it was removed, and of one that is no longer
    listed nothing is wanted but that it joined.
    """
    kept = {id_: order for id_, order in orders.items() if not (order.is_removed and id_ in now)}
    return {id_: order for id_, order in kept.items() if order.url or id_ in now or id_ not in before}


class Membership:
    """The table of workers. `on_changed` is called after each change of it."""

    def __init__(self, workers: Iterable[Worker], on_changed: Callable[[], None]) -> None:
        self._on_changed = on_changed
        self.by_id = {worker.id: worker for worker in workers}
        self.workers = tuple(self.by_id.values())
        self._named: dict[Source, dict[str, Worker]] = {"config": dict(self.by_id)}
        """By source and id: who is to be in the table. Of a worker that two name that of the first."""
        self.orders: dict[str, Order] = {}
        self._left: list[Worker] = []
        """Workers out of the table that still finish requests."""
        self.told: Callable[[str, Order], None] | None = None
        """Is told of each new order that this process has had from an administrator, or that has ended here,
        to tell the router's other processes."""

    @property
    def at_work(self) -> list[Worker]:
        """All workers of the table, and workers that have left and still finish requests.

        A worker that left and joined again is listed twice.
        """
        return [*self.workers, *(worker for worker in self._left if worker.in_flight)]

    def join(self, url: str, role: Role) -> Worker:
        """Add a worker. It gets requests as soon as a probe finds it ready and compatible.

        Adding a member again has no effect. Raises FleetError `bad_url` for an invalid base URL, and
        `other_role` for a member in another role.
        """
        id_ = _made(url, role).id
        known = self.by_id.get(id_)
        if known is not None and known.role != role:
            raise FleetError("other_role", f"worker {id_} is there as '{known.role}'; let it leave first")
        drained = known is not None and known.drained
        self._order(id_, Order(url if known is None else known.url, role, is_drained=drained))
        return self.by_id[id_]

    def leave(self, worker_id: str) -> Worker:
        """Remove a worker, whichever source named it. Its running requests may finish.

        The worker stays out until discovery has stopped naming it, or until a configuration that lists it is
        read again. Raises FleetError `unknown_worker`.
        """
        worker = self._get(worker_id)
        self._order(worker_id, Order(is_removed=self._is_named(worker_id)))
        return worker

    def drain(self, worker_id: str, draining: bool) -> Worker:
        """Stop or resume new requests to a worker. Raises FleetError `unknown_worker`."""
        worker = self._get(worker_id)
        order = self.orders.get(worker_id, NONE)
        self._order(worker_id, msgspec.structs.replace(order, is_drained=draining))
        return worker

    def take(self, orders: Orders) -> None:
        """All orders, as this process and others have had them."""
        self.orders = dict(orders)
        self._apply()

    def sync(self, source: Source, urls: Mapping[str, str]) -> Synced:
        """Make `urls` (base URL → role) the complete list of `source`. A worker whose role or scheme changes
        leaves and joins again. What cannot be used is left out: it must not keep out others.
        """
        wanted: dict[str, Worker] = {}
        problems = []
        for url, role in urls.items():
            try:
                worker = _made(url, role)
                self._check(source, worker)
                wanted[worker.id] = worker
            except FleetError as error:
                problems.append(str(error))
        before = self._named.get(source, {})
        self._named[source] = wanted
        gone = [id_ for id_ in before if not self._is_named(id_)] if source in DISCOVERED else []
        ended = [id_ for id_ in gone if id_ in self.orders and not self.orders[id_].url]
        for id_ in ended:
            del self.orders[id_]
        joined, left = self._apply()
        for id_ in ended:
            self._tell(id_)
        return Synced(joined, left, problems)

    def _check(self, source: Source, worker: Worker) -> None:
        """Raises FleetError `other_role` if another source, or an administrator, has the worker in another
        role.
        """
        known = self.by_id.get(worker.id)
        if known is not None and known.role != worker.role and known.sources - {source}:
            named = ", ".join(sorted(known.sources - {source}))
            raise FleetError(
                "other_role",
                f"worker {worker.id} cannot be '{worker.role}': {named} has it as '{known.role}'",
            )

    def _order(self, id_: str, order: Order) -> None:
        self.orders.pop(id_, None)
        if order != NONE:
            self.orders[id_] = order
        self._apply()
        self._tell(id_)

    def _tell(self, id_: str) -> None:
        if self.told is not None:
            self.told(id_, self.orders.get(id_, NONE))

    def _apply(self) -> tuple[list[Worker], list[Worker]]:
        """Make the table what sources and orders say. Returns (joined, left)."""
        wanted = self._wanted()
        joined: list[Worker] = []
        left: list[Worker] = []
        for id_, worker in list(self.by_id.items()):
            new = wanted.get(id_)
            if new is None or (new.role, new.is_tls) != (worker.role, worker.is_tls):
                del self.by_id[id_]
                left.append(worker)
                for named in self._named.values():  # should it come back, it is another one
                    if named.get(id_) is worker:
                        named[id_] = Worker(worker.role, worker.url)
        for id_, worker in wanted.items():
            if id_ not in self.by_id:
                self.by_id[id_] = worker
                joined.append(worker)
        has_drained = False
        for id_, worker in self.by_id.items():
            order = self.orders.get(id_, NONE)
            worker.sources = {source for source, named in self._named.items() if id_ in named}
            worker.sources |= {"admin"} if order.url else set()
            has_drained |= worker.drained != order.is_drained
            worker.drained = order.is_drained
        self._left = [worker for worker in (*self._left, *left) if worker.in_flight]
        if joined or left:
            self.workers = tuple(self.by_id.values())
        if joined or left or has_drained:
            self._on_changed()
        return joined, left

    def _wanted(self) -> dict[str, Worker]:
        """Who is to be a member: the one that is there, or a new one."""
        wanted: dict[str, Worker] = {}
        for named in self._named.values():
            for id_, worker in named.items():
                wanted.setdefault(id_, worker)
        for id_, order in self.orders.items():
            known = self.by_id.get(id_)
            if order.url and known is not None and (known.role, known.url) == (order.role, order.url):
                wanted[id_] = known
            elif order.url:
                wanted[id_] = Worker(order.role, order.url)
            elif order.is_removed:
                wanted.pop(id_, None)
        return wanted

    def _is_named(self, id_: str) -> bool:
        return any(id_ in named for named in self._named.values())

    def _get(self, worker_id: str) -> Worker:
        worker = self.by_id.get(worker_id)
        if worker is None:
            known = ", ".join(self.by_id) or "none"
            raise FleetError("unknown_worker", f"there is no worker {worker_id[:200]!r}; there are: {known}")
        return worker


def _made(url: str, role: str) -> Worker:
    found = next((one for one in ROLES if one == role), None)
    if found is None:
        raise FleetError("other_role", f"{url} is named as {role!r}, and no worker is that")
    try:
        return Worker(found, url)
    except ValueError as error:
        raise FleetError("bad_url", str(error)) from None
