"""The interface of transports on the client's side: a control channel to one node, and moving page bytes.

Three implementations: `shm` (control over a socket, pages by
copying from and to the node's mapped arena), `ucx` (control over a socket, pages as UCX tagged messages) and
`tcp` (pages over a second socket, plain or TLS).
All pass tests/contracts/test_transport_contract.py.

A `Connection` belongs to one thread at a time; `client.py` keeps a bounded set of them per node. Deadlines
are absolute times of `time.monotonic()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from pdserve.kvpool.protocol.messages import (
    Abort,
    Grant,
    Pin,
    Release,
    Reply,
    Request,
    Welcome,
)
from pdserve.kvpool.protocol.page_bytes import PageBuffers


class Connection(Protocol):
    """One client's connection to one node."""

    welcome: Welcome
    is_mapped: bool  # pages are copied from and to memory of this host that is mapped here

    def call(self, request: Request, deadline_s: float) -> Reply:
        """Send the request and return its reply. A Fault is returned, not raised.

        Raises PoolTimeout at the deadline and PoolUnavailable when the node is gone. After either error the
        connection is broken and must be closed.
        """
        ...

    def call_all(self, requests: Sequence[Request], deadline_s: float) -> list[Reply]:
        """Send the requests together and return their replies, in order. Errors as of `call`."""
        ...

    def post(self, message: Abort | Release) -> None:
        """Send a message that has no reply. Raises PoolUnavailable."""
        ...

    def write_pages(
        self, grants: Sequence[Grant], pages: Sequence[PageBuffers], deadline_s: float
    ) -> list[int]:
        """Move each page into its granted slot. Returns the checksums, or zeros if checksums are off.

        Raises PoolTimeout or PoolUnavailable. Then none of these reservations may be committed, and the
        connection must be closed; the node reclaims the reservations.
        """
        ...

    def read_pages(
        self, pins: Sequence[Pin], pages: Sequence[PageBuffers], deadline_s: float
    ) -> list[PageOutcome]:
        """Copy each pinned page into its buffers and check it.

        After the return or an error nothing writes into the buffers any more. Raises PoolTimeout or
        PoolUnavailable; the buffers' contents are undefined then.
        """
        ...

    def close(self) -> None:
        """Close; idempotent; never raises."""
        ...


PageOutcome: TypeAlias = int
OK: PageOutcome = 0
LOST: PageOutcome = 1  # the slot was refilled during the copy, after our lease had ended: a miss
CORRUPT: PageOutcome = 2  # the bytes do not match the checksum: a counted miss, reported to the node


class Connector(Protocol):
    """Opens connections to nodes over one kind of transport."""

    def connect(self, address: str, deadline_s: float) -> Connection:
        """Connect and shake hands. Raises PoolUnavailable, PoolTimeout or PoolRefused."""
        ...
