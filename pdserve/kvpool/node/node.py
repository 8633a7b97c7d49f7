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
import ssl
import traceback
from collections.abc import Callable
from contextlib import AsyncExitStack
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from pdserve.errors import NodeFailed, PdserveError
from pdserve.kvpool.core.events import (
    LOCAL,
    Answer,
    AskOwners,
    AssignSlab,
    CancelTransfers,
    Close,
    CommitRows,
    Disconnected,
    Event,
    FetchPages,
    FreeRows,
    PublishNamespace,
    PushPages,
    Received,
    RecordsLearned,
    ReserveRows,
    SaveNamespaces,
    Settled,
    StartReceive,
    StartSend,
    Tick,
    WatchOwners,
)
from pdserve.kvpool.core.sessions import Session
from pdserve.kvpool.namespaces.tenants import MARK, split
from pdserve.kvpool.node.admission import Admission, Places, rules_of
from pdserve.kvpool.node.bootstrap import make_state, take_memory
from pdserve.kvpool.node.config import PoolNodeConfig
from pdserve.kvpool.node.data_paths import DataPathInfo, DataPaths
from pdserve.kvpool.node.memory.arena import Arena, DescriptorSockets
from pdserve.kvpool.node.metrics.meter import Meter, Series
from pdserve.kvpool.node.peers.gossip import Gossiper, Handler
from pdserve.kvpool.node.peers.joining import Before
from pdserve.kvpool.node.peers.page_fetch import PageFetcher
from pdserve.kvpool.node.peers.page_push import LocalSession, PagePusher
from pdserve.kvpool.node.peers.questions import Dropping, Questions
from pdserve.kvpool.node.peers.rebalancer import Rebalancer
from pdserve.kvpool.node.serving.connection import ClientConnection, Connections
from pdserve.kvpool.node.serving.listeners import Listeners, close_all
from pdserve.kvpool.node.serving.scheduler import Serving
from pdserve.kvpool.node.tiers.node_tiers import NodeTiers
from pdserve.kvpool.node.timers import call_at
from pdserve.kvpool.node.upgrade.handover import Handover
from pdserve.kvpool.node.upgrade.upgrader import Upgrader
from pdserve.kvpool.protocol.cluster_messages import DEAD, NamespaceRecord, Upgrade
from pdserve.kvpool.protocol.messages import (
    Clear,
    DataPathName,
    Discard,
    DropNamespace,
    Erase,
    Fault,
    Hello,
    Reply,
    Request,
    Status,
    StatusReport,
    Welcome,
)
from pdserve.logs import ThrottledLog
from pdserve.security.tls import Certificates

if TYPE_CHECKING:
    from pdserve.kvpool.node.metrics.families import NodeSnapshot

logger = logging.getLogger(__name__)

DROPPING: Final = (Clear, Discard, Erase, DropNamespace)
WARM_UP_POLLS: Final = 100  # half a second
WARM_UP_POLL_S: Final = 0.005


class PoolNode:
    """One node. `serve` takes the memory and runs until stopped."""

    arena: Arena
    _tiers: NodeTiers
    data_paths: DataPaths

    def __init__(self, config: PoolNodeConfig, inherited: Handover | None = None) -> None:
        """`inherited`: from this process's earlier program, after an upgrade."""
        self.config = config
        self.name = config.name
        self.incarnation = secrets.randbits(62) + 1
        self.connections: dict[int, ClientConnection] = {}  # that have shaken hands
        self.all_connections = Connections(config.name)
        self._inherited = inherited
        before = None if inherited is None else Before(inherited.status, inherited.peers)
        self._certificates = Certificates(config.tls)
        self.gossip = Gossiper(config, self._certificates, self.incarnation, self.fail, before)
        self._rules = rules_of(config)
        self.places = Places(config.max_connections, tokens_in_use=bool(self._rules.admin_token))
        self.admission = Admission(
            config,
            self._rules,
            self.incarnation,
            self.places,
            lambda: self.gossip.view,
            lambda key_id: self.state.administration.token_digest(key_id),
        )
        self.upgrader = Upgrader(self)
        self.handover: Handover | None = None  # set: another program is to take this process over
        self._listeners = Listeners({} if inherited is None else inherited.listening)
        self._routes: dict[type, Handler] = {  # requests that are not NodeState's to answer
            **self.gossip.routes(),
            Status: self._status,
            Upgrade: self.upgrader.begin,
        }
        self.sockets = 0  # all
        self.requests_failed = 0  # met a bug, and cost their clients their connections
        self._last_connection = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = 0.0
        self._stopping = asyncio.Event()
        self._lag = Series()
        self._failure: PdserveError | None = None
        self._served = False
        self._clean = False  # it served, and was stopped
        self._stopped = False  # from then on the memory may be another node's: nothing is decided any more

    async def serve(self, on_ready: Callable[[], object] = lambda: None) -> None:
        """Take the memory, listen, call `on_ready`, serve until `stop`. Raises StartupError, ConfigError;
        NodeFailed after a bug.
        """
        self._loop = asyncio.get_running_loop()
        async with AsyncExitStack() as ending:
            self._open_memory(ending)
            self._make_parts(ending)
            await self._open_to_others(ending)
            await self._serve_metrics(ending)
            addresses = ", ".join(self.config.listen)
            logger.info(
                "pool node %s is ready at %s: %d MiB", self.name, addresses, self.config.capacity >> 20
            )
            on_ready()
            await self._stopping.wait()
            if self._failure is not None:
                raise self._failure
            self._clean = True

    def _open_memory(self, ending: AsyncExitStack) -> None:
        inherited = self._inherited
        lock_fd = None if inherited is None else inherited.lock_fd
        self.arena, self._tiers = take_memory(self.config, self.incarnation, lock_fd)
        ending.callback(self._close_arena, fresh=not self.arena.kept)
        ending.callback(self._tiers.stop)

    def _close_arena(self, *, fresh: bool) -> None:
        """A start that failed leaves nothing behind; a node that failed leaves its pages."""
        kept = self.config.keep or not self._clean or self.upgrader.hands_over
        self.arena.close(keep=kept if self._served else not fresh)

    def _make_parts(self, ending: AsyncExitStack) -> None:
        """The node's state with all that the memory holds, and what surrounds it."""
        self.data_paths = DataPaths(
            self.config, self._certificates, self.arena.memory, self.feed, self._data_path_lost
        )
        self.state = make_state(
            self.config, self.incarnation, self.arena, self._tiers, self._rules, self._loop.time()
        )
        self._acts = self._make_acts()
        if self.config.events.address:
            from pdserve.kvpool.node.events import open_feed  # needs an extra

            feed = open_feed(self.config.events, self._loop, self.state)
            self._acts |= feed.acts()
            ending.callback(feed.close)
        ending.callback(self._remove_sockets)
        ending.callback(self.data_paths.stop)
        ending.callback(self._end_timer)
        self._tell_namespaces()
        self.meter = Meter(self.state.store.facts.namespace, self.arena.namespaces)
        self.strangers = ThrottledLog(logger, most=20)
        self.local = LocalSession(self.feed)
        self._make_movers()
        self.serving = Serving(self._loop, self.state, self.feed, self.connections)
        ending.callback(self.serving.close)
        ending.push_async_callback(self.pusher.close)
        ending.push_async_callback(self.fetcher.close)
        ending.push_async_callback(self.questions.close)
        ending.callback(self.local.close)
        self._schedule()

    async def _open_to_others(self, ending: AsyncExitStack) -> None:
        """Join the pool, and listen."""
        ending.callback(DescriptorSockets(self.name, self.arena.directory, self._loop).close)
        ending.push_async_callback(self._dismiss)
        ending.push_async_callback(self._leave_pool)
        ending.callback(self.upgrader.close)
        await self.gossip.join()
        self._tiers.start(self._feed_from_thread)
        await self._warm_up()
        await self._listeners.open(self.config.listen, self._accept)
        self._served = True
        self.gossip.start()
        ucx_was_used = False
        if self._inherited is not None:
            ucx_was_used = self._inherited.ucx
            self.upgrader.on_serving(self._inherited)
        self.data_paths.prepare(ucx_was_used=ucx_was_used)

    async def _warm_up(self) -> None:
        """Wait for the tiers to report their pages, but not long: clients should not miss what is there, and
        a tier that takes minutes must not keep them from what is in memory.
        """
        for _ in range(WARM_UP_POLLS):
            if self.state.tiers.ready:
                return
            await asyncio.sleep(WARM_UP_POLL_S)

    async def _leave_pool(self) -> None:
        self._stopped = True
        await self.gossip.stop(leaving=not self.upgrader.hands_over)

    async def _dismiss(self) -> None:
        """Tell all clients. The next program, if there is one, accepts all later connections."""
        self._listeners.close()
        if self.upgrader.hands_over:
            self.handover = self.upgrader.hand_over()
        fault = self.upgrader.goodbye_fault or Fault(0, "stopping", f"node {self.name} stops")
        await self.all_connections.dismiss(fault)

    def _remove_sockets(self) -> None:
        """Before the memory is let go: afterwards they may be the next node's."""
        if not self.upgrader.hands_over:
            self._listeners.remove()

    def make_handover(self) -> Handover:
        """Copies of all that the next program needs. Raises OSError; then there are none."""
        cluster = self.gossip.cluster
        listening = self._listeners.copies()
        try:
            lock_fd = self.arena.pass_lock()
        except OSError:
            close_all(listening)
            raise
        return Handover(
            pid=os.getpid(),
            lock_fd=lock_fd,
            listening=listening,
            ucx=self.data_paths.ucx.used,
            status=cluster.me.status,
            peers=[member.address for member in cluster.alive() if member.node != self.name],
        )

    async def stop_moving(self) -> None:
        """Exchange no more pages with other nodes."""
        await self.pusher.close()
        await self.fetcher.close()

    def stop(self) -> None:
        """Let `serve` return."""
        self._stopping.set()

    def fail(self, error: PdserveError) -> None:
        """Let `serve` raise the error; the pages stay."""
        self._failure = error
        self.stop()

    # --- events and actions

    def feed(self, event: Event) -> None:
        """Decide and act. An error in that is a bug. Where a request of one client met it before anything
        changed, that client loses its connection. Else what it left half done may not be served, so the node
        stops at once. What the slot table says is right at every instant, so the next start has the pages.
        """
        if self._stopped:
            return
        acts = self._acts
        try:
            for action in self.state.handle(event, self._loop.time()):
                acts[type(action)](action)
            if self.data_paths.queued:
                self.data_paths.flush()
            if self._timer is None or self.state.next_deadline_s < self._timer_at_s:
                self._schedule()
        except Exception as error:  # boundary: of the decisions; ends a connection or the process
            client = self.connections.get(event.connection) if isinstance(event, Received) else None
            if client is not None and isinstance(event, Received) and self.state.unchanged:
                self._give_up(client, event.message, error)
            else:
                self._fail(event, error)

    def _feed_from_thread(self, event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the node has ended
            self._loop.call_soon_threadsafe(self.feed, event)

    def _give_up(self, client: ClientConnection, message: Request, error: Exception) -> None:
        """A client's request met a bug, and changed nothing: the client is closed, the node serves on."""
        self.requests_failed += 1
        what, where = type(message).__name__, traceback.extract_tb(error.__traceback__)[-1]
        logger.error(
            "node %s: %s of connection %d met an unexpected error, %.200r at %s:%d: closing that connection, "
            "all others are served on; report this line",
            self.name,
            what,
            client.number,
            error,
            Path(where.filename).name,
            where.lineno or 0,
        )
        client.close(f"its {what} met an unexpected error")

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
            PublishNamespace: lambda action: self.gossip.publish(action.record),
            StartSend: self.data_paths.perform,
            StartReceive: self.data_paths.perform,
            CancelTransfers: self.data_paths.perform,
            **self._tiers.acts(),
        }

    def _tell_namespaces(self) -> None:
        """Share what this node knows of them, and hear of what the others know."""
        self.gossip.cluster.registry = self.arena.namespaces.registry
        self.gossip.on_namespaces.append(self._learned)

    def _learned(self, records: list[NamespaceRecord]) -> None:
        self.feed(RecordsLearned(records))

    def _make_movers(self) -> None:
        """What moves pages between this node and the others."""
        self.gossip.moves_pages = True
        self.pusher = PagePusher(
            self.config,
            self._certificates,
            self.gossip.cluster,
            self.arena.namespaces,
            self.arena.memory,
            self.local,
            self.feed,
        )
        self.fetcher = PageFetcher(
            self.config,
            self._certificates,
            self.gossip.cluster,
            self.arena.namespaces,
            self.arena.memory,
            self.feed,
        )
        self.questions = Questions(
            self.name,
            self.gossip.hello,
            self._certificates,
            self.gossip.cluster,
            self.arena.namespaces,
            self.local,
            self._reply,
            self.feed,
        )
        links = (self.pusher, self.fetcher)
        rebalancer = Rebalancer(self.config, self.gossip, links, self.feed, self.stop)
        self._routes |= rebalancer.routes()
        self._acts |= {
            PushPages: self.pusher.push,
            FetchPages: self.fetcher.fetch,
            AskOwners: self.questions.ask,
            WatchOwners: self.questions.watch,
            Settled: rebalancer.settled,
        }
        rebalancer.follow()

    def _answer(self, action: Answer) -> None:
        if action.connection == LOCAL:
            self.local.answered(action.message)
            return
        if self.data_paths.queued:
            self.data_paths.flush()
        self.serving.answered(action.connection, action.message)
        self._reply(action.connection, action.message)

    def _reply(self, number: int, message: Reply) -> None:
        connection = self.connections.get(number)
        if connection is not None:
            connection.send(message)

    def _close(self, action: Close) -> None:
        connection = self.connections.get(action.connection)
        if connection is not None:
            connection.close(action.reason)

    def _save_namespaces(self, action: SaveNamespaces) -> None:
        self.arena.save_namespaces(action)
        self._tiers.save_namespaces(action)

    def _schedule(self) -> None:
        self._end_timer()
        if self.state.next_deadline_s != float("inf"):
            self._timer_at_s = self.state.next_deadline_s
            self._timer = call_at(self._loop, self._timer_at_s, self._tick)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = None
        self.feed(Tick())

    # --- metrics

    async def _serve_metrics(self, ending: AsyncExitStack) -> None:
        config = self.config
        if not config.metrics:
            return
        # loading takes a tenth of a second of a processor, and clients are served meanwhile
        module = await asyncio.to_thread(import_module, "pdserve.kvpool.node.metrics.server")
        server = module.MetricsServer(self._snapshot, self._lag, config.metrics_token)
        url = await server.start(config.metrics)
        ending.callback(server.close)
        logger.info("node %s: metrics at %s", self.name, url)

    def _snapshot(self) -> NodeSnapshot:
        from pdserve.kvpool.node.metrics.families import NodeSnapshot

        return NodeSnapshot(
            report=self._report(0),
            series=self.meter.snapshot(),
            namespace_names={namespace.number: namespace.name for namespace in self.arena.namespaces},
            lag=self._lag.copy(),
            sockets=self.sockets,
        )

    # --- clients

    def opened(self, connection: ClientConnection) -> None:
        """A socket was accepted."""
        self.all_connections.add(connection)
        self.sockets += 1
        self.all_connections.drop(
            self.places.accepted(connection.number, connection.address), "too many connections"
        )

    def holds(self, connection: ClientConnection, half_frame_bytes: int) -> None:
        """The client has sent so many bytes of a frame that is not whole."""
        self.all_connections.drop(
            self.places.holds(connection.number, half_frame_bytes), "too much of unfinished frames"
        )

    @property
    def tls(self) -> ssl.SSLContext | None:
        """For clients that come by TCP."""
        return self._certificates.server_context

    def closed(self) -> None:
        """A socket was closed."""
        self.sockets -= 1

    def received(self, connection: ClientConnection, message: Request) -> None:
        """A request of a client that shook hands."""
        try:
            self._serve(connection, message)
        except Exception as error:  # boundary: of one client's request; `feed` has those that change pages
            self._give_up(connection, message, error)

    def _serve(self, connection: ClientConnection, message: Request) -> None:
        route = self._routes.get(type(message))
        if not self.upgrader.admits(message):
            return
        if isinstance(message, Erase):
            message = self._with_away(connection, message)
        if isinstance(message, DROPPING) and self._is_for_all(connection, message):
            route = self._drop_everywhere
        if route is None:
            self.serving.received(connection, message)
        elif not self._stopped:
            fault = self.state.refusal(connection.number, message) or self.upgrader.refusal(message)
            if fault is None:
                route(connection, message)
            else:
                connection.send(fault)

    def _is_for_all(self, connection: ClientConnection, message: Dropping) -> bool:
        """Whether a client wants pages dropped, wherever they are, and there are other nodes."""
        session = self.state.sessions.get(connection.number)
        if session is None or session.peer or not self.state.sharding.ownership.has_others:
            return False
        if isinstance(message, DropNamespace):  # others hear of those of models from this node
            return message.name.startswith(MARK) or bool(split(message.name)[1])
        damaged = isinstance(message, Discard) and message.sequences
        return message.namespace in self.state.namespaces and not damaged

    def _with_away(self, connection: ClientConnection, message: Erase) -> Erase:
        """What a client wants erased, with the nodes that cannot be told of it now."""
        session = self.state.sessions.get(connection.number)
        if session is None or session.peer:
            return replace(message, away=None)
        members = self.gossip.cluster.state.members
        return replace(message, away=[member.node for member in members if member.status == DEAD])

    def _drop_everywhere(self, connection: ClientConnection, message: Dropping) -> None:
        self.questions.drop(connection.number, message)

    def _status(self, connection: ClientConnection, request: Status) -> None:
        session = self.state.sessions.get(connection.number)
        connection.send(self._report(request.id, session))

    def _report(self, request_id: int, asker: Session | None = None) -> StatusReport:
        report = self.state.status(request_id, self._loop.time(), asker)
        counters = {**report.counters, **self.serving.counters()}
        counters["requests_failed"] = self.requests_failed
        report = replace(report, counters=counters)
        return self.gossip.with_members(report)

    def _accept(self) -> ClientConnection:
        self._last_connection += 1
        return ClientConnection(self, self._last_connection)

    def choose_path(self, address: str, hello: Hello) -> DataPathName | Fault:
        """How this client will move pages, or why it cannot be served."""
        return self.upgrader.goodbye_fault or self.admission.choose_path(address, hello)

    def welcome(self, connection: int, path: DataPathName, info: DataPathInfo | None) -> Welcome:
        """The answer to a Hello."""
        arena = None
        if path == "shm":
            session = self.state.sessions.get(connection)
            may_write = session is not None and self.state.administration.may_write(session)
            arena = self.arena.info(may_write=may_write)
        return self.admission.welcome(path, arena, info)

    def _data_path_lost(self, connection: int, reason: str) -> None:
        client = self.connections.get(connection)
        if client is not None:
            client.close(reason)

    def connected(self, connection: ClientConnection, hello: Hello, path: DataPathName) -> None:
        self.connections[connection.number] = connection
        self.places.greeted(connection.number, token=self.admission.shown_token(hello))
        self.feed(self.admission.connected(connection.number, hello, path))

    def disconnected(self, number: int, *, by_peer: bool) -> None:
        self.all_connections.remove(number)
        self.places.closed(number)
        if self.connections.pop(number, None) is not None:
            self.serving.gone(number)
            self.feed(Disconnected(number, by_peer))
        self.data_paths.close(number)
