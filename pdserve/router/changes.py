"""What the admin API does to the fleet of one router process, and how the others come to the same.

Pure. The parent (processes.py) tells a change to every other process as it happens, and to one that starts
later what all changes until then come to.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from pdserve.router.fleet import Act, Fleet
from pdserve.router.workers import Role, Worker


class FleetChange(msgspec.Struct, tag="fleet", frozen=True):
    """A worker joined, left or is drained by somebody's word to one process: the others shall do the same."""

    act: Act
    worker: str
    """Base URL to join, id otherwise."""
    role: Role = "decode"

    def apply(self, fleet: Fleet) -> None:
        """Raises FleetError where the fleet is so already, or cannot be."""
        if self.act == "join":
            fleet.join(self.worker, self.role)
        elif self.act == "leave":
            fleet.leave(self.worker)
        else:
            fleet.drain(self.worker, self.act == "drain")


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
            left = [earlier for earlier in self._members.get(id_, ()) if earlier.act == "leave"]
            self._members[id_] = (*left, change)
        elif change.act == "leave":
            self._members[change.worker] = (change,)
            self._drains.pop(change.worker, None)
        else:
            self._drains[change.worker] = change

    def configured(self) -> None:
        """The configuration is read anew: workers that it lists are there, whoever had them leave."""
        for id_, changes in list(self._members.items()):
            joined = tuple(change for change in changes if change.act == "join")
            if joined:
                self._members[id_] = joined
            else:
                del self._members[id_]
