"""Workers that DNS or etcd names. The fleet's members of this source are kept equal to them. The source only
names workers; their probes decide whether they are used.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from pdserve.router.fleet.membership import FleetError
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import ROLES, Role, Source, Worker

logger = logging.getLogger(__name__)


class FoundWorkers:
    """The workers of one source."""

    def __init__(self, source: Source, fleet: Fleet) -> None:
        self._source = source
        self._fleet = fleet
        self._said: set[str] = set()

    def follow(self, named: Iterable[tuple[str, str]]) -> None:
        """Make the fleet's members of this source those that it names now, by role and base URL."""
        joined, left = self._fleet.members.sync(self._source, self._usable(named))
        for worker in joined:
            logger.info("%s worker %s: %s knows of it", worker.role, worker.id, self._source)
        for worker in left:
            logger.info(
                "%s worker %s has left: %s no longer knows of it", worker.role, worker.id, self._source
            )

    def _usable(self, named: Iterable[tuple[str, str]]) -> dict[str, Role]:
        """Base URL → role, without workers that the fleet would refuse. A bad name must not block others."""
        usable: dict[str, Role] = {}
        for role, url in named:
            if role not in ROLES:
                self._say(f"{url} is named as {role!r}, and no worker is that")
                continue
            try:
                worker = Worker(role, url)
                self._fleet.members.check(self._source, worker)
                usable[url] = role
            except (ValueError, FleetError) as error:
                self._say(str(error))
        return usable

    def _say(self, problem: str) -> None:
        if problem not in self._said:
            self._said.add(problem)
            logger.warning("%s: %s", self._source, problem)
