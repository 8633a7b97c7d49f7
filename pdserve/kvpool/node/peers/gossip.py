"""A node's part in the pool: what it knows of the others, and whom it tells. asyncio, in the node's loop.

`cluster.membership` decides which nodes are in the pool, and `cluster.failure_detector` which node is asked
next and which one is dead. Here their decisions are carried out:

    join       before the node listens: ask the peers what they know (joining.py)
    watch      what the detector wants: pings, which are exchanges (anti_entropy.py), and the verdict
    tell       a change of this node's own goes to all members at once
    apply      what was learnt goes to the node's own parts

Every request has a time-out, and runs in a task of its own; there is at most one ping and one `tell` per
member, so a member that hangs delays no other. Nothing here is kept on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, TypeAlias

from msgspec.structs import replace

from pdserve.errors import FrameError, NodeFailed, PdserveError, PoolRefused
from pdserve.kvpool.cluster import failure_detector as d
from pdserve.kvpool.cluster.membership import Cluster, Update
from pdserve.kvpool.cluster.state import parts
from pdserve.kvpool.node.config import PoolNodeConfig
from pdserve.kvpool.node.peers.anti_entropy import PART_BYTES, AntiEntropy
from pdserve.kvpool.node.peers.channels import PeerControls
from pdserve.kvpool.node.peers.joining import Before, Joining
from pdserve.kvpool.node.serving.connection import ClientConnection
from pdserve.kvpool.node.timers import clock_ms
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.base import NodeAddress
from pdserve.kvpool.protocol.cluster_messages import (
    ACTIVE,
    DEAD,
    LEAVING,
    GetView,
    Gossip,
    Gossiped,
    NamespaceRecord,
    ProbePeer,
    View,
)
from pdserve.kvpool.transports.control import make_hello
from pdserve.security.tls import Certificates

logger = logging.getLogger(__name__)

Handler: TypeAlias = Callable[[ClientConnection, Any], None]
IDLE_ROUNDS: Final = 30  # intervals of sync between looks for unused connections
MAX_PROBES: Final = 64  # of nodes that others ask about, at a time
STOP_TIMEOUT_S: Final = 0.5  # to take its key out of etcd


class Gossiper:
    """This node among the others.

    `on_namespaces` are called with what changed, in the loop, and may call back. Whoever moves
    pages sets `moves_pages` before the node starts, and calls `settle(epoch)` when nothing is left here
    that others own; else the node counts as settled at once.
    """

    def __init__(
        self,
        config: PoolNodeConfig,
        certificates: Certificates,
        incarnation: int,
        fail: Callable[[PdserveError], None],
        before: Before | None = None,
    ) -> None:
        """`fail` ends the node. `before`: set after an upgrade."""
        self.config = config
        self.timing = d.Timing(config.cluster.ping_timeout_s)
        self._fail = fail
        self.name = config.name
        self.address = NodeAddress(config.name, config.address, config.weight)
        self.cluster = Cluster(
            config.cluster.name,
            self.address,
            incarnation,
            time.time_ns() // 1_000_000,
            ACTIVE if before is None else before.status,
        )
        self.moves_pages = False
        self.on_change: list[Callable[[], None]] = []  # any change of what is known of the members
        self.on_namespaces: list[Callable[[list[NamespaceRecord]], None]] = []
        hello = make_hello(f"node {config.name}", "", "none", config.cluster.token)
        self.hello = replace(hello, node=config.name)
        self.links = PeerControls(self.hello, certificates)
        self.links.on_upgrading = lambda node: self._feed(d.Upgrading(node))
        self.anti_entropy = AntiEntropy(
            self.cluster, self.links, self.timing.ping_timeout_s, self.apply, self._spawn
        )
        self.joining = Joining(config, self.cluster, self.links, self.apply, self._spawn_sync, fail, before)
        self._tasks: set[asyncio.Task[None]] = set()
        self._detector: d.Detector | None = None  # set by `start`
        self._probes = 0
        self._joined = False
        self._settled_epoch = 0  # of before it joined

    @property
    def view(self) -> View:
        """The ring as this node knows it."""
        return self.cluster.view

    def routes(self) -> dict[type, Handler]:
        """Who answers which request."""
        return {GetView: self._get_view, Gossip: self._gossip, ProbePeer: self._probe_peer}

    # --- what the node's other parts use

    def settle(self, epoch: int) -> None:
        """Nothing is left here that another node owns under the ring of `epoch`."""
        if self._joined:
            self.apply(self.cluster.settle(epoch))
        else:  # what a node finds alone is no ring that the others had
            self._settled_epoch = epoch

    def leave(self) -> None:
        """Stop owning pages; LEFT when the others have them. Raises PoolRefused: there is no other."""
        self.apply(self.cluster.leave())

    def publish(self, record: NamespaceRecord) -> None:
        """Tell all nodes of a namespace's new record."""
        if self._detector is not None:  # else they are told when this node starts
            self.anti_entropy.tell_all({record.name: record})

    async def call(self, node: str, make: Callable[[int], m.Request], timeout_s: float) -> m.Reply:
        """A request to another member. Raises PoolError."""
        member = self.cluster.members.get(node)
        if member is None:
            raise PoolRefused(f"no node {node} is known")
        reply, _ = await self.links.call(member.address, make, timeout_s, node=node)
        return reply

    # --- coming and going

    async def join(self) -> None:
        """Learn what the others know, before any of them knows this node. Raises StartupError: they refuse
        it, or a node with its name lives.
        """
        await self.joining.join()
        self._joined = True
        self.settle(self._settled_epoch)
        self.apply(Update())

    def start(self) -> None:
        """From now on this node is one of them."""
        loop = asyncio.get_running_loop()
        self._detector = d.Detector(self.name, self.timing, loop.time())
        self._members_changed()
        self.joining.started = True
        for address in list(self.joining.seeds):
            self._spawn_sync(address)
        self.anti_entropy.tell_all({})
        self._spawn(self._run(), vital=True)
        for follow in self.joining.follow():
            self._spawn(follow, vital=True)

    async def stop(self, *, leaving: bool = True) -> None:
        """End all of it. The others notice: nobody listens here any more. Its key goes from etcd if this node
        is `leaving`; else it stays there, for the next program.
        """
        self._detector = None
        self.joining.started = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.links.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self.joining.close(keeps_key=not leaving)

    # --- what changed

    def apply(self, update: Update) -> None:
        """Carry a change where it is needed."""
        if update.members:
            self._members_changed()
        if update.view is not None:
            self._view_changed()
        if update.namespaces:
            for told in self.on_namespaces:
                told(list(update.namespaces))
        if update.members or update.view is not None:
            for changed in self.on_change:
                changed()
        if update.own and self._detector is not None:
            self.anti_entropy.tell_all({record.name: record for record in update.namespaces})
        if update.rival is not None and not self.joining.rivalry:
            self._spawn(self.joining.settle_rivalry(update.rival))
        if self._joined and not self.moves_pages and self.cluster.me.settled < self.cluster.epoch:
            self.settle(self.cluster.epoch)

    def _members_changed(self) -> None:
        others = [member for member in self.cluster.members.values() if member.node != self.name]
        alive = {member.node: member.version for member in others if member.status in (ACTIVE, LEAVING)}
        dead = {member.node: member.version for member in others if member.status == DEAD}
        self._feed(d.Known(alive, dead))

    def _view_changed(self) -> None:
        view = self.view
        logger.info("node %s: epoch %d: %s", self.name, view.epoch, ", ".join(n.node for n in view.nodes))

    def with_members(self, report: m.StatusReport) -> m.StatusReport:
        """The node's status with what it knows of the others."""
        return replace(report, epoch=self.cluster.epoch, members=list(self.cluster.state.members))

    # --- requests of other nodes, whose right to send them was checked (namespaces/access.py)

    def _get_view(self, connection: ClientConnection, request: GetView) -> None:
        connection.send(replace(self.view, id=request.id))

    def _gossip(self, connection: ClientConnection, request: Gossip) -> None:
        if request.state.cluster != self.config.cluster.name:
            message = (
                f"node {self.name} is of cluster '{self.config.cluster.name}', not '{request.state.cluster}'"
            )
            connection.send(m.Fault(request.id, "other_cluster", message))
            return
        sender = "" if connection.hello is None else connection.hello.node
        self._feed(d.Heard(sender))
        try:
            self.apply(self.cluster.receive(request.state, clock_ms()))
        except FrameError as error:
            connection.send(m.Fault(request.id, "bad_state", str(error)))
            return
        known, digest = self.cluster.whole, self.cluster.digest
        if request.digest == digest:
            connection.send(Gossiped(request.id, self.anti_entropy.nothing(), digest))
            return
        first, *more = parts(known, PART_BYTES)
        connection.send(Gossiped(request.id, first, digest))
        if more:
            self.anti_entropy.tell(
                sender, {record.name: record for part in more for record in part.namespaces}
            )

    def _probe_peer(self, connection: ClientConnection, request: ProbePeer) -> None:
        if self._probes >= MAX_PROBES or request.node not in self.cluster.members:
            connection.send(m.Done(request.id, 0))
            return
        self._probes += 1
        self._spawn(self._probe(connection, request))

    async def _probe(self, connection: ClientConnection, request: ProbePeer) -> None:
        try:
            outcome = await self.anti_entropy.ping(request.node, 0.8 * self.timing.indirect_timeout_s)
            connection.send(m.Done(request.id, int(outcome == "answered")))
        finally:
            self._probes -= 1

    # --- talking to others

    def _feed(self, event: d.Event) -> None:
        if self._detector is None:
            return
        for action in self._detector.handle(event, asyncio.get_running_loop().time()):
            match action:
                case d.Ping(node):
                    self._spawn(self._ping(node))
                case d.Ask(helper, node):
                    self._spawn(self._ask(helper, node))
                case d.Sync(node):
                    self.anti_entropy.tell(node, {})
                case d.Dead(node, version):
                    logger.warning(
                        "node %s: node %s cannot be reached: it is taken for dead", self.name, node
                    )
                    self.apply(self.cluster.declare_dead(node, version))

    async def _run(self) -> None:
        next_sync_s, rounds = 0.0, 0
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self.timing.tick_s)
            self._feed(d.Tick())
            if loop.time() < next_sync_s:
                continue
            next_sync_s = loop.time() + self.timing.sync_interval_s
            rounds += 1
            self.cluster.registry.expire(clock_ms())
            self.apply(self.cluster.tidy(time.time_ns() // 1_000_000))
            self.joining.look_for_seeds()
            if rounds % IDLE_ROUNDS == 0:
                self.links.close_idle()

    def _spawn_sync(self, address: str) -> None:
        self._spawn(self._sync(address))

    async def _sync(self, address: str) -> None:
        try:
            welcome = await self.anti_entropy.exchange(address, self.timing.ping_timeout_s)
            self.joining.name_seed(address, welcome.node)
        except PdserveError as error:
            logger.debug("node %s: peer %s: %s", self.name, address, error)

    async def _ping(self, node: str) -> None:
        outcome = await self.anti_entropy.ping(node, self.timing.ping_timeout_s)
        self._feed(d.PingEnded(node, outcome))

    async def _ask(self, helper: str, node: str) -> None:
        try:
            reply = await self.call(helper, lambda i: ProbePeer(i, node), self.timing.indirect_timeout_s)
        except PdserveError:
            return
        if isinstance(reply, m.Done):
            self._feed(d.Asked(node, helper, reply.count == 1))

    def _spawn(self, work: Coroutine[Any, Any, None], *, vital: bool = False) -> None:
        """`vital`: without it the node would look well to others and notice nothing of them; it ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, vital))

    def _ended(self, vital: bool, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.error("node %s: in talking to other nodes", self.name, exc_info=error)
        if vital:
            text = (
                f"node {self.name} stopped after an unexpected error among its peers, {error!r}: its pages "
                "stay in memory, start it again; its log says where the error was"
            )
            self._fail(NodeFailed(text))
