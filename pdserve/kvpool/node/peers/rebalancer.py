"""Moves pages between this node and the others: carries out what migration.py and replication.py decide.

Lives in the node's event loop. Every request to another node is made by a thread of its own on a connection
that one request uses at a time, has a deadline, and ends in exactly one event for who wanted it. There are as
many threads as requests that the planners allow out: `max_peers` for migration, one per successor and
namespace for replicas, MAX_PULLS for replicas that others want.

A page that comes in is a reservation of the node's own session: its slot is filled by the thread, committed
with the checksum that it was checked by, or given back, after the thread has ended. A thread that is late for
its lease finds its reservation in quarantine, and its commit refused. Pages that are pulled are inserted as
if a client had written them: where there is no free space they take the place of the coldest pages here, for
DISPLACED_SHARE of the node at most. They wait for those to be written to a tier first, within reason: nobody
waits for a pull.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar

from pdserve.errors import PdserveError, PoolRefused, PoolUnavailable, StaleView
from pdserve.kvpool.cluster.rebalance_plan import (
    Begin,
    Elapsed,
    Failed,
    List,
    Listed,
    Migration,
    MigrationLimits,
    MoveEvent,
    Pull,
    Pulled,
    Settled,
    Survey,
    Surveyed,
)
from pdserve.kvpool.cluster.ring import Ring
from pdserve.kvpool.core.events import AskReplicas, EndReplicasAt, Event, ReplicasMade, ViewChanged
from pdserve.kvpool.namespaces.catalog import Namespaces
from pdserve.kvpool.node.config.node import PoolNodeConfig
from pdserve.kvpool.node.loopback import LocalSession
from pdserve.kvpool.node.peers.gossip import Gossiper, Handler
from pdserve.kvpool.node.peers.page_link import PeerLink
from pdserve.kvpool.node.serving.connection import ClientConnection
from pdserve.kvpool.node.timers import call_at
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import ACTIVE, LEAVING, LEFT, Drain, PullPages
from pdserve.kvpool.protocol.frames import expected
from pdserve.kvpool.protocol.page_bytes import Bytes1D
from pdserve.sizes import parse_bytes

logger = logging.getLogger(__name__)

MAX_PULLS: Final = 4  # requests of others for replicas that are carried out at a time
STOP_TIMEOUT_S: Final = 2.0  # for threads to end; slots of those that do not are quarantined by the next node
LEFT_GRACE_S: Final = 1.0  # from having left until the process stops: the others are told meanwhile
DISPLACED_SHARE: Final = 0.5  # of the capacity: pages here that pulled ones may displace, beside free space
BEHIND_POLLS: Final = 500  # of a tier that cannot keep up, for each batch: 10 s
BEHIND_POLL_S: Final = 0.02
SLOWEST_BYTES_S: Final = 20e6  # a batch may take as long as it would at this rate

Space: TypeAlias = tuple[str, Mapping[str, str], int]  # a namespace's name, geometry, generation
T = TypeVar("T")


class Rebalancer:
    """What a node has to do with the pages of others. `memory`: its arena, shape [capacity]. `free_bytes`
    tells how much of it holds nothing, `behind` whether a tier below it cannot keep up; `feed` and `stop` are
    the node's.
    """

    def __init__(
        self,
        config: PoolNodeConfig,
        gossip: Gossiper,
        memory: Bytes1D,
        local: LocalSession,
        namespaces: Namespaces,
        free_bytes: Callable[[], int],
        behind: Callable[[], bool],
        feed: Callable[[Event], None],
        stop: Callable[[], None],
    ) -> None:
        self._config = config
        self._gossip = gossip
        self._memory = memory
        self._local = local
        self._namespaces = namespaces
        self._free_bytes = free_bytes
        self._behind = behind
        self._feed = feed
        self._stop = stop
        self._loop = asyncio.get_running_loop()
        self._migration = Migration(_limits(config))
        self._timer: asyncio.TimerHandle | None = None
        self._ring = Ring([])
        self._seen: tuple[int, bool] | None = None  # epoch, stable: what NodeState was told
        self._spaces: dict[tuple[str, str], Space] = {}  # (peer, namespace) -> geometry
        self._links: dict[tuple[str, str], tuple[asyncio.Lock, PeerLink]] = {}  # by peer and purpose
        self._tasks: set[asyncio.Task[None]] = set()
        self._pulls = 0
        self._replica_pages_pulled = 0
        self._closed = False
        self._leaving = False
        gossip.on_change.append(self._changed)

    def routes(self) -> dict[type, Handler]:
        """Who answers which request."""
        return {Drain: self._drain, PullPages: self._pull_pages}

    def counters(self) -> dict[str, int]:
        """For the node's status."""
        migration = self._migration
        return {
            "pages_pulled": migration.pages_pulled,
            "bytes_pulled": migration.bytes_pulled,
            "pulls_failed": migration.pulls_failed,
            "peers_given_up": migration.peers_given_up,
            "pages_to_move": migration.pages_to_move,
            "moving": int(migration.moving),
            "settled_epoch": migration.settled,
            "replica_pages_pulled": self._replica_pages_pulled,
        }

    def start(self) -> None:
        """Take up the view that is there."""
        self._changed()

    async def close(self) -> None:
        """Ask nobody any more, and wait a moment for threads that write into our memory."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_TIMEOUT_S)
        for task in self._tasks:
            task.cancel()

    # --- the view

    def _changed(self) -> None:
        """The members or the view changed, perhaps."""
        cluster = self._gossip.cluster
        view, stable = cluster.view, cluster.settled
        if self._closed or self._seen == (view.epoch, stable):
            return
        before = self._ring
        new_ring = self._seen is None or self._seen[0] != view.epoch
        self._seen = (view.epoch, stable)
        if new_ring:
            self._ring = Ring(view.nodes, view.epoch)
        self._feed(ViewChanged(self._ring, stable))
        if new_ring:
            self._loop.call_soon(self._begin, before)
        if cluster.me.status == LEFT and self._config.stop_when_drained:
            self._loop.call_later(LEFT_GRACE_S, self._stop)
        if self._leaving and cluster.me.status == ACTIVE:
            logger.warning("node %s: it stays: no other node is left to take its pages", cluster.name)
        self._leaving = cluster.me.status == LEAVING

    def _begin(self, before: Ring) -> None:
        cluster = self._gossip.cluster
        if self._closed or cluster.epoch != self._ring.epoch:
            return  # another change came at once
        alive = {member.node: member.address for member in cluster.alive() if member.node != cluster.name}
        for (peer, purpose), (lock, link) in list(self._links.items()):
            if alive.get(peer) != link.address and not lock.locked():
                del self._links[peer, purpose]
                link.close()
        self._spaces = {known: found for known, found in self._spaces.items() if known[0] in alive}
        peers: list[str] = []
        if cluster.me.status == ACTIVE:
            first = [name for name in self._ring.sources(before, cluster.name) if name in alive]
            peers = [*first, *sorted(alive.keys() - set(first))]
        room_bytes = self._free_bytes() + DISPLACED_SHARE * self._config.capacity
        self._move(Begin(self._ring.epoch, tuple(peers), room_bytes))

    # --- migration

    def _move(self, event: MoveEvent) -> None:
        if self._closed:
            return
        for action in self._migration.handle(event, self._loop.time()):
            if isinstance(action, Settled):
                self._gossip.settle(action.epoch)
            else:
                self._spawn(self._carry_out(action))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._migration.next_deadline_s != float("inf"):
            self._timer = call_at(self._loop, self._migration.next_deadline_s, self._move, Elapsed())

    async def _carry_out(self, action: Survey | List | Pull) -> None:
        event: MoveEvent
        try:
            if isinstance(action, Survey):
                event = await self._survey(action)
            elif isinstance(action, List):
                event = await self._list(action)
            else:
                event = await self._pull(action)
        except StaleView:
            event = Failed(action.ask, stale=True)
        except PdserveError as error:
            logger.info("node %s: moving pages from %s: %s", self._config.name, action.peer, error)
            event = Failed(action.ask)
        except Exception:  # boundary: this task. The plan needs an answer to go on.
            logger.exception("node %s: moving pages from %s", self._config.name, action.peer)
            event = Failed(action.ask)
        self._move(event)

    async def _survey(self, action: Survey) -> Surveyed:
        report = await self._ask(action.peer, "move", PeerLink.survey)
        if report.epoch != action.epoch:
            raise StaleView(f"pool node {action.peer} knows epoch {report.epoch}, not {action.epoch}")
        for space in report.namespaces:
            self._spaces[action.peer, space.name] = space.name, space.geometry, space.generation
        return Surveyed(action.ask, tuple(space.name for space in report.namespaces))

    async def _list(self, action: List) -> Listed:
        space = self._surveyed(action)
        try:
            number = await self._open(space)
            owned = await self._ask(
                action.peer,
                "move",
                lambda link, deadline: link.list_owned(
                    space, action.epoch, action.cursor, action.limit, deadline
                ),
            )
        except StaleView:
            raise
        except PoolRefused as error:  # it was dropped, or replaced: then its pages are nobody's
            logger.info("node %s: namespace %s is not moved: %s", self._config.name, action.namespace, error)
            return Listed(action.ask, [], [], 0, 0)
        here = await self._local.call(lambda n: m.Exists(n, number, owned.keys))
        if not isinstance(here, m.Present):
            return Listed(action.ask, [], [], 0, 0)
        lacking = [i for i, present in enumerate(here.mask) if not present]
        keys, lengths = [owned.keys[i] for i in lacking], [owned.lengths[i] for i in lacking]
        return Listed(action.ask, keys, lengths, owned.cursor, owned.writing)

    def _surveyed(self, action: List | Pull) -> Space:
        """As surveyed. Raises StaleView: the peer was away since."""
        space = self._spaces.get((action.peer, action.namespace))
        if space is None:
            raise StaleView(f"node {action.peer} was lost meanwhile")
        return space

    async def _pull(self, action: Pull) -> Pulled:
        await self._kept_up()
        space = self._surveyed(action)
        return await self._fetch(action.peer, "move", space, action.keys, action.lengths, ask=action.ask)

    async def _kept_up(self) -> None:
        """Wait for a tier below, within reason."""
        for _ in range(BEHIND_POLLS):
            if self._closed or not self._behind():
                return
            await asyncio.sleep(BEHIND_POLL_S)

    # --- pages

    async def _fetch(
        self,
        peer: str,
        purpose: str,
        space: Space,
        keys: Sequence[bytes],
        lengths: Sequence[int],
        *,
        ask: int = 0,
        replica: bool = False,
    ) -> Pulled:
        """Get pages from a peer into slots of ours. Raises PoolError when the peer failed."""
        number = await self._open(space)
        by_length: dict[int, list[bytes]] = defaultdict(list)
        for key, length in zip(keys, lengths, strict=True):
            by_length[length].append(key)
        pages, moved_bytes, full = 0, 0, False
        missing: list[bytes] = []
        for length, some in by_length.items():
            request = _reserve(number, some, length, replica)
            reserved = await self._local.call(request)
            if not isinstance(reserved, m.Reserved):
                break  # the namespace is gone
            full = full or any(grant.status == m.FULL for grant in reserved.grants)
            mine = [(k, g) for k, g in zip(some, reserved.grants, strict=True) if g.status == m.GRANTED]
            if mine:
                done = await self._fill(peer, purpose, space, mine, length)
                pages += len(done)
                moved_bytes += len(done) * length
                missing += [key for key, _ in mine if key not in done]
        return Pulled(ask, pages, moved_bytes, full, missing)

    async def _fill(
        self, peer: str, purpose: str, space: Space, mine: list[tuple[bytes, m.Grant]], length: int
    ) -> set[bytes]:
        """Fill and commit the slots granted to us; the keys of those that were. The others are given back."""
        keys, grants = [key for key, _ in mine], [grant for _, grant in mine]
        slots = [self._memory[grant.offset : grant.offset + length] for grant in grants]
        checksums: list[int | None] = [None] * len(grants)
        asked_s = self._loop.time()
        try:
            checksums, ages_s = await self._ask(
                peer,
                purpose,
                lambda link, deadline: link.fetch(space, keys, slots, deadline),
                more_s=len(keys) * length / SLOWEST_BYTES_S,
            )
        finally:  # also when the peer failed: the thread has ended by now
            bad = [grant for grant, checksum in zip(grants, checksums, strict=True) if checksum is None]
            if bad and not self._closed:
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

    async def _open(self, space: Space) -> int:
        """Our number of a namespace. Raises PoolRefused."""
        name, geometry, generation = space
        reply = await self._local.call(lambda n: m.OpenNamespace(n, name, dict(geometry), generation))
        return expected(reply, m.Opened, self._config.name).namespace

    # --- replicas

    def ask_replicas(self, action: AskReplicas) -> None:
        """An action of NodeState."""
        self._spawn(self._ask_replicas(action))

    def end_replicas(self, action: EndReplicasAt) -> None:
        """An action of NodeState."""
        self._spawn(self._end_replicas(action))

    async def _ask_replicas(self, action: AskReplicas) -> None:
        mask = [False] * len(action.keys)
        try:
            space = self._space(action.namespace)
            mask = await self._ask(
                action.node,
                "replicas",
                lambda link, deadline: link.ask_replicas(space, action.keys, action.lengths, deadline),
            )
        except PdserveError as error:
            logger.info("node %s: no replicas at %s: %s", self._config.name, action.node, error)
        finally:
            self._feed(ReplicasMade(action.node, action.namespace, action.keys, mask))

    async def _end_replicas(self, action: EndReplicasAt) -> None:
        try:
            space = self._space(action.namespace)
            await self._ask(
                action.node,
                "replicas",
                lambda link, deadline: link.end_replicas(space, action.keys, deadline),
            )
        except PdserveError as error:  # they end with their leases
            logger.debug("node %s: replicas at %s: %s", self._config.name, action.node, error)

    def _pull_pages(self, connection: ClientConnection, request: PullPages) -> None:
        """Another node wants replicas of its pages here."""
        peer = connection.hello.node if connection.hello is not None else ""
        if self._pulls >= MAX_PULLS or self._address(peer) is None:
            connection.send(m.Done(request.id, 0))
            return
        self._pulls += 1
        self._spawn(self._make_replicas(connection, peer, request))

    async def _make_replicas(self, connection: ClientConnection, peer: str, request: PullPages) -> None:
        count = 0
        try:
            space = self._space(request.namespace)
            pulled = await self._fetch(peer, "fetch", space, request.keys, request.lengths, replica=True)
            self._replica_pages_pulled += pulled.pages
            here = await self._local.call(lambda n: m.Exists(n, request.namespace, request.keys))
            count = sum(here.mask) if isinstance(here, m.Present) else 0
        except (PdserveError, ValueError) as error:  # ValueError: keys and lengths of two sizes
            logger.info("node %s: replicas for %s: %s", self._config.name, peer, error)
        finally:
            self._pulls -= 1
            connection.send(m.Done(request.id, count))

    def _space(self, number: int) -> Space:
        """Raises PoolRefused."""
        if number not in self._namespaces:
            raise PoolRefused(f"there is no namespace number {number} any more")
        namespace = self._namespaces[number]
        return namespace.name, namespace.geometry, namespace.generation

    # --- leaving

    def _drain(self, connection: ClientConnection, request: Drain) -> None:
        try:
            self._gossip.leave()
        except PoolRefused as error:
            connection.send(m.Fault(request.id, "last_node", str(error)))
            return
        logger.info("node %s: leaving: the others pull what is here", self._config.name)
        connection.send(m.Done(request.id))

    # --- threads

    def _address(self, peer: str) -> str | None:
        return next((mb.address for mb in self._gossip.cluster.alive() if mb.node == peer), None)

    async def _ask(
        self, peer: str, purpose: str, ask: Callable[[PeerLink, float], T], *, more_s: float = 0.0
    ) -> T:
        """Run one request to a peer in a thread. Raises what it raised."""
        lock, link = self._links.setdefault((peer, purpose), (asyncio.Lock(), PeerLink(self._config, peer)))
        async with lock:
            address = self._address(peer)
            if address is None:
                raise PoolUnavailable(f"pool node {peer} is not in the pool any more")
            self._links.setdefault((peer, purpose), (lock, link))  # it may have been away meanwhile
            if link.address != address:  # it came back elsewhere
                link.close()
                link.address = address
            limit_s = self._config.reservation_lease_s * 0.8
            deadline = self._loop.time() + min(limit_s, self._config.moving.timeout_s + more_s)
            try:
                return await _in_thread(lambda: ask(link, deadline), f"pdserve-{purpose}-{peer}")
            except (StaleView, asyncio.CancelledError):  # cancelled: the thread still uses the link
                raise
            except BaseException:
                link.close()  # what state it is in is not known; the next request opens it anew
                raise

    def _spawn(self, work: Awaitable[None]) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _limits(config: PoolNodeConfig) -> MigrationLimits:
    reserved = int(config.capacity * config.max_reserved_share)
    return MigrationLimits(
        bytes_s=float(parse_bytes(config.moving.bytes_s)),
        # what is out at a time must not use up what our own session may reserve
        batch_bytes=min(parse_bytes(config.moving.batch_bytes), reserved // (2 * config.moving.max_peers)),
        max_peers=config.moving.max_peers,
    )


def _reserve(number: int, keys: list[bytes], length: int, replica: bool) -> Callable[[int], m.Reserve]:
    return lambda request_id: m.Reserve(request_id, number, keys, [length], replica)


async def _in_thread(work: Callable[[], T], name: str) -> T:
    """Run in a thread that does not outlive the process. Not cancellable: who awaits it must see its end."""
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
