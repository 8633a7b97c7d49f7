"""Pages of this node into the memory of other nodes: carries out PushPages.

A push is an ordinary client's put: Reserve, the bytes, Commit. The pages are pinned here meanwhile, by the
node's own session (`LocalSession`), which also loads those that only a tier has. Their bytes are checked
before the commit; checksums and ages are carried over. The deadline of each request is well within the leases
of the pins here and of the reservations there. A thread that is later than that does not commit.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from pdserve.errors import PdserveError, PoolRefused, PoolUnavailable
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
from pdserve.kvpool.node.config import PoolNodeConfig
from pdserve.kvpool.node.peers.peer_link import PageMover, PeerLink, Space, address_of, in_thread, space_of
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.messages import Abort, Release, Reply, Request
from pdserve.kvpool.protocol.page_bytes import Bytes1D
from pdserve.security.tls import Certificates

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0  # of one request to another node, and more for a large batch
SLOWEST_BYTES_S: Final = 20e6  # a batch may take as long as it would at this rate
LEASE_SHARE: Final = 0.8  # of a lease that one push may take

_OUTCOMES: Final = {
    m.PRESENT: TAKEN,
    m.BUSY: LATER,
    m.MOVED: LATER,
    m.FULL: NO_ROOM,
    m.TOO_LARGE: REFUSED,
}


class PagePusher(PageMover):
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
        super().__init__()
        self._config = config
        self._certificates = certificates
        self._cluster = cluster
        self._namespaces = namespaces
        self._memory = memory
        self._local = local
        self._feed = feed
        self._loop = asyncio.get_running_loop()
        self._links: dict[tuple[str, str], tuple[asyncio.Lock, PeerLink]] = {}  # by peer and purpose

    def push(self, push: PushPages) -> None:
        """An action of NodeState."""
        self.start(self._push(push))

    def drop_links(self) -> None:
        """Close the connections to nodes that are not alive, or are elsewhere now."""
        for (peer, purpose), (lock, link) in list(self._links.items()):
            if address_of(self._cluster, peer) != link.address and not lock.locked():
                del self._links[peer, purpose]
                link.close()

    async def _push(self, push: PushPages) -> None:
        outcomes = dict.fromkeys(push.keys, FAILED)
        copied: Counter[str] = Counter()
        try:
            space = space_of(self._namespaces, push.namespace)
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
        target = push.node, "written" if push.written else "replicas" if push.replica else "moved"
        lock, link = self._links.setdefault(
            target, (asyncio.Lock(), PeerLink(self._config, self._certificates, push.node))
        )
        async with lock:
            self._links.setdefault(target, (lock, link))  # it may have been away meanwhile
            link.locate(self._cluster)
            deadline_s = self._loop.time() + min(lease_s, allowed_s)
            try:
                grants = await in_thread(
                    lambda: link.reserve(space, keys, length_bytes, push, deadline_s), push.node
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
            ends = await in_thread(
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
