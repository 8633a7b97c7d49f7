"""Connections of a node to another one: to ask it, and to fetch pages from it. Blocking; for threads.

It is the clients' own data path: mapped memory on one host, UCX or TCP otherwise. What is fetched is written
straight into this node's slots, checked there, and its checksum carried over unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from pdserve.errors import PoolRefused, StaleView
from pdserve.kvpool.node.config.node import PoolNodeConfig
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.base import KEY_BYTES
from pdserve.kvpool.protocol.cluster_messages import ListOwned, Owned, PullPages
from pdserve.kvpool.protocol.frames import expected
from pdserve.kvpool.protocol.page_bytes import Bytes1D
from pdserve.kvpool.transports.base import CORRUPT, OK, Connection
from pdserve.kvpool.transports.control import make_hello
from pdserve.kvpool.transports.data_path import connect_channel, open_data_path
from pdserve.kvpool.transports.shm import host_id
from pdserve.security.tls import Certificates

R = TypeVar("R", bound=m.Reply)


class PeerLink:
    """One data connection, opened when first used, and again after `close`; for one thread at a time. After
    any error but StaleView it must be closed, and before its `address` changes. All methods raise
    PoolUnavailable, PoolTimeout, PoolRefused.
    """

    def __init__(self, config: PoolNodeConfig, certificates: Certificates, peer: str) -> None:
        self.peer = peer
        self._certificates = certificates
        self.address = ""
        self._config = config
        self._connection: Connection | None = None
        self._numbers: dict[tuple[str, int], int] = {}  # of the namespaces that are open
        self._last_id = 0

    def survey(self, deadline_s: float) -> m.StatusReport:
        """How the peer is: its namespaces."""
        return self._ask(m.Status(self._id()), m.StatusReport, deadline_s)

    def list_owned(
        self,
        space: tuple[str, Mapping[str, str], int],
        epoch: int,
        cursor: int,
        limit: int,
        deadline_s: float,
    ) -> Owned:
        """Pages of the peer that are this node's under the ring of `epoch`. Raises StaleView."""
        number = self._open(space, deadline_s)
        request = ListOwned(self._id(), number, self._config.name, epoch, cursor, limit)
        owned = self._ask(request, Owned, deadline_s)
        good = len(owned.keys) == len(owned.lengths) and min(owned.lengths, default=1) > 0
        if not good or not all(len(key) == KEY_BYTES for key in owned.keys):
            raise PoolRefused(f"pool node {self.peer}: its list of pages is none")
        return owned

    def fetch(
        self,
        space: tuple[str, Mapping[str, str], int],
        keys: Sequence[bytes],
        slots: Sequence[Bytes1D],
        deadline_s: float,
    ) -> tuple[list[int | None], list[float]]:
        """Copy pages, all of one length, into `slots`; the checksum of each, None where it could not be had,
        and for how long each has been in the pool, where that matters.

        When this returns or raises, nothing writes into the slots any more.
        """
        number = self._open(space, deadline_s)
        got = self._ask(m.Get(self._id(), number, list(keys), [slots[0].nbytes]), m.Got, deadline_s)
        if len(got.pins) != len(keys):
            raise PoolRefused(f"pool node {self.peer} answered {len(got.pins)} of {len(keys)} keys")
        hits = [i for i, pin in enumerate(got.pins) if pin.status == m.HIT]
        pins = [got.pins[i] for i in hits]
        connection = self._connection
        assert connection is not None
        outcomes = connection.read_pages(pins, [[slots[i]] for i in hits], deadline_s)
        connection.post(m.Release([pin.slot for pin in pins], [pin.sequence for pin in pins]))
        checksums: list[int | None] = [None] * len(keys)
        corrupt = []
        for i, pin, outcome in zip(hits, pins, outcomes, strict=True):
            if outcome == OK:
                checksums[i] = pin.checksum
            elif outcome == CORRUPT:
                corrupt.append((keys[i], pin.sequence))
        if corrupt:
            bad = m.Discard(self._id(), number, [key for key, _ in corrupt], [s for _, s in corrupt])
            self._ask(bad, m.Done, deadline_s)
        return checksums, got.ages_s if len(got.ages_s) == len(keys) else []

    def ask_replicas(
        self,
        space: tuple[str, Mapping[str, str], int],
        keys: Sequence[bytes],
        lengths: Sequence[int],
        deadline_s: float,
    ) -> list[bool]:
        """Have the peer make, or renew, replicas of this node's pages; which it has now."""
        number = self._open(space, deadline_s)
        request = PullPages(self._id(), number, list(keys), list(lengths))
        if self._ask(request, m.Done, deadline_s).count == len(keys):
            return [True] * len(keys)
        mask = self._ask(m.Exists(self._id(), number, list(keys)), m.Present, deadline_s).mask
        return [byte == 1 for byte in mask]

    def close(self) -> None:
        """Idempotent. Not while a thread uses it."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._numbers.clear()  # the peer's next incarnation may give them to others

    def _open(self, space: tuple[str, Mapping[str, str], int], deadline_s: float) -> int:
        """The peer's number of a namespace."""
        name, geometry, generation = space
        number = self._numbers.get((name, generation))
        if number is None:
            request = m.OpenNamespace(self._id(), name, dict(geometry), generation)
            number = self._numbers[name, generation] = self._ask(request, m.Opened, deadline_s).namespace
        return number

    def _ask(self, request: m.Request, kind: type[R], deadline_s: float) -> R:
        if self._connection is None:
            self._connection = self._connect(deadline_s)
        reply = self._connection.call(request, deadline_s)
        if isinstance(reply, m.Fault) and reply.code == "stale_view":
            raise StaleView(f"pool node {self.peer}: {reply.message}")
        return expected(reply, kind, self.peer)

    def _connect(self, deadline_s: float) -> Connection:
        config = self._config
        hello = make_hello(f"node {config.name}", host_id(), "auto", config.cluster.token)
        hello = msgspec.structs.replace(hello, node=config.name)
        tls = self._certificates.client_context
        channel = connect_channel(self.address, hello, deadline_s, tls=tls)
        if channel.welcome.node != self.peer:
            channel.close()
            raise PoolRefused(f"at {self.address} is pool node {channel.welcome.node}, not {self.peer}")
        return open_data_path(channel, ucx=config.ucx.settings, checksum=True, deadline_s=deadline_s, tls=tls)

    def _id(self) -> int:
        self._last_id += 1
        return self._last_id
