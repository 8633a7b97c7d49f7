"""The thread that drives all UCX workers of a node: it alone touches UCX, and slots over UCX.

    loop's thread      give(call)        what is to be done: open, perform, close
    this thread        tell(calls)       what has happened, to be called on the loop's thread

Every connection has its own UCX worker and listener (reasons: `transports/ucx.py`). The client proves that an
endpoint is its own: its first message is the random number from Welcome. The node sends it back.

There is no busy polling: the thread sleeps until its inbox or a worker's descriptor has something.
Connections with something to do take turns of `STEPS` steps of UCX each. At most `WINDOW_BYTES` of a
connection's sends are given to UCX at a time, because one step may hand them all to the kernel.

After TransferDone UCX does not touch the slot any more. Sends, and receives that a message has matched,
cannot be cancelled: after CancelTransfers they continue until they end. If that takes too long, the
connection ends: its worker is destroyed, and the client finds its endpoint closed and connects again.

A message without a receive would stay in UCX's memory, whatever its size. If it is the page of a cancelled
receive, it is received and dropped. Any other message larger than a greeting ends the connection.
"""

from __future__ import annotations

import logging
import secrets
import select
import time
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import numpy as np

from pdserve.errors import PdserveError, PoolUnavailable, StartupError
from pdserve.kvpool.core.events import CancelTransfers, StartReceive, StartSend, TransferDone
from pdserve.kvpool.node.inbox import Inbox
from pdserve.kvpool.protocol.messages import UcxInfo
from pdserve.kvpool.protocol.page_bytes import Bytes1D
from pdserve.kvpool.transports.ucx import GREETED_TAG, GREETING_BYTES, Operation, UcxLibrary, UcxLink

logger = logging.getLogger(__name__)

Transfer: TypeAlias = StartSend | StartReceive

STEPS: Final = 16  # of one connection, before the next one's
WINDOW_BYTES: Final = 2 * 1024 * 1024  # plus one page
GREETING_TIMEOUT_S: Final = 5.0
SWEEP_S: Final = 1.0  # interval of checks for UCX's keepalive and our deadlines, which need no event
LATE_TAGS: Final = 4096  # tags kept for each connection; HiCache writes fewer at a time
PORTS: Final = 64  # number of ports tried from a configured port upwards


class _Running:
    """One transfer in progress. `operations`: not known to be completed, last segment first."""

    __slots__ = ("action", "cancelled_s", "ok", "operations", "started_s")

    def __init__(self, action: Transfer, started_s: float) -> None:
        self.action = action
        self.operations: list[Operation] = []
        self.started_s = started_s
        self.ok = True
        self.cancelled_s: float | None = None

    def ended(self) -> bool:
        """True if all segments are completed. Sets `ok` to False if one failed."""
        while self.operations and self.operations[-1].completed:
            self.ok = self.operations.pop().ok and self.ok
        return not self.operations


class Peer:
    """One client's UCX connection."""

    def __init__(self, connection: int, link: UcxLink, now_s: float) -> None:
        self.connection = connection
        self.link = link
        self.opened_s = now_s
        self.number = secrets.randbits(63)
        self.greeting = np.zeros(GREETING_BYTES, np.uint8)
        self.greeting_operations: list[Operation] = [link.receive_greeting(self.greeting)]
        self.greeted = False
        self.running: dict[int, _Running] = {}  # by tag, oldest first
        self.waiting: dict[int, StartSend] = {}  # sends that have not begun, by tag
        self.sending_bytes = 0  # bytes of the sends in `running`
        self.late: dict[int, int] = {}  # tag -> length of a message whose receive was cancelled
        self.discards: list[Operation] = []  # receives of such messages

    def may_send(self) -> bool:
        """Whether a send is waiting and the window has room."""
        return bool(self.waiting) and self.sending_bytes < WINDOW_BYTES


class UcxWorker:
    """All UCX connections of a node. `run` is the thread; only `give` and `stop` are called by others."""

    def __init__(
        self,
        arena: Bytes1D,
        tell: Callable[[list[TransferDone], list[tuple[int, str]]], None],
        *,
        port: int = 0,
        options: Mapping[str, str] | None = None,
        stall_timeout_s: float = 30.0,
    ) -> None:
        """`tell(done, lost)` is called from the thread: transfers that ended, once each, and connections that
        failed, with the reason. See UcxServer for the others.
        """
        self._arena = arena
        self._tell = tell
        self._port = port
        self._options = dict(options or {})
        self._stall_timeout_s = stall_timeout_s
        self._library: UcxLibrary | None = None
        self._inbox = Inbox[Callable[[], None]]()
        self.give = self._inbox.give
        """Have the thread call `open`, `perform` or `close`. False: it has ended."""
        self.stop = self._inbox.stop
        """Let `run` end soon. Idempotent."""
        self._poller = select.epoll()
        self._poller.register(self._inbox.fileno(), select.EPOLLIN)
        self._peers: dict[int, Peer] = {}
        self._by_descriptor: dict[int, Peer] = {}
        self._ready: dict[Peer, None] = {}  # to be driven, in order
        self._sweep_at_s = 0.0
        self._done: list[TransferDone] = []  # not told yet
        self._lost: list[tuple[int, str]] = []

    def run(self, loaded: Callable[[PdserveError | None], None]) -> None:
        """Load UCX, call `loaded`, with what went wrong if anything did, and drive all connections until
        `stop`. Every transfer has been reported when this returns, and UCX touches no slot any more.
        """
        try:
            self._library = UcxLibrary()
            self._library.context(self._options)  # fails now if UCX refuses the settings
            loaded(None)
            while not self._inbox.stopping:
                self.step()
        except StartupError as error:
            loaded(error)
        finally:
            self._end_all()

    def step(self, patience_s: float = SWEEP_S) -> None:
        """One turn of every connection that has something to do; then wait, until one has, or so long."""
        self._take()
        for peer in list(self._ready):
            self.drive(peer)
        now_s = time.monotonic()
        if now_s >= self._sweep_at_s:
            self._sweep(now_s)
        self._report()
        waits_s = 0.0 if self._ready else min(patience_s, max(0.0, self._sweep_at_s - now_s))
        for descriptor, _ in self._poller.poll(waits_s):
            found = self._by_descriptor.get(descriptor)
            if found is not None:
                self._ready[found] = None

    def _take(self) -> None:
        for call in self._inbox.take():
            call()

    def _end_all(self) -> None:
        calls = self._inbox.end()
        for peer in list(self._peers.values()):
            self._lose(peer, "the node stops")
        for call in calls:  # without a connection they are refused
            call()
        self._report()
        self._poller.close()

    def _report(self) -> None:
        if self._done or self._lost:
            done, lost, self._done, self._lost = self._done, self._lost, [], []
            self._tell(done, lost)

    # --- what is asked for, by `give`

    def open(self, connection: int, opened: Callable[[UcxInfo | PdserveError], None]) -> None:
        """Prepare for one client; `opened` is called, from this thread, with the outcome."""
        try:
            if self._inbox.ended or self._inbox.stopping:
                raise PoolUnavailable("the node stops")
            peer, port = self._make_peer(connection)
        except PdserveError as error:
            opened(error)
            return
        self.add(peer)
        opened(UcxInfo(host="", port=port, connection=peer.number))

    def add(self, peer: Peer) -> None:
        """Drive this connection from now on."""
        self._peers[peer.connection] = peer
        self._by_descriptor[peer.link.epoll_fd] = peer
        self._poller.register(peer.link.epoll_fd, select.EPOLLIN)
        self._ready[peer] = None

    def close(self, connection: int) -> None:
        """End the transfers of a client that disconnected or will be disconnected. Idempotent."""
        peer = self._peers.get(connection)
        if peer is not None:
            self._end(peer)

    def perform(self, action: Transfer | CancelTransfers) -> None:
        """Carry out one action of NodeState."""
        peer = self._peers.get(action.connection)
        if isinstance(action, CancelTransfers):
            if peer is not None:
                self._cancel(peer, action.tags)
        elif peer is None:
            self._note(action, False)
        elif isinstance(action, StartReceive):
            self._begin(peer, action)
        else:
            peer.waiting[action.tag] = action
            self._ready[peer] = None

    def _make_peer(self, connection: int) -> tuple[Peer, int]:
        """A worker and its listening port. It has its own context: see `transports/ucx.py`."""
        assert self._library is not None
        try:
            link = UcxLink(self._library, self._library.context(self._options))
        except StartupError as error:
            raise PoolUnavailable(str(error)) from error
        try:
            return Peer(connection, link, time.monotonic()), self._listen(link)
        except PoolUnavailable:
            link.destroy([])
            raise

    def _listen(self, link: UcxLink) -> int:
        if self._port == 0:
            return link.listen(0)
        for port in range(self._port, self._port + PORTS):
            try:
                return link.listen(port)
            except PoolUnavailable:
                continue
        last = self._port + PORTS - 1
        raise PoolUnavailable(f"no free UCX port from {self._port} to {last}: one is needed per connection")

    # --- transfers

    def _begin(self, peer: Peer, action: Transfer) -> None:
        sends = isinstance(action, StartSend)
        begin = peer.link.send if sends else peer.link.receive
        if sends:
            peer.sending_bytes += sum(action.segment_bytes)
        running = peer.running[action.tag] = _Running(action, time.monotonic())
        start = action.offset
        try:
            if not peer.greeted:
                raise PoolUnavailable("transfer before the greeting")
            for i, length in enumerate(action.segment_bytes):
                running.operations.append(begin(self._arena[start : start + length], action.tag + i))
                start += length
        except PoolUnavailable as error:
            self._lose(peer, str(error))
            return
        running.operations.reverse()
        self._ready[peer] = None

    def _cancel(self, peer: Peer, tags: tuple[int, ...]) -> None:
        now_s = time.monotonic()
        for tag in [tag for tag in tags if tag in peer.waiting]:
            self._note(peer.waiting.pop(tag), False)
        try:
            for running in [peer.running[tag] for tag in tags if tag in peer.running]:
                running.cancelled_s = now_s
                if isinstance(running.action, StartReceive):
                    segments = len(running.action.segment_bytes)
                    for i in range(segments - len(running.operations), segments):
                        peer.link.complete_unmatched(running.action.tag + i)
                        peer.late[running.action.tag + i] = running.action.segment_bytes[i]
        except PoolUnavailable as error:
            self._lose(peer, str(error))
            return
        self._ready[peer] = None

    def _collect(self, peer: Peer, *, thorough: bool) -> bool:
        """Note ended transfers, from the oldest up to the first that has not ended; `thorough`: all.

        A failed transfer ends the connection, because its other segments may never end. Then it returns
        False.
        """
        ended = []
        for tag, running in peer.running.items():
            if running.ended():
                ended.append(tag)
            if not running.ok:
                self._lose(peer, "a transfer failed")
                return False
            if running.operations and not thorough:
                break
        for tag in ended:
            running = peer.running.pop(tag)
            if isinstance(running.action, StartSend):
                peer.sending_bytes -= sum(running.action.segment_bytes)
            self._note(running.action, running.cancelled_s is None)
        return True

    def _note(self, action: Transfer, ok: bool) -> None:
        self._done.append(TransferDone(action.connection, action.tag, ok))

    # --- progress

    def drive(self, peer: Peer) -> None:
        """One turn of a connection: it leaves `_ready` where its descriptor will tell of what comes next."""
        self._ready.pop(peer, None)
        if self._peers.get(peer.connection) is not peer:
            return  # it ended in this turn
        try:
            steps = 0
            while steps < STEPS and peer.link.progress():
                steps += 1
            more = steps == STEPS
            if peer.link.accept() and not peer.greeted:
                self._greet(peer)
            if peer.link.unexpected() is not None:
                self._take()  # its grant may be as young as that
                if self._peers.get(peer.connection) is not peer:
                    return
            _discard_late(peer)
            if not self._collect(peer, thorough=not more):
                return
            while peer.may_send():
                self._begin(peer, peer.waiting.pop(next(iter(peer.waiting))))
                more = True
            if self._peers.get(peer.connection) is not peer:
                return  # the start of a transfer failed and ended the connection
            if not peer.link.alive:
                self._lose(peer, "the client's endpoint closed")
            elif more or not peer.link.arm():
                self._ready[peer] = None
        except PoolUnavailable as error:
            self._lose(peer, str(error))

    def _greet(self, peer: Peer) -> None:
        if not peer.greeting_operations[0].completed:
            return
        if int.from_bytes(peer.greeting.tobytes(), "little") != peer.number:
            raise PoolUnavailable("the UCX greeting is not this client's")
        peer.greeted = True
        peer.greeting_operations.append(peer.link.send(peer.greeting, GREETED_TAG))

    def _sweep(self, now_s: float) -> None:
        self._sweep_at_s = now_s + SWEEP_S
        for peer in list(self._peers.values()):
            self.drive(peer)  # before the deadline check: the node itself may have been late
            reason = self._overdue(peer, now_s)
            if reason and self._peers.get(peer.connection) is peer:
                self._lose(peer, reason)

    def _overdue(self, peer: Peer, now_s: float) -> str:
        """The reason why the connection must end now. Empty: it may continue."""
        if not peer.greeted and now_s - peer.opened_s > GREETING_TIMEOUT_S:
            return "no UCX greeting came"
        for running in peer.running.values():
            is_send = isinstance(running.action, StartSend)
            since_s = running.started_s if is_send else running.cancelled_s
            if since_s is not None and now_s - since_s > self._stall_timeout_s:
                what = "took no pages" if is_send else "has not finished sending a page given up"
                return f"the client {what} for {self._stall_timeout_s:.0f} s"
        return ""

    # --- ending

    def _lose(self, peer: Peer, reason: str) -> None:
        logger.info("connection %d: UCX: %s", peer.connection, reason)
        self._end(peer)
        self._lost.append((peer.connection, reason))

    def _end(self, peer: Peer) -> None:
        """Destroy the worker, then note every transfer in progress as failed."""
        if self._peers.get(peer.connection) is not peer:
            return
        del self._peers[peer.connection], self._by_descriptor[peer.link.epoll_fd]
        self._ready.pop(peer, None)
        self._poller.unregister(peer.link.epoll_fd)
        operations = [operation for running in peer.running.values() for operation in running.operations]
        operations += peer.greeting_operations + peer.discards
        peer.greeting_operations.clear()
        peer.discards.clear()
        for running in peer.running.values():
            running.operations.clear()
        peer.link.destroy(operations)
        for action in (*(running.action for running in peer.running.values()), *peer.waiting.values()):
            self._note(action, False)
        peer.running.clear()
        peer.waiting.clear()


def _discard_late(peer: Peer) -> None:
    """Receive and drop messages of cancelled receives. Raises PoolUnavailable for any other message."""
    peer.discards[:] = [operation for operation in peer.discards if not operation.completed]
    while (found := peer.link.unexpected()) is not None:
        tag, length = found
        if length > max(peer.late.pop(tag, 0), GREETING_BYTES):  # a greeting of another client is harmless
            raise PoolUnavailable("the client sent a message that the node did not ask for")
        peer.discards.append(peer.link.receive(np.empty(length, np.uint8), tag))
    while len(peer.late) > LATE_TAGS:
        del peer.late[next(iter(peer.late))]
