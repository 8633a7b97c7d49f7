"""The pool node's shell: sockets and timers in, `NodeState`'s actions out. asyncio; one thread.

A connection's bytes become events, each event's actions are carried out at once and in order, before the next
event: there is no `await` between a decision and its effect. What can go wrong with a client (garbage, no
handshake, replies it does not read, too many connections) closes that client's connection with one log line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from pdserve.errors import NodeFailed, PdserveError
from pdserve.kvpool.core.events import (
    LOCAL,
    Answer,
    AskReplicas,
    AssignSlab,
    CancelTransfers,
    Close,
    CommitRows,
    Connected,
    Disconnected,
    EndReplicasAt,
    Event,
    FreeRows,
    NamespacesLearned,
    PublishNamespace,
    Received,
    RecordsForgotten,
    ReserveRows,
    SaveNamespaces,
    StartReceive,
    StartSend,
    Tick,
)
from pdserve.kvpool.core.sessions import Session
from pdserve.kvpool.namespaces.registry import Floors
from pdserve.kvpool.node.admission import is_peer, rules_of
from pdserve.kvpool.node.bootstrap import make_state, take_memory
from pdserve.kvpool.node.config.node import PoolNodeConfig
from pdserve.kvpool.node.loopback import LocalSession
from pdserve.kvpool.node.memory.arena import Arena
from pdserve.kvpool.node.metrics.meter import LoopLag, Meter
from pdserve.kvpool.node.peers.gossip import Gossiper, Handler
from pdserve.kvpool.node.peers.rebalancer import Mover
from pdserve.kvpool.node.serving.connection import ClientConnection, Visitors
from pdserve.kvpool.node.serving.listeners import Listeners, close_all
from pdserve.kvpool.node.serving.scheduler import Serving
from pdserve.kvpool.node.tiers.node_tiers import NodeTiers
from pdserve.kvpool.node.timers import call_at
from pdserve.kvpool.node.ucx.data_path import UcxPath
from pdserve.kvpool.node.upgrade.handover import Handover, Succession
from pdserve.kvpool.node.upgrade.upgrader import Upgrader
from pdserve.kvpool.protocol.address import is_remote
from pdserve.kvpool.protocol.cluster_messages import NamespaceRecord, Upgrade
from pdserve.kvpool.protocol.messages import (
    PROTOCOL_VERSION,
    STAND_IN,
    DataPathName,
    Fault,
    Hello,
    Request,
    Status,
    StatusReport,
    UcxInfo,
    Welcome,
)
from pdserve.kvpool.transports.shm import host_id
from pdserve.tokens import digest

if TYPE_CHECKING:
    from pdserve.kvpool.node.metrics.families import NodeSnapshot
    from pdserve.kvpool.node.metrics.server import MetricsServer

logger = logging.getLogger(__name__)

MAX_UNGREETED = 64  # sockets beyond `max_connections` that may still be shaking hands, or be told no


class PoolNode:
    """One node. `serve` takes the memory and runs until stopped."""

    arena: Arena
    _tiers: NodeTiers
    _ucx: UcxPath

    def __init__(self, config: PoolNodeConfig, succession: Succession | None = None) -> None:
        self.config = config
        self.name = config.name
        self.incarnation = secrets.randbits(62) + 1
        self.host_id = host_id()
        self._rules = rules_of(config)
        self.connections: dict[int, ClientConnection] = {}  # those that shook hands
        self._inherited = succession.handover if succession is not None else None
        self.gossip = Gossiper(config, self.incarnation, self.connections, self.fail, self._inherited)
        self.visitors = Visitors()
        self._upgrader = Upgrader(self, succession)
        self.handover: Handover | None = None  # once set, another program is to take this process over
        self.listeners = Listeners(self._inherited)
        self._routes: dict[type, Handler] = {  # requests that are not NodeState's to answer
            **self.gossip.routes(),
            Status: self._status,
            Upgrade: self._upgrader.begin,
        }
        self.sockets = 0  # all
        self._last_connection = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = 0.0
        self._stopping = asyncio.Event()
        self._metrics: MetricsServer | None = None
        self._lag = LoopLag()
        self._failure: PdserveError | None = None
        self._stopped = False  # from then on the memory may be another node's: nothing is decided any more

    async def serve(self, on_ready: Callable[[], object] = lambda: None) -> None:
        """Take the memory, listen, call `on_ready`, serve until `stop`. Raises StartupError, ConfigError;
        NodeFailed after a bug.
        """
        self._loop = asyncio.get_running_loop()
        self.arena, self._tiers = take_memory(self.config, self.incarnation, self._inherited)
        fresh = self.arena.contents is None
        self._ucx = UcxPath(self.config, self.arena.memory, self.feed, self._ucx_lost)
        clean = served = False
        try:
            self.state = make_state(
                self.config, self.incarnation, self.arena, self._tiers, self._rules, self._loop.time()
            )
            self._tell_namespaces()
            self._acts = self._make_acts()
            self.meter = Meter(self.state.store.facts.namespace, self.arena.namespaces)
            self.local = LocalSession(self.feed)
            self.mover = self._make_mover()
            self.serving = Serving(self._loop, self.state, self.feed, self.connections)
            self._schedule()
            await self.gossip.join()
            await self.listeners.open(self.config.listen, self._accept)
            served = True
            self._tiers.start(self._feed_from_thread)
            self.gossip.start()
            self._upgrader.took_over()
            self._serve_metrics()
            if self.config.ucx.enabled:
                self._ucx.prepare(remote=any(is_remote(address) for address in self.config.listen))
            addresses = ", ".join(self.config.listen)
            logger.info(
                "pool node %s is ready at %s: %d MiB", self.config.name, addresses, self.config.capacity >> 20
            )
            on_ready()
            await self._stopping.wait()
            if self._failure is not None:
                raise self._failure
            clean = True
        finally:
            self._stopped = True
            passing_on = self._upgrader.since_s is not None
            await self.gossip.stop(leaving=not passing_on)
            if self._metrics is not None:
                self._metrics.close()
            if not passing_on:
                self.listeners.close()
            await self.visitors.dismiss(
                self._upgrader.farewell or Fault(0, "stopping", f"node {self.name} stops")
            )
            if served:
                self.local.close()
                await self.mover.close()
                self.serving.close()
            if self._timer is not None:
                self._timer.cancel()
            self._ucx.stop()
            if not passing_on:
                self.listeners.remove()  # before the memory is let go: afterwards they may be the next node's
            self._tiers.stop()
            # a start that failed leaves nothing behind; a node that failed leaves its pages
            kept = self.config.keep or not clean or passing_on
            self.arena.close(keep=kept if served else not fresh)
            if passing_on:
                self.handover = await self._upgrader.pass_on()

    def passed_on(self) -> Handover:
        """Copies of all that the next program needs. Raises OSError; then there are none."""
        cluster = self.gossip.cluster
        listening = self.listeners.hand_over()
        try:
            lock_fd = self.arena.pass_lock()
        except OSError:
            close_all(listening)
            raise
        return Handover(
            pid=os.getpid(),
            lock_fd=lock_fd,
            listening=listening,
            ucx=self._ucx.server is not None,
            status=cluster.me.status,
            peers=[member.address for member in cluster.alive() if member.node != self.name],
        )

    def stop(self) -> None:
        """Let `serve` return."""
        self._stopping.set()

    def fail(self, error: PdserveError) -> None:
        """Let `serve` raise the error; the pages stay."""
        self._failure = error
        self.stop()

    # --- events and actions

    def feed(self, event: Event) -> None:
        """Decide and act. An error in that is a bug: what it left half done may not be served, so the node
        stops at once. What the slot table says is right at every instant, so the next start has the pages.
        """
        if self._stopped:
            return
        acts = self._acts
        try:
            for action in self.state.handle(event, self._loop.time()):
                acts[type(action)](action)
            if self._timer is None or self.state.next_deadline_s < self._timer_at_s:
                self._schedule()
        except Exception as error:  # boundary: of the decisions; ends the process
            self._fail(event, error)

    def _feed_from_thread(self, event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is there to be told
            self._loop.call_soon_threadsafe(self.feed, event)

    def _fail(self, event: Event, error: Exception) -> None:
        message = (
            f"node {self.name} stopped after an unexpected error, {error!r}: its pages stay in memory, start "
            "it again; its log says where the error was"
        )
        self.fail(NodeFailed(message))
        self._stopped = True
        what = type(event.message).__name__ if isinstance(event, Received) else type(event).__name__
        logger.critical(
            "node %s: stopping at once: unexpected error while handling %s", self.name, what, exc_info=error
        )

    def _make_acts(self) -> dict[type, Callable[[Any], None]]:
        """What carries out each kind of action. A table, because a page costs several actions."""
        return {
            Answer: self._answer,
            Close: self._close,
            ReserveRows: self.arena.reserve_rows,
            CommitRows: self.arena.commit_rows,
            FreeRows: self.arena.free_rows,
            AssignSlab: self.arena.assign_slab,
            SaveNamespaces: self._save_namespaces,
            PublishNamespace: self._publish,
            StartSend: self._transfer,
            StartReceive: self._transfer,
            CancelTransfers: self._transfer,
            **self._tiers.acts(),
        }

    def _publish(self, action: PublishNamespace) -> None:
        self.gossip.publish(action.record)

    def _tell_namespaces(self) -> None:
        """What this node knows of them; and hear of what the others know."""
        registry = self.arena.namespaces.registry
        self.gossip.apply(self.gossip.cluster.raise_floors(registry.floors))
        for record in registry:
            self.gossip.publish(record)
        self.gossip.on_forgotten.append(self._forgot)
        self.gossip.on_namespaces.append(self._learned)

    def _forgot(self, names: list[str], floors: Floors) -> None:
        self.feed(RecordsForgotten(names, floors))

    def _learned(self, records: list[NamespaceRecord]) -> None:
        self.feed(NamespacesLearned(records))

    def _make_mover(self) -> Mover:
        self.gossip.moves_pages = True
        store = self.state.store
        mover = Mover(
            self.config,
            self.gossip,
            self.arena.memory,
            self.local,
            self.arena.namespaces,
            lambda: store.free_bytes + self.state.tiers.free_bytes,
            lambda: self.state.tiers.behind,
            self.feed,
            self.stop,
        )
        self._routes |= mover.routes()
        self._acts |= {AskReplicas: mover.ask_replicas, EndReplicasAt: mover.end_replicas}
        mover.start()
        return mover

    def _answer(self, action: Answer) -> None:
        if action.connection == LOCAL:
            self.local.answered(action.message)
            return
        message = self.serving.answered(action.connection, action.message)
        connection = self.connections.get(action.connection)
        if connection is not None and message is not None:
            connection.send(message)

    def _close(self, action: Close) -> None:
        connection = self.connections.get(action.connection)
        if connection is not None:
            connection.close(action.reason)

    def _save_namespaces(self, action: SaveNamespaces) -> None:
        self.arena.save_namespaces(action)
        self._tiers.save_namespaces(action)

    def _transfer(self, action: StartSend | StartReceive | CancelTransfers) -> None:
        self._ucx.perform(action)

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.state.next_deadline_s != float("inf"):
            self._timer_at_s = self.state.next_deadline_s
            self._timer = call_at(self._loop, self._timer_at_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.feed(Tick())

    # --- metrics

    def _serve_metrics(self) -> None:
        config = self.config
        if not config.metrics:
            return
        # a tenth of a second that others need not wait for
        from pdserve.kvpool.node.metrics.server import MetricsServer

        self._metrics = MetricsServer(
            config.metrics, self._loop, self._snapshot, self._lag, config.metrics_namespaces
        )
        logger.info("node %s: metrics at %s", self.name, self._metrics.url)

    def _snapshot(self) -> NodeSnapshot:
        from pdserve.kvpool.node.metrics.families import NodeSnapshot

        return NodeSnapshot(
            report=self._report(0),
            series=self.meter.snapshot(),
            namespace_names={namespace.number: namespace.name for namespace in self.arena.namespaces},
            lag=self._lag.series.copy(),
            sockets=self.sockets,
        )

    # --- clients

    def opened(self, connection: ClientConnection) -> bool:
        """A socket came; False when there are too many."""
        self.visitors.came(connection)
        self.sockets += 1
        return self.sockets <= self.config.max_connections + MAX_UNGREETED

    def closed(self) -> None:
        """A socket went."""
        self.sockets -= 1

    def received(self, connection: ClientConnection, message: Request) -> None:
        """A request of a client that shook hands."""
        route = self._routes.get(type(message))
        if not self._upgrader.admits(message):
            return
        if route is None:
            self.serving.received(connection, message)
        elif not self._stopped:
            fault = self.state.refusal(connection.number, message) or self._upgrader.refusal(message)
            if fault is None:
                route(connection, message)
            else:
                connection.send(fault)

    def _status(self, connection: ClientConnection, request: Status) -> None:
        session = self.state.sessions.get(connection.number)
        connection.send(self._report(request.id, session))

    def _report(self, request_id: int, asker: Session | None = None) -> StatusReport:
        report = self.state.status(request_id, self._loop.time(), asker)
        counters = {**report.counters, **self.mover.counters(), **self.serving.counters()}
        if self._upgrader.stands_in:
            counters[STAND_IN] = 1
        report = replace(report, counters=counters)
        return self.gossip.with_members(report)

    def _accept(self) -> ClientConnection:
        self._last_connection += 1
        return ClientConnection(self, self._last_connection)

    def choose_path(self, hello: Hello) -> DataPathName | Fault | None:
        """How this client will move pages, or why it cannot be served. None: it will be told in a moment."""
        if self._upgrader.at_door:
            return None
        if self._upgrader.farewell is not None:
            return self._upgrader.farewell
        if hello.version != PROTOCOL_VERSION:
            message = (
                f"node {self.config.name} speaks version {PROTOCOL_VERSION} of the pool protocol, client "
                f"{hello.client} version {hello.version}: upgrade the older one"
            )
            return Fault(0, "protocol_version", message)
        refused = self.gossip.refuse(hello)
        if refused is not None:
            return refused
        limit = self.config.max_connections
        if len(self.connections) >= limit and not hello.node:
            return Fault(0, "too_many_connections", f"the node holds {limit} connections already")
        if hello.data_path == "none":
            return "none"
        if hello.data_path in ("auto", "shm") and hello.host_id == self.host_id:
            return "shm"  # the client finds out itself whether the files it maps are ours
        if hello.data_path == "shm":
            message = (
                f"client {hello.client} cannot map the memory of node {self.config.name}: it is on another "
                "host, or in another container; use data_path = 'ucx'"
            )
            return Fault(0, "data_path", message)
        if hello.data_path in ("auto", "ucx"):
            if self.config.ucx.enabled:
                return "ucx"
            message = f"node {self.config.name} has UCX off, which client {hello.client} needs"
            return Fault(0, "data_path", message)
        return Fault(0, "data_path", f"{hello.data_path} does not go over a socket")

    def welcome(self, path: DataPathName, ucx: UcxInfo | None) -> Welcome:
        """The answer to a Hello."""
        view = self.gossip.view
        return Welcome(
            version=PROTOCOL_VERSION,
            node=self.config.name,
            incarnation=self.incarnation,
            host_id=self.host_id,
            data_path=path,
            lease_s=self.config.lease_s,
            arena=self.arena.info if path == "shm" else None,
            ucx=ucx,
            epoch=view.epoch,
            nodes=view.nodes,
            previous=view.previous,
        )

    async def open_ucx(self, connection: int, hello: Hello) -> UcxInfo | Fault:
        """Make ready for a client's endpoint. `close_ucx` undoes it."""
        return await self._ucx.open(connection, hello)

    def close_ucx(self, connection: int) -> None:
        self._ucx.close(connection)

    def _ucx_lost(self, connection: int, reason: str) -> None:
        client = self.connections.get(connection)
        if client is not None:
            client.close(reason)

    def connected(self, connection: ClientConnection, hello: Hello, path: DataPathName) -> None:
        self.connections[connection.number] = connection
        peer, token = is_peer(hello, self.config, self._rules), digest(hello.token)
        self.feed(Connected(connection.number, path, hello.client, hello.pid, peer, token))

    def disconnected(self, number: int, *, by_peer: bool) -> None:
        self.visitors.went(number)
        if self.connections.pop(number, None) is not None:
            self.serving.gone(number)
            self.feed(Disconnected(number, by_peer))
        self.close_ucx(number)
