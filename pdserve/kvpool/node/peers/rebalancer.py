"""Moves pages to where the ring says that they belong: carries out what `cluster.rebalance_plan` decides.

Lives in the node's event loop. The plan asks at most MAX_PEERS nodes at a time, by page_fetch.py. Pulled
pages displace the coldest pages here, for DISPLACED_SHARE of the node at most. A pull waits, within reason,
until those pages are written to a tier: no client waits for a pull.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from pdserve.errors import PdserveError, PoolRefused, StaleView
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
from pdserve.kvpool.core.events import Event, ViewChanged
from pdserve.kvpool.node.config.node import PoolNodeConfig
from pdserve.kvpool.node.peers.gossip import Gossiper, Handler
from pdserve.kvpool.node.peers.page_fetch import LocalSession, PageFetch, Space
from pdserve.kvpool.node.peers.page_link import PeerLink
from pdserve.kvpool.node.serving.connection import ClientConnection
from pdserve.kvpool.node.timers import call_at
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import ACTIVE, LEAVING, LEFT, Drain
from pdserve.sizes import parse_bytes

logger = logging.getLogger(__name__)

MAX_PEERS: Final = 4  # asked at the same time
LEFT_GRACE_S: Final = 1.0  # from having left until the process stops: the others are told meanwhile
DISPLACED_SHARE: Final = 0.5  # of the capacity: pages here that pulled ones may displace, beside free space
BEHIND_POLLS: Final = 500  # of a tier that cannot keep up, for each batch: 10 s
BEHIND_POLL_S: Final = 0.02


class Rebalancer:
    """Pulls the pages that this node owns, and lets it leave the pool. `free_bytes`: how much of its memory
    holds nothing; `behind`: whether a tier cannot keep up; `feed` and `stop` are the node's.
    """

    def __init__(
        self,
        config: PoolNodeConfig,
        gossip: Gossiper,
        pages: PageFetch,
        local: LocalSession,
        free_bytes: Callable[[], int],
        behind: Callable[[], bool],
        feed: Callable[[Event], None],
        stop: Callable[[], None],
    ) -> None:
        self._config = config
        self._gossip = gossip
        self._pages = pages
        self._local = local
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
        self._leaving = False
        gossip.on_change.append(self._changed)

    def routes(self) -> dict[type, Handler]:
        """Which requests are answered here."""
        return {Drain: self._drain}

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
        }

    def start(self) -> None:
        """Take up the view that is there."""
        self._changed()

    async def close(self) -> None:
        """Ask for nothing more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        await self._pages.close()

    # --- the view

    def _changed(self) -> None:
        """The members or the view changed, perhaps."""
        cluster = self._gossip.cluster
        view, stable = cluster.view, cluster.settled
        if self._pages.closed or self._seen == (view.epoch, stable):
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
        if self._pages.closed or cluster.epoch != self._ring.epoch:
            return  # another change came at once
        alive = {member.node: member.address for member in cluster.alive() if member.node != cluster.name}
        self._pages.drop_links(alive)
        self._spaces = {known: found for known, found in self._spaces.items() if known[0] in alive}
        peers: list[str] = []
        if cluster.me.status == ACTIVE:
            first: list[str] = []
            peers = [*first, *sorted(alive.keys() - set(first))]
        room_bytes = self._free_bytes() + DISPLACED_SHARE * self._config.capacity
        self._move(Begin(self._ring.epoch, tuple(peers), room_bytes))

    # --- the plan

    def _move(self, event: MoveEvent) -> None:
        if self._pages.closed:
            return
        for action in self._migration.handle(event, self._loop.time()):
            if isinstance(action, Settled):
                self._gossip.settle(action.epoch)
            else:
                self._pages.spawn(self._carry_out(action))
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
        report = await self._pages.ask(action.peer, "move", PeerLink.survey)
        if report.epoch != action.epoch:
            raise StaleView(f"pool node {action.peer} knows epoch {report.epoch}, not {action.epoch}")
        for space in report.namespaces:
            self._spaces[action.peer, space.name] = space.name, space.geometry, space.generation
        return Surveyed(action.ask, tuple(space.name for space in report.namespaces))

    async def _list(self, action: List) -> Listed:
        space = self._surveyed(action)
        try:
            number = await self._pages.open(space)
            owned = await self._pages.ask(
                action.peer,
                "move",
                lambda link, deadline: link.list_owned(
                    space, action.epoch, action.cursor, action.limit, deadline
                ),
            )
        except StaleView:
            raise
        except PoolRefused as error:  # it was dropped, or replaced: its pages are gone
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
        fetched = await self._pages.fetch(action.peer, "move", space, action.keys, action.lengths)
        return Pulled(action.ask, fetched.pages, fetched.size_bytes, fetched.full, fetched.missing)

    async def _kept_up(self) -> None:
        """Wait for a tier below, within reason."""
        for _ in range(BEHIND_POLLS):
            if self._pages.closed or not self._behind():
                return
            await asyncio.sleep(BEHIND_POLL_S)

    # --- leaving

    def _drain(self, connection: ClientConnection, request: Drain) -> None:
        try:
            self._gossip.leave()
        except PoolRefused as error:
            connection.send(m.Fault(request.id, "last_node", str(error)))
            return
        logger.info("node %s: leaving: the others pull what is here", self._config.name)
        connection.send(m.Done(request.id))


def _limits(config: PoolNodeConfig) -> MigrationLimits:
    reserved = int(config.capacity * config.max_client_share)
    return MigrationLimits(
        bytes_s=float(parse_bytes(config.moving.bytes_s)),
        # all batches under way must not use up what our own session may reserve
        batch_bytes=min(parse_bytes(config.moving.batch_bytes), reserved // (2 * MAX_PEERS)),
        max_peers=MAX_PEERS,
    )
