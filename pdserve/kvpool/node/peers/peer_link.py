"""One data connection of a node to another, and the threads that use such connections.

Over mapped memory on one host, UCX or TCP otherwise. Every request is made by a thread of its own, on a
connection that one request uses at a time. It has a deadline, and ends in exactly one answer; when it has,
nothing reads or writes our memory for it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from pdserve.errors import PoolRefused, PoolTimeout, PoolUnavailable
from pdserve.kvpool.cluster.membership import Cluster
from pdserve.kvpool.core.events import GONE, LATER, TAKEN, PushPages
from pdserve.kvpool.namespaces.catalog import Namespaces
from pdserve.kvpool.node.config import PoolNodeConfig
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.frames import expected
from pdserve.kvpool.protocol.page_bytes import Bytes1D
from pdserve.kvpool.transports.base import CORRUPT, OK, Connection
from pdserve.kvpool.transports.control import make_hello
from pdserve.kvpool.transports.data_path import connect_channel, open_data_path
from pdserve.kvpool.transports.shm import host_id
from pdserve.security.tls import Certificates

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S: Final = 2.0
"""For threads that read or write our memory to end."""

Space: TypeAlias = tuple[str, Mapping[str, str], int]
"""A namespace's name, geometry, generation."""
T = TypeVar("T")
R = TypeVar("R", bound=m.Reply)


def space_of(namespaces: Namespaces, number: int) -> Space:
    """Raises PoolRefused: it was dropped."""
    if number not in namespaces:
        raise PoolRefused(f"there is no namespace number {number} any more")
    namespace = namespaces[number]
    return namespace.name, namespace.geometry, namespace.generation


def address_of(cluster: Cluster, peer: str) -> str | None:
    """Of a living member."""
    return next((member.address for member in cluster.alive() if member.node == peer), None)


class PeerLink:
    """One data connection to another node, opened when first used, and again after `close`; for one thread at
    a time. After any error it must be closed, and before its `address` changes. All methods raise
    PoolUnavailable, PoolTimeout, PoolRefused.
    """

    def __init__(self, config: PoolNodeConfig, certificates: Certificates, peer: str) -> None:
        self.peer = peer
        self.address = ""
        self._config = config
        self._certificates = certificates
        self._connection: Connection | None = None
        self._numbers: dict[tuple[str, int], int] = {}  # of the namespaces that are open
        self._last_id = 0

    @property
    def is_open(self) -> bool:
        return self._connection is not None

    def locate(self, cluster: Cluster) -> None:
        """Follow the peer to where it is now. Raises PoolUnavailable: it is not alive."""
        address = address_of(cluster, self.peer)
        if address is None:
            raise PoolUnavailable(f"pool node {self.peer} is not in the pool any more")
        if self.address != address:  # it came back elsewhere
            self.close()
            self.address = address

    def reserve(
        self, space: Space, keys: list[bytes], length_bytes: int, push: PushPages, deadline_s: float
    ) -> list[m.Grant]:
        """The peer's answer for each page."""
        number = self._open(space, deadline_s)
        request = m.Reserve(self._id(), number, keys, [length_bytes], push.replica, push.written)
        return self._each(keys, self._ask(request, m.Reserved, deadline_s).grants)

    def read(
        self, space: Space, keys: list[bytes], slots: Sequence[Bytes1D], deadline_s: float
    ) -> tuple[list[int], list[int], list[float]]:
        """Copy pages into these slots: what became of each (TAKEN, or GONE), checksums, and ages."""
        number = self._open(space, deadline_s)
        connection = self._connection
        assert connection is not None
        request = m.Get(self._id(), number, keys, [slots[0].nbytes], connection.is_mapped)
        got = self._ask(request, m.Got, deadline_s)
        asked_s, pins = time.monotonic(), self._each(keys, got.pins)
        hits = [i for i, pin in enumerate(pins) if pin.status == m.HIT]
        ends = [GONE] * len(keys)
        if hits:
            read = connection.read_pages([pins[i] for i in hits], [[slots[i]] for i in hits], deadline_s)
            for i, outcome in zip(hits, read, strict=True):
                ends[i] = TAKEN if outcome == OK else GONE
            if got.held:
                connection.post(m.Release([pins[i].slot for i in hits], [pins[i].sequence for i in hits]))
            bad = [i for i, outcome in zip(hits, read, strict=True) if outcome == CORRUPT]
            if bad:
                logger.warning("%d damaged pages of pool node %s are dropped", len(bad), self.peer)
                damaged, sequences = [keys[i] for i in bad], [pins[i].sequence for i in bad]
                self._ask(m.Discard(self._id(), number, damaged, sequences), m.Done, deadline_s)
        waited_s = time.monotonic() - asked_s
        ages_s = [age_s + waited_s for age_s in got.ages_s] or [0.0] * len(keys)
        return ends, [pin.checksum for pin in pins], self._each(keys, ages_s)

    def fill(
        self,
        pages: Sequence[tuple[m.Grant, m.Pin]],
        unused: Sequence[m.Grant],
        data: Sequence[Bytes1D],
        ages_s: Sequence[float],
        asked_s: float,
        deadline_s: float,
    ) -> list[int]:
        """Copy pinned pages, whose bytes are `data`, into granted slots, and commit them; give back `unused`.
        What became of each page: TAKEN, LATER, or GONE where its bytes are not what was written.
        """
        connection = self._connection
        assert connection is not None
        grants = [grant for grant, _ in pages]
        checksums = connection.write_pages(grants, [[page] for page in data], deadline_s) if pages else []
        good = [pin.checksum in (0, sum_) for (_, pin), sum_ in zip(pages, checksums, strict=True)]
        bad = [*unused, *(grant for grant, ok in zip(grants, good, strict=True) if not ok)]
        if bad:
            connection.post(m.Abort([grant.slot for grant in bad], [grant.sequence for grant in bad]))
        kept = [i for i, ok in enumerate(good) if ok]
        now_s = time.monotonic()
        if now_s >= deadline_s:
            raise PoolTimeout(f"pool node {self.peer}: pages took too long")
        mask = b""
        if kept:
            commit = m.Commit(
                self._id(),
                [grants[i].slot for i in kept],
                [grants[i].sequence for i in kept],
                [checksums[i] for i in kept],
                [ages_s[i] + now_s - asked_s for i in kept] if ages_s else [],
            )
            mask = self._ask(commit, m.Committed, deadline_s).mask
        ends = [GONE] * len(pages)
        for i, ok in zip(kept, mask, strict=True):
            ends[i] = TAKEN if ok else LATER
        return ends

    def close(self) -> None:
        """Idempotent. Not while a thread uses it."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._numbers.clear()  # the peer's next incarnation may give them to others

    def _open(self, space: Space, deadline_s: float) -> int:
        """The peer's number of a namespace; connects where that is needed."""
        if self._connection is None:
            self._connection = self._connect(deadline_s)
        name, geometry, generation = space
        number = self._numbers.get((name, generation))
        if number is None:
            request = m.OpenNamespace(self._id(), name, dict(geometry), generation)
            number = self._numbers[name, generation] = self._ask(request, m.Opened, deadline_s).namespace
        return number

    def _ask(self, request: m.Request, kind: type[R], deadline_s: float) -> R:
        assert self._connection is not None
        try:
            return expected(self._connection.call(request, deadline_s), kind, self.peer)
        except PoolRefused:
            self._numbers.clear()  # the namespace was dropped there, perhaps
            raise

    def _each(self, keys: list[bytes], answers: list[T]) -> list[T]:
        if len(answers) != len(keys):
            self.close()
            raise PoolRefused(f"pool node {self.peer} answered {len(answers)} of {len(keys)} keys")
        return answers

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


class PageMover:
    """Tasks that move pages between nodes by such threads. Lives in the node's event loop."""

    def __init__(self) -> None:
        self.closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin it, unless this is closed."""
        if self.closed:
            work.close()
            return
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Move nothing more, and wait a moment for threads that read or write our memory. Idempotent."""
        self.closed = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_TIMEOUT_S)
        for task in self._tasks:
            task.cancel()


async def in_thread(work: Callable[[], T], peer: str) -> T:
    """Run in a thread that does not outlive the process. Not cancellable: its caller must see its end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # boundary: this thread. Who awaits it gets the error.
            error = raised
        try:
            loop.call_soon_threadsafe(deliver, result, error)
        except RuntimeError:  # the loop is closed: the node has stopped
            logger.debug("a request to %s ended after its node", peer)

    threading.Thread(target=run, name=f"pdserve-peer-{peer}", daemon=True).start()
    return await future
