"""What the admin API does to the fleet of one router process, and how the others come to the same.

Pure. The parent (processes.py) tells a change to every other process as it happens, those that are starting
too, and one that starts later begins with what all changes until then come to.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator

import msgspec

from pdserve.router.fleet.membership import Act, FleetError
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import Role, Worker

logger = logging.getLogger(__name__)


class FleetChange(msgspec.Struct, tag="fleet", frozen=True):
    """A worker joined, left or is drained by somebody's word to one process: the others shall do the same.
    "unjoin": one left that only such a word had joined, so nothing keeps it away should etcd name it. "gone":
    one is gone from etcd, which the others see for themselves.
    """

    act: Act
    worker: str
    """Base URL to join, id otherwise."""
    role: Role = "decode"

    def apply(self, fleet: Fleet) -> None:
        """Raises FleetError where the fleet is so already, or cannot be."""
        if self.act == "join":
            fleet.members.join(self.worker, self.role)
        elif self.act == "leave":
            fleet.members.leave(self.worker)
        elif self.act == "unjoin":
            fleet.members.unjoin(self.worker)
        elif self.act in ("drain", "undrain"):
            fleet.members.drain(self.worker, self.act == "drain")

    def follow(self, fleet: Fleet) -> None:
        """As `apply`, where another process was told: it tells nobody, and what it cannot do yet the fleet
        remembers.
        """
        told, fleet.members.told = fleet.members.told, None
        try:
            self.apply(fleet)
        except FleetError as error:  # it is as the others want it already, or etcd has yet to name it
            logger.info("not done here: %s", error)
            fleet.members.expect(self.act, self.worker)
        finally:
            fleet.members.told = told


class Changes:
    """What a fleet that is made from the configuration lacks."""

    def __init__(self) -> None:
        self._members: dict[str, tuple[FleetChange, ...]] = {}
        """By worker: it left, it joined, or it left and joined again as another."""
        self._drains: dict[str, FleetChange] = {}

    def __iter__(self) -> Iterator[FleetChange]:
        for changes in self._members.values():
            yield from changes
        yield from self._drains.values()

    def note(self, change: FleetChange) -> None:
        """This happened."""
        if change.act == "join":
            id_ = Worker(change.role, change.worker).id
            left = [earlier for earlier in self._members.get(id_, ()) if earlier.act != "join"]
            self._members[id_] = (*left, change)
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
        """What is left of them when the configuration is read anew, which listed the workers `before`, and
        lists others `now`: those are there, whoever had them leave, and those that it lists no more are not.
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
