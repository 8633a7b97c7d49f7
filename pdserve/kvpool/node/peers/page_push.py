"""Pages of this node into the memory of other nodes: carries out PushPages.

A push is an ordinary client's put: Reserve, the bytes, Commit, over mapped memory on one host, UCX or TCP
otherwise. The pages are pinned here meanwhile, by the node's own session (`LocalSession`), which also loads
those that only a tier has. Their bytes are checked before the commit; checksums and ages are carried over.

Every request to another node is made by a thread of its own, on a connection that one request uses at a
time. It has a deadline, and ends in exactly one answer; when it has, nothing reads our memory for it. The
deadline is well within the leases of the pins here and of the reservations there. A thread that is later than
that does not commit.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from pdserve.errors import PdserveError, PoolRefused, PoolTimeout, PoolUnavailable
from pdserve.kvpool.cluster.membership import Cluster
from pdserve.kvpool.core.events import (
    FAILED,
    GONE,
    LATER,
    LOCAL,
    NO_ROOM,
    REFUSED,
    TAKEN,
    Connected,
    Event,
    PagesPushed,
    PushPages,
    Received,
)
from pdserve.kvpool.namespaces.catalog import Namespaces
from pdserve.kvpool.node.config.node import PoolNodeConfig
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.frames import expected
from pdserve.kvpool.protocol.messages import Abort, Release, Reply, Request
from pdserve.kvpool.protocol.page_bytes import Bytes1D
from pdserve.kvpool.transports.base import Connection
from pdserve.kvpool.transports.control import make_hello
from pdserve.kvpool.transports.data_path import connect_channel, open_data_path
from pdserve.kvpool.transports.shm import host_id
from pdserve.security.tls import Certificates

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S: Final = 2.0  # for threads to end
TIMEOUT_S = 5.0  # of one request to another node, and more for a large batch
SLOWEST_BYTES_S: Final = 20e6  # a batch may take as long as it would at this rate
LEASE_SHARE: Final = 0.8  # of a lease that one push may take

Space: TypeAlias = tuple[str, Mapping[str, str], int]  # a namespace's name, geometry, generation
T = TypeVar("T")
R = TypeVar("R", bound=m.Reply)

_OUTCOMES: Final = {
    m.PRESENT: TAKEN,
    m.BUSY: LATER,
    m.MOVED: LATER,
    m.FULL: NO_ROOM,
    m.TOO_LARGE: REFUSED,
}


class PagePusher:
    """The pushes of one node. `memory`: its arena, shape [capacity]. `local`: its session with itself. `feed`
    gives events to its state. Lives in the node's event loop.
    """

    def __init__(
        self,
        config: PoolNodeConfig,
        certificates: Certificates,
        cluster: Cluster,
        namespaces: Namespaces,
        memory: Bytes1D,
        local: LocalSession,
        feed: Callable[[Event], None],
    ) -> None:
        self.closed = False
        self._config = config
        self._certificates = certificates
        self._cluster = cluster
        self._namespaces = namespaces
        self._memory = memory
        self._local = local
        self._feed = feed
        self._loop = asyncio.get_running_loop()
        self._links: dict[tuple[str, bool], tuple[asyncio.Lock, PeerLink]] = {}  # by peer; of replicas or not
        self._tasks: set[asyncio.Task[None]] = set()

    def push(self, push: PushPages) -> None:
        """An action of NodeState."""
        if not self.closed:
            task = asyncio.ensure_future(self._push(push))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Push nothing more, and wait a moment for threads that read our memory. Idempotent."""
        self.closed = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_TIMEOUT_S)
        for task in self._tasks:
            task.cancel()

    def drop_links(self) -> None:
        """Close the connections to nodes that are not alive, or are elsewhere now."""
        for (peer, purpose), (lock, link) in list(self._links.items()):
            if self._address(peer) != link.address and not lock.locked():
                del self._links[peer, purpose]
                link.close()

    async def _push(self, push: PushPages) -> None:
        outcomes = dict.fromkeys(push.keys, FAILED)
        copied: Counter[str] = Counter()
        try:
            space = self._space(push.namespace)
            for keys, length_bytes in _messages(push):
                if self.closed:
                    return
                outcomes |= await self._push_some(push, space, keys, length_bytes, copied)
        except PdserveError as error:
            logger.info("node %s: pushing pages to %s: %s", self._config.name, push.node, error)
        except Exception:  # boundary: this task. The state waits for an answer.
            logger.exception("node %s: pushing pages to %s", self._config.name, push.node)
        if not self.closed:
            ends = bytes(outcomes[key] for key in push.keys)
            self._feed(PagesPushed(push, ends, copied["pages"], copied["bytes"]))

    async def _push_some(
        self, push: PushPages, space: Space, keys: list[bytes], length_bytes: int, copied: Counter[str]
    ) -> dict[bytes, int]:
        """Pages of one length, as many as a message may be for. Raises PoolError when the peer failed."""
        lease_s = LEASE_SHARE * self._config.lease_s
        allowed_s = TIMEOUT_S + len(keys) * length_bytes / SLOWEST_BYTES_S
        lock, link = self._link(push.node, replica=push.replica)
        async with lock:
            self._links.setdefault((push.node, push.replica), (lock, link))  # it may have been away meanwhile
            self._locate(link)
            deadline_s = self._loop.time() + min(lease_s, allowed_s)
            try:
                grants = await _in_thread(
                    lambda: link.reserve(space, keys, length_bytes, push.replica, deadline_s), push.node
                )
            except PoolRefused as error:  # the namespace is another there, by now or still
                if link.is_open:
                    logger.info("node %s: %s takes no pages: %s", self._config.name, push.node, error)
                    return dict.fromkeys(keys, LATER)
                raise
            except asyncio.CancelledError:  # the thread still uses the link
                raise
            except BaseException:
                link.close()  # what state it is in is not known; the next request opens it anew
                raise
            outcomes = {k: _OUTCOMES.get(g.status, LATER) for k, g in zip(keys, grants, strict=True)}
            granted = {k: g for k, g in zip(keys, grants, strict=True) if g.status == m.GRANTED}
            if granted:
                ends = await self._fill(link, push.namespace, granted, length_bytes, deadline_s)
                outcomes |= ends
                taken = sum(end == TAKEN for end in ends.values())
                copied.update(pages=taken, bytes=taken * length_bytes)
            return outcomes

    async def _fill(
        self,
        link: PeerLink,
        namespace: int,
        granted: dict[bytes, m.Grant],
        length_bytes: int,
        deadline_s: float,
    ) -> dict[bytes, int]:
        """Copy pages into the slots that the peer has granted, and commit them; what became of each."""
        keys = list(granted)
        got = await self._local.call(lambda n: m.Get(n, namespace, keys, [length_bytes]))
        pins = got.pins if isinstance(got, m.Got) else [m.Pin(m.MISS)] * len(keys)
        ages_s = got.ages_s if isinstance(got, m.Got) else []
        hits = [i for i, pin in enumerate(pins) if pin.status == m.HIT]
        asked_s = self._loop.time()
        try:
            ends = await _in_thread(
                lambda: link.fill(
                    [(granted[keys[i]], pins[i]) for i in hits],
                    [grant for i, grant in enumerate(granted.values()) if pins[i].status != m.HIT],
                    [self._memory[pins[i].offset : pins[i].offset + length_bytes] for i in hits],
                    [ages_s[i] for i in hits] if ages_s else [],
                    asked_s,
                    deadline_s,
                ),
                link.peer,
            )
        except asyncio.CancelledError:
            raise
        except BaseException:
            link.close()
            raise
        finally:
            if not self.closed:
                self._local.post(m.Release([pins[i].slot for i in hits], [pins[i].sequence for i in hits]))
        self._discard(
            namespace, [(keys[i], pins[i]) for i, end in zip(hits, ends, strict=True) if end == GONE]
        )
        missed = await self._missed(
            namespace, [k for k, p in zip(keys, pins, strict=True) if p.status != m.HIT]
        )
        return missed | {keys[i]: end for i, end in zip(hits, ends, strict=True)}

    async def _missed(self, namespace: int, keys: list[bytes]) -> dict[bytes, int]:
        """Pages that this node could not give itself: gone, or more than it may pin or load at a time."""
        here = await self._local.call(lambda n: m.Exists(n, namespace, keys)) if keys else None
        mask = here.mask if isinstance(here, m.Present) else bytes(len(keys))
        return {key: LATER if present else GONE for key, present in zip(keys, mask, strict=True)}

    def _discard(self, namespace: int, damaged: list[tuple[bytes, m.Pin]]) -> None:
        """These pages are not what was once written."""
        if damaged and not self.closed:
            keys, sequences = [key for key, _ in damaged], [pin.sequence for _, pin in damaged]
            logger.warning("node %s: %d damaged pages are dropped", self._config.name, len(keys))
            self._feed(Received(LOCAL, m.Discard(0, namespace, keys, sequences)))

    # --- the other nodes

    def _address(self, peer: str) -> str | None:
        """Of a living member."""
        return next((mb.address for mb in self._cluster.alive() if mb.node == peer), None)

    def _link(self, peer: str, *, replica: bool) -> tuple[asyncio.Lock, PeerLink]:
        new = asyncio.Lock(), PeerLink(self._config, self._certificates, peer)
        return self._links.setdefault((peer, replica), new)

    def _locate(self, link: PeerLink) -> None:
        """Raises PoolUnavailable."""
        address = self._address(link.peer)
        if address is None:
            raise PoolUnavailable(f"pool node {link.peer} is not in the pool any more")
        if link.address != address:  # it came back elsewhere
            link.close()
            link.address = address

    def _space(self, number: int) -> Space:
        """Raises PoolRefused."""
        if number not in self._namespaces:
            raise PoolRefused(f"there is no namespace number {number} any more")
        namespace = self._namespaces[number]
        return namespace.name, namespace.geometry, namespace.generation


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

    def reserve(
        self, space: Space, keys: list[bytes], length_bytes: int, replica: bool, deadline_s: float
    ) -> list[m.Grant]:
        """The peer's answer for each page."""
        if self._connection is None:
            self._connection = self._connect(deadline_s)
        number = self._open(space, deadline_s)
        request = m.Reserve(self._id(), number, keys, [length_bytes], replica)
        try:
            grants = self._ask(request, m.Reserved, deadline_s).grants
        except PoolRefused:
            self._numbers.clear()  # it was dropped there
            raise
        if len(grants) != len(keys):
            self.close()
            raise PoolRefused(f"pool node {self.peer} answered {len(grants)} of {len(keys)} keys")
        return grants

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
        """The peer's number of a namespace."""
        name, geometry, generation = space
        number = self._numbers.get((name, generation))
        if number is None:
            request = m.OpenNamespace(self._id(), name, dict(geometry), generation)
            number = self._numbers[name, generation] = self._ask(request, m.Opened, deadline_s).namespace
        return number

    def _ask(self, request: m.Request, kind: type[R], deadline_s: float) -> R:
        assert self._connection is not None
        return expected(self._connection.call(request, deadline_s), kind, self.peer)

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


class LocalSession:
    """Requests of the node to itself: connection 0, which moves bytes by itself in the node's memory. So
    pages are pinned, loaded from tiers and bounded like those of any client. `feed` is the node's.
    """

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


def _messages(push: PushPages) -> Iterator[tuple[list[bytes], int]]:
    """The keys by length, as many as one message may be for."""
    by_length: dict[int, list[bytes]] = {}
    for key, length in zip(push.keys, push.lengths, strict=True):
        by_length.setdefault(length, []).append(key)
    for length, keys in by_length.items():
        most = m.pages_a_message(length)
        for start in range(0, len(keys), most):
            yield keys[start : start + most], length


async def _in_thread(work: Callable[[], T], peer: str) -> T:
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
            logger.debug("a push to %s ended after its node", peer)

    threading.Thread(target=run, name=f"pdserve-push-{peer}", daemon=True).start()
    return await future
