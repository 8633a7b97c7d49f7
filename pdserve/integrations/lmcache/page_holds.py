"""Pages that are held between a look-up and a read: pinned at their owners, so that they are not evicted
meanwhile.

A pin belongs to a connection. So there is one connection to each node that does nothing else, and its end is
the end of its pins. It has no data path: the node sends nothing for its pins, wherever it is.

The node ends a pin after its `lease_s` too, and bounds the bytes that a connection may pin. Nodes of older
versions refuse pins without a data path. Therefore a hold is a help and no promise: a page may still be
missing when it is read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from pdserve.errors import PoolError
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.kvpool.client.connection_pool import OpenConnection
from pdserve.kvpool.client.connector import connector_for
from pdserve.kvpool.client.deadline import Deadline
from pdserve.kvpool.client.operations import expect
from pdserve.kvpool.client.topology import PoolLinks, SharedViews
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.page_tag import TAG_BYTES
from pdserve.kvpool.transports.base import Connector
from pdserve.security.tokens import reveal

logger = logging.getLogger(__name__)

MAX_HELD: Final = 65_536  # pages; what comes beyond is not held


class _Hold(NamedTuple):
    node: str
    slot: int
    sequence: int
    until_s: float


class PageHolds:
    """Of one namespace. Thread-safe. No operation raises for faults of the pool."""

    def __init__(
        self,
        config: PoolClientConfig,
        namespace: str,
        geometry: dict[str, str],
        page_bytes: int,
        *,
        connector: Connector | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connects lazily. `page_bytes`: of a page, without its tag. Raises ConfigError as `PoolClient`."""
        self._config = replace(config, connections_per_node=1, data_path="none")
        self._page_bytes = page_bytes + (TAG_BYTES if reveal(config.page_key) else 0)
        connector = connector or connector_for(self._config, "holds")
        self._links = PoolLinks(self._config, namespace, geometry, connector, SharedViews(self._config))
        self._clock = clock
        self._lock = threading.Lock()
        self._held: OrderedDict[bytes, deque[_Hold]] = OrderedDict()

    def __len__(self) -> int:
        """Pages that are held, as far as known here."""
        with self._lock:
            return len(self._held)

    def hold(self, keys: Sequence[bytes]) -> None:
        """Pin the pages that are there. One that is below a node's memory is loaded for it."""
        self._forget_ended()
        deadline = Deadline(time.monotonic() + self._config.get_timeout_s)
        for node, places in self._links.rings.split(keys).items():
            most = m.pages_a_message(self._page_bytes)
            for start in range(0, len(places), most):
                chosen = [keys[place] for place in places[start : start + most]]
                if len(self) + len(chosen) > MAX_HELD or not self._hold_at(node, chosen, deadline):
                    break

    def let_go(self, keys: Sequence[bytes]) -> None:
        """End one hold of each key. Those that were never held, or have ended, are passed over."""
        by_node: dict[str, list[_Hold]] = defaultdict(list)
        with self._lock:
            for key in keys:
                holds = self._held.get(key)
                if holds:
                    hold = holds.popleft()
                    by_node[hold.node].append(hold)
                if not holds:
                    self._held.pop(key, None)
        deadline = Deadline(time.monotonic() + self._config.exists_timeout_s)
        for node, ended in by_node.items():
            release = m.Release([hold.slot for hold in ended], [hold.sequence for hold in ended])
            self._at(node, deadline, lambda opened, release=release: opened.connection.post(release))  # type: ignore[misc]

    def close(self) -> None:
        """End all holds. Idempotent."""
        self._links.close()
        with self._lock:
            self._held.clear()

    def _hold_at(self, node: str, keys: list[bytes], deadline: Deadline) -> bool:
        """False: nothing can be held there now."""

        def pin(opened: OpenConnection) -> None:
            request = m.Get(opened.next_id(), opened.namespace, keys, [self._page_bytes])
            pins = expect(opened, request, m.Got, deadline.at_s).pins
            until_s = self._clock() + opened.connection.welcome.lease_s
            with self._lock:
                for key, one in zip(keys, pins, strict=False):
                    if one.status == m.HIT:
                        hold = _Hold(node, one.slot, one.sequence, until_s)
                        self._held.setdefault(key, deque()).append(hold)
                        self._held.move_to_end(key)

        return self._at(node, deadline, pin)

    def _at(self, node: str, deadline: Deadline, work: Callable[[OpenConnection], None]) -> bool:
        try:
            self._links.link(node).use(deadline, work)
        except PoolError as error:
            logger.debug("pool node %s: no holds: %s", node, error)
            return False
        return True

    def _forget_ended(self) -> None:
        """Leases that have ended at the node. The least lately held key is first."""
        now_s = self._clock()
        with self._lock:
            while self._held:
                key, holds = next(iter(self._held.items()))
                if holds[-1].until_s > now_s:
                    return
                del self._held[key]
