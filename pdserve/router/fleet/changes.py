"""Changes of the fleet by the admin API, passed from one router process to the others. Pure.

Each process makes the changes of the others (`router/sharing`). One that starts later makes the sum of all
earlier ones (`Changes`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator

import msgspec

from pdserve.router.fleet.membership import Act, FleetError
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import Role, Worker

logger = logging.getLogger(__name__)


class FleetChange(msgspec.Struct, frozen=True):
    """One act on one worker, done in one process and to be repeated in the others. Acts: see `Act`.

    Other processes do nothing on "gone": they watch etcd themselves.
    """

    act: Act
    worker: str
    """The worker's base URL if `act` is "join", else its id."""
    role: Role = "decode"

    @property
    def id(self) -> str:
        """Of the worker."""
        return Worker(self.role, self.worker).id if self.act == "join" else self.worker

    def apply(self, fleet: Fleet) -> None:
        """Do the act. Raises FleetError if the fleet is in that state already or cannot be."""
        if self.act == "join":
            fleet.members.join(self.worker, self.role)
        elif self.act == "leave":
            fleet.members.leave(self.worker)
        elif self.act == "unjoin":
            fleet.members.unjoin(self.worker)
        elif self.act in ("drain", "undrain"):
            fleet.members.drain(self.worker, self.act == "drain")

    def follow(self, fleet: Fleet) -> None:
        """Do the act of another process, without reporting it again.

        If the worker is not known here yet, the fleet remembers the act for it.
        """
        told, fleet.members.told = fleet.members.told, None
        try:
            self.apply(fleet)
        except FleetError as error:  # the fleet is in that state already, or etcd does not name it yet
            logger.info("not done here: %s", error)
            fleet.members.expect(self.act, self.worker)
        finally:
            fleet.members.told = told


class Changes:
    """The changes that lead from the configured fleet to the present one, at most a few for each worker."""

    def __init__(self, changes: Iterable[FleetChange] = ()) -> None:
        """`changes`: those of another one, in its order."""
        self._members: dict[str, tuple[FleetChange, ...]] = {}
        """By worker id: it left, it joined, or it left and joined again (perhaps in another role)."""
        self._drains: dict[str, FleetChange] = {}
        for change in changes:
            if change.act in ("drain", "undrain"):
                self._drains[change.worker] = change
            else:
                self._members[change.id] = (*self._members.get(change.id, ()), change)

    def __iter__(self) -> Iterator[FleetChange]:
        for changes in self._members.values():
            yield from changes
        yield from self._drains.values()

    def note(self, change: FleetChange) -> None:
        """Add a change. It replaces earlier changes that it undoes."""
        if change.act == "join":
            left = [earlier for earlier in self._members.get(change.id, ()) if earlier.act != "join"]
            self._members[change.id] = (*left, change)
        elif change.act == "leave":
            self._members[change.worker] = (change,)
            self._drains.pop(change.worker, None)
        elif change.act == "unjoin":
            before = self._members.pop(change.worker, ())
            if any(earlier.act != "join" for earlier in before):  # the configuration may have it
                self._members[change.worker] = (change,)
            self._drains.pop(change.worker, None)
        elif change.act == "gone":
            self._forget_leave(change.worker)
            self._drains.pop(change.worker, None)
        else:
            self._drains[change.worker] = change

    def configured(self, before: Collection[str], now: Collection[str]) -> Changes:
        """The changes that remain after the configuration was read again.

        `before`, `now`: ids of the workers that it listed and lists. A listed worker is a member even if it
        had left, so its "leave" is dropped. The drain of a worker that is no longer listed is dropped.
        """
        changes = Changes()
        changes._members, changes._drains = dict(self._members), dict(self._drains)
        for id_ in now:
            changes._forget_leave(id_)
        for id_ in before:
            if id_ not in now and id_ not in changes._members:
                changes._drains.pop(id_, None)
        return changes

    def _forget_leave(self, id_: str) -> None:
        if joined := tuple(change for change in self._members.pop(id_, ()) if change.act == "join"):
            self._members[id_] = joined
