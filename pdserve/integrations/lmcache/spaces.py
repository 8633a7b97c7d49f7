"""The pool's clients of one LMCache server: one for each `Space`, made when an object of it is first met."""

from __future__ import annotations

import logging
import threading
from typing import Final, NamedTuple

from pdserve.errors import PoolRefused, PoolUnavailable
from pdserve.integrations.lmcache.names import Owner, Space, geometry, namespace
from pdserve.integrations.lmcache.page_holds import PageHolds
from pdserve.integrations.settings import IntegrationSettings, model_identity
from pdserve.kvpool.client.client import PoolClient

logger = logging.getLogger(__name__)

MAX_SPACES: Final = 64
"""A server has a few models, of a few groups each. Each space has threads and connections of its own."""


class Pages(NamedTuple):
    """One space in the pool."""

    client: PoolClient
    holds: PageHolds


class Spaces:
    """Thread-safe."""

    def __init__(self, settings: IntegrationSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._pages: dict[Space, Pages] = {}
        self._identities: dict[str, str] = {}
        self._closed = False

    def pages(self, space: Space) -> Pages:
        """The pages of a space. The first one of a model with files on this machine takes a fingerprint of
        them. Raises PoolUnavailable: there are too many, or we are closed; StartupError: the files cannot be
        read.
        """
        found = self._pages.get(space)
        if found is not None:
            return found
        with self._lock:
            if space not in self._pages:
                self._pages = {**self._pages, space: self._make(space)}
            return self._pages[space]

    def known(self, owner: Owner) -> list[Space]:
        """The spaces of an owner's objects that were met so far."""
        return [space for space in self._pages if space.owner == owner]

    @property
    def clients(self) -> list[PoolClient]:
        """Those of all spaces."""
        return [pages.client for pages in self._pages.values()]

    @property
    def nodes_up(self) -> int:
        """Nodes that the best connected client reaches."""
        return max((client.nodes_up for client in self.clients), default=0)

    def close(self) -> None:
        """Operations in progress end with misses. Idempotent."""
        with self._lock:
            self._closed = True
            found = list(self._pages.values())
        for pages in found:
            pages.client.close()
            pages.holds.close()

    def _make(self, space: Space) -> Pages:
        if self._closed:
            raise PoolUnavailable("the adapter is closed")
        if len(self._pages) >= MAX_SPACES:
            raise PoolUnavailable(
                f"objects of more than {MAX_SPACES} models, groups or layouts in one server"
            )
        pool, model = self._settings.pool, space.owner.model
        if model not in self._identities:
            self._identities[model] = model_identity(model)
        fields = geometry(space, self._identities[model], self._settings.revision)
        name = namespace(space, pool.namespace, fields)
        page_bytes = space.layout.size_bytes
        client = PoolClient(pool, name, fields, name="lmcache", page_bytes=page_bytes)
        logger.info("objects of %s (%s) are in namespace %s of the pool", model, space.layout.text, name)
        for node, error in client.check().items():
            if isinstance(error, PoolRefused):
                logger.error("pool node %s refuses us, its pages are missed: %s", node, error)
            elif error is not None:
                logger.warning("pool node %s cannot be reached, its pages are missed: %s", node, error)
        return Pages(client, PageHolds(pool, name, fields, page_bytes))
