"""Workers that a source outside names: DNS or etcd. The fleet's members of this source
are kept equal to them. The source only names workers; their probes decide whether they are used.
"""

from __future__ import annotations

import logging
from typing import Protocol

from pdserve.router.fleet.membership import FleetError
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import ROLES, Role, Source, Worker

logger = logging.getLogger(__name__)


class Discovery(Protocol):
    """Keeps the fleet equal to what a source names."""

    async def first(self) -> None:
        """Read all once. If the source does not answer, log a warning."""

    async def run(self) -> None:
        """Follow the source until cancelled. Can be called again after a failure."""

    async def close(self) -> None:
        """Close connections; after `run` was cancelled."""


class FoundWorkers:
    """The workers of one source, by the source's own names."""

    def __init__(self, source: Source, fleet: Fleet) -> None:
        self._source = source
        self._fleet = fleet
        self._urls: dict[str, tuple[str, Role]] = {}
        self._said: set[str] = set()

    def put(self, name: str, role: str, url: str) -> None:
        """The source names this worker. `sync` makes it a member."""
        if role in ROLES:
            self._urls[name] = (url, role)
        else:
            self._say(f"{name} is no worker")

    def drop(self, name: str) -> None:
        """The source names it no more."""
        self._urls.pop(name, None)

    def clear(self) -> None:
        """Whatever the source named: all of it is put again."""
        self._urls.clear()

    def sync(self) -> None:
        """Make the fleet's members of this source those that were put."""
        joined, left = self._fleet.members.sync(self._source, self._usable())
        for worker in joined:
            logger.info("%s worker %s: %s knows of it", worker.role, worker.id, self._source)
        for worker in left:
            logger.info(
                "%s worker %s has left: %s no longer knows of it", worker.role, worker.id, self._source
            )

    def _usable(self) -> dict[str, Role]:
        """Base URL → role, without workers that the fleet would refuse. A bad name must not block others."""
        usable: dict[str, Role] = {}
        for url, role in self._urls.values():
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
