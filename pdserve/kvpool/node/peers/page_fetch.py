"""Pages of other nodes into the memory of this one.

Every request to another node is made by a thread of its own, on a connection that one request uses at a
time. It has a deadline, and ends in exactly one answer.

The slot of a page that comes in is a reservation of the node's own session. The thread fills it. After the
thread has ended, the page is committed with the checksum that it was checked by, or its slot is given back.
A thread that is late for its lease finds its reservation in quarantine, and its commit refused. Pulled pages
are inserted like pages of a client: where no space is free, they take the place of the coldest pages here.

`LocalSession` is the node's own session with its own state: connection 0, which moves bytes by itself in the
node's memory. So pulled pages are reserved, committed, bounded and accounted for like pages of any client.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar

from pdserve.errors import PoolUnavailable, StaleView
from pdserve.kvpool.cluster.membership import Cluster
from pdserve.kvpool.core.events import LOCAL, Connected, Event, Received
from pdserve.kvpool.node.config.node import PoolNodeConfig
from pdserve.kvpool.node.peers.page_link import PeerLink
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.frames import expected
from pdserve.kvpool.protocol.messages import Abort, Release, Reply, Request
from pdserve.kvpool.protocol.page_bytes import Bytes1D
from pdserve.security.tls import Certificates

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S: Final = 2.0  # for threads to end; the next node quarantines the slots of the others
SLOWEST_BYTES_S: Final = 20e6  # a batch may take as long as it would at this rate

Space: TypeAlias = tuple[str, Mapping[str, str], int]  # a namespace's name, geometry, generation
T = TypeVar("T")


@dataclass
class Fetched:
    """What came of a batch. `full`: no room for some pages; `missing`: the peer did not give these."""

    pages: int = 0
    size_bytes: int = 0
    full: bool = False
    missing: list[bytes] = field(default_factory=list)


class PageFetch:
    """Requests to other nodes, and the tasks that wait for them. `memory`: the node's arena, shape
    [capacity]. `local`: its session with itself. Lives in the node's event loop.
    """

    def __init__(
        self,
        config: PoolNodeConfig,
        certificates: Certificates,
        cluster: Cluster,
        memory: Bytes1D,
        local: LocalSession,
    ) -> None:
        self.closed = False
        self._config = config
        self._certificates = certificates
        self._cluster = cluster
        self._memory = memory
        self._local = local
        self._loop = asyncio.get_running_loop()
        self._links: dict[tuple[str, str], tuple[asyncio.Lock, PeerLink]] = {}  # by peer and purpose
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Awaitable[None]) -> None:
        """Run a task of the node's until `close`."""
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Ask for nothing more, and wait a moment for threads that write into our memory. Idempotent."""
        self.closed = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_TIMEOUT_S)
        for task in self._tasks:
            task.cancel()

    def drop_links(self, alive: Mapping[str, str]) -> None:
        """Close the connections to other nodes than these, given as address by name."""
        for (peer, purpose), (lock, link) in list(self._links.items()):
            if alive.get(peer) != link.address and not lock.locked():
                del self._links[peer, purpose]
                link.close()

    def address(self, peer: str) -> str | None:
        """Of a living member."""
        return next((mb.address for mb in self._cluster.alive() if mb.node == peer), None)

    async def ask(
        self, peer: str, purpose: str, ask: Callable[[PeerLink, float], T], *, more_s: float = 0.0
    ) -> T:
        """Run one request to a peer in a thread. Raises what it raised."""
        new = asyncio.Lock(), PeerLink(self._config, self._certificates, peer)
        lock, link = self._links.setdefault((peer, purpose), new)
        async with lock:
            address = self.address(peer)
            if address is None:
                raise PoolUnavailable(f"pool node {peer} is not in the pool any more")
            self._links.setdefault((peer, purpose), (lock, link))  # it may have been away meanwhile
            if link.address != address:  # it came back elsewhere
                link.close()
                link.address = address
            limit_s = self._config.lease_s * 0.8
            deadline = self._loop.time() + min(limit_s, self._config.moving.timeout_s + more_s)
            try:
                return await _in_thread(lambda: ask(link, deadline), f"pdserve-{purpose}-{peer}")
            except (StaleView, asyncio.CancelledError):  # cancelled: the thread still uses the link
                raise
            except BaseException:
                link.close()  # what state it is in is not known; the next request opens it anew
                raise

    async def fetch(
        self,
        peer: str,
        purpose: str,
        space: Space,
        keys: Sequence[bytes],
        lengths: Sequence[int],
        *,
        replica: bool = False,
    ) -> Fetched:
        """Get pages from a peer into slots of ours. Raises PoolError when the peer failed."""
        number = await self.open(space)
        by_length: dict[int, list[bytes]] = defaultdict(list)
        for key, length in zip(keys, lengths, strict=True):
            by_length[length].append(key)
        fetched = Fetched()
        for length, some in _messages(by_length):
            request = _reserve(number, some, length, replica)
            reserved = await self._local.call(request)
            if not isinstance(reserved, m.Reserved):
                break  # the namespace is gone
            fetched.full = fetched.full or any(grant.status == m.FULL for grant in reserved.grants)
            mine = [(k, g) for k, g in zip(some, reserved.grants, strict=True) if g.status == m.GRANTED]
            if mine:
                done = await self._fill(peer, purpose, space, mine, length)
                fetched.pages += len(done)
                fetched.size_bytes += len(done) * length
                fetched.missing += [key for key, _ in mine if key not in done]
        return fetched

    async def _fill(
        self, peer: str, purpose: str, space: Space, mine: list[tuple[bytes, m.Grant]], length: int
    ) -> set[bytes]:
        """Fill and commit the slots granted to us, and give the others back; returns the committed keys."""
        keys, grants = [key for key, _ in mine], [grant for _, grant in mine]
        slots = [self._memory[grant.offset : grant.offset + length] for grant in grants]
        checksums: list[int | None] = [None] * len(grants)
        asked_s = self._loop.time()
        try:
            checksums, ages_s = await self.ask(
                peer,
                purpose,
                lambda link, deadline: link.fetch(space, keys, slots, deadline),
                more_s=len(keys) * length / SLOWEST_BYTES_S,
            )
        finally:  # also when the peer failed: the thread has ended by now
            bad = [grant for grant, checksum in zip(grants, checksums, strict=True) if checksum is None]
            if bad and not self.closed:
                self._local.post(m.Abort([g.slot for g in bad], [g.sequence for g in bad]))
        good = [i for i, checksum in enumerate(checksums) if checksum is not None]
        if not good:
            return set()
        took_s = self._loop.time() - asked_s
        committed = await self._local.call(
            lambda n: m.Commit(
                n,
                [grants[i].slot for i in good],
                [grants[i].sequence for i in good],
                [checksums[i] or 0 for i in good],
                [ages_s[i] + took_s for i in good] if ages_s else [],
            )
        )
        mask = committed.mask if isinstance(committed, m.Committed) else bytes(len(good))
        return {keys[i] for i, ok in zip(good, mask, strict=True) if ok}

    async def open(self, space: Space) -> int:
        """Our number of a namespace. Raises PoolRefused."""
        name, geometry, generation = space
        reply = await self._local.call(lambda n: m.OpenNamespace(n, name, dict(geometry), generation))
        return expected(reply, m.Opened, self._config.name).namespace


def _messages(by_length: Mapping[int, list[bytes]]) -> Iterator[tuple[int, list[bytes]]]:
    """The keys by length, as many as one message may be for."""
    for length, keys in by_length.items():
        most = m.pages_a_message(length)
        for start in range(0, len(keys), most):
            yield length, keys[start : start + most]


def _reserve(number: int, keys: list[bytes], length: int, replica: bool) -> Callable[[int], m.Reserve]:
    return lambda request_id: m.Reserve(request_id, number, keys, [length], replica)


async def _in_thread(work: Callable[[], T], name: str) -> T:
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
            logger.debug("%s ended after its node", name)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await future


class LocalSession:
    """Requests of the node to itself. `feed` is the node's."""

    def __init__(self, feed: Callable[[Event], None]) -> None:
        self._feed = feed
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._next_id = 0
        self._closed = False
        feed(Connected(LOCAL, "shm", "this node", 0, peer=True))

    async def call(self, make: Callable[[int], Request]) -> Reply:
        """The reply to `make(id)`; a Fault is returned. Raises PoolUnavailable when the node stops. The
        caller bounds the time.
        """
        if self._closed:
            raise PoolUnavailable("the node stops")
        self._next_id += 1
        request_id = self._next_id
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        try:
            self._feed(Received(LOCAL, make(request_id)))
            return await future
        finally:
            self._waiting.pop(request_id, None)

    def post(self, message: Abort | Release) -> None:
        """A message without a reply."""
        if not self._closed:
            self._feed(Received(LOCAL, message))

    def answered(self, message: Reply) -> None:
        """The node's answer to one of ours."""
        future = self._waiting.get(getattr(message, "id", 0))
        if future is not None and not future.done():
            future.set_result(message)

    def close(self) -> None:
        """The node stops: tell all callers that wait."""
        self._closed = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(PoolUnavailable("the node stops"))
