"""The node's end of the UCX data path: carries out StartSend, StartReceive and CancelTransfers.

    node.py       open(connection) -> UcxInfo, sent in Welcome     close(connection) when control is gone
                  perform(action)                                  on_done(TransferDone), on_lost(connection)

Every connection has its own worker and listener (reasons: `transports/ucx.py`). The client proves that an
endpoint is its own: its first message is the random number from Welcome. The node sends it back.

There is no busy polling: the event loop watches each worker's descriptor. `_pump` makes progress and begins
waiting sends. Then it arms the worker, or asks for another turn. A *turn* is one round of the event loop. UCX
gets `TURN_S` of it, shared by its connections in rotation: handing a page to the kernel copies it, so a
client that reads many MiB would delay all others.

At most `WINDOW_BYTES` of a connection's sends are given to UCX at a time, because one step of UCX may send
them all. The limit is `SHARED_WINDOW_BYTES` while several connections move pages. Over loopback this makes
one connection's reads of 1 MiB pages 15 % slower, and a quiet neighbour's p99 falls by a quarter.

A thread loads UCX (0.6 s) and makes workers (a few ms). Afterwards only the loop's thread uses them.

After TransferDone UCX does not touch the slot any more. Sends, and receives that a message has matched,
cannot be cancelled: after CancelTransfers they continue until they end. If that takes too long, the
connection ends: the worker is destroyed, and the client finds its endpoint closed and connects again.

A message without a receive would stay in UCX's memory, whatever its size. If it is the page of a cancelled
receive, it is received and dropped. Any other message larger than a greeting ends the connection.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeAlias

import numpy as np

from pdserve.errors import PoolUnavailable, StartupError
from pdserve.kvpool.core.events import CancelTransfers, StartReceive, StartSend, TransferDone
from pdserve.kvpool.protocol.messages import UcxInfo
from pdserve.kvpool.protocol.page_bytes import Bytes1D
from pdserve.kvpool.transports.page_residency import populate_in_background
from pdserve.kvpool.transports.ucx import GREETED_TAG, GREETING_BYTES, Operation, UcxLibrary, UcxLink

logger = logging.getLogger(__name__)

Transfer: TypeAlias = StartSend | StartReceive

TURN_S: Final = 100e-6  # about a page of 256 KiB over TCP; then control messages are served
WINDOW_BYTES: Final = 4 * 1024 * 1024  # plus one page
SHARED_WINDOW_BYTES: Final = 512 * 1024  # plus one page
GREETING_TIMEOUT_S: Final = 5.0
SWEEP_S: Final = 1.0  # interval of checks for UCX's keepalive and our deadlines, which need no event
LATE_TAGS: Final = 4096  # tags kept for each connection; HiCache writes fewer at a time
PORTS: Final = 64  # number of ports tried from a configured port upwards


class _Running:
    """One transfer in progress. `operations`: not known to be completed, last segment first."""

    __slots__ = ("action", "cancelled_s", "ok", "operations", "started_s")

    def __init__(self, action: Transfer, operations: list[Operation], started_s: float) -> None:
        self.action = action
        self.operations = operations
        self.started_s = started_s
        self.ok = True
        self.cancelled_s: float | None = None

    def ended(self) -> bool:
        """True if all segments are completed. Sets `ok` to False if one failed."""
        while self.operations and self.operations[-1].completed:
            self.ok = self.operations.pop().ok and self.ok
        return not self.operations


class _Peer:
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
        self.turn_asked = False
        self.active = False  # it began a transfer since the last sweep

    def may_send(self, window_bytes: int) -> bool:
        """Whether a send is waiting and the window has room."""
        return bool(self.waiting) and self.sending_bytes < window_bytes


class UcxServer:
    """All UCX connections of a node. Every method is called on the event loop's thread."""

    def __init__(
        self,
        arena: Bytes1D,
        on_done: Callable[[TransferDone], None],
        on_lost: Callable[[int, str], None],
        *,
        port: int = 0,
        options: Mapping[str, str] | None = None,
        stall_timeout_s: float = 30.0,
    ) -> None:
        """The arguments:

        - `on_done`: called once per StartSend and StartReceive, from the loop and never within `perform`.
        - `on_lost(connection, reason)`: the UCX connection failed; the control connection should be closed.
        - `port`: first of the ports to listen on (0: any).
        - `stall_timeout_s`: a send, or a cancelled receive, that takes longer ends its connection.
        """
        self._arena = arena
        self._on_done = on_done
        self._on_lost = on_lost
        self._port = port
        self._options = dict(options or {})
        self._stall_timeout_s = stall_timeout_s
        self._peers: dict[int, _Peer] = {}
        self._window_bytes = WINDOW_BYTES
        self._library: UcxLibrary | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._turn: asyncio.Handle | None = None  # handle of the next turn
        self._turn_ends_s = 0.0
        self._asking: deque[_Peer] = deque()  # connections that need a turn, in order
        self._opener = ThreadPoolExecutor(1, "pdserve-ucx")
        self._stopped = False

    async def start(self) -> None:
        """Load UCX. Raises StartupError."""
        loop = asyncio.get_running_loop()
        self._library = await loop.run_in_executor(self._opener, self._load)
        self._loop = loop
        self._sweeper = loop.call_later(SWEEP_S, self._sweep)
        populate_in_background(self._arena)

    def _load(self) -> UcxLibrary:
        library = UcxLibrary()
        library.context(self._options)  # fails now if UCX refuses the settings
        return library

    def stop(self) -> None:
        """End all connections. Idempotent."""
        self._stopped = True
        self._opener.shutdown(wait=False, cancel_futures=True)
        for handle in (self._sweeper, self._turn):
            if handle is not None:
                handle.cancel()
        for connection in list(self._peers):
            self.close(connection)

    async def open(self, connection: int) -> UcxInfo:
        """Prepare for one client, after `start`. Raises PoolUnavailable (no free port, no descriptors)."""
        assert self._loop is not None
        if self._stopped:
            raise PoolUnavailable("the node stops")
        link, port = await self._loop.run_in_executor(self._opener, self._make_link)
        if self._stopped:
            link.destroy([])
            raise PoolUnavailable("the node stops")
        peer = _Peer(connection, link, time.monotonic())
        self._peers[connection] = peer
        self._loop.add_reader(link.epoll_fd, self._readable, peer)
        self._ask_turn(peer)
        return UcxInfo(host="", port=port, connection=peer.number)

    def _make_link(self) -> tuple[UcxLink, int]:
        """A worker and its listening port. It has its own context: two threads may not share one in UCXX."""
        assert self._library is not None
        try:
            link = UcxLink(self._library, self._library.context(self._options))
        except StartupError as error:
            raise PoolUnavailable(str(error)) from error
        try:
            return link, self._listen(link)
        except PoolUnavailable:
            link.destroy([])
            raise

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
            self._report(action, False)
        elif isinstance(action, StartReceive):
            self._begin(peer, action)
        else:
            first = not peer.waiting
            peer.waiting[action.tag] = action
            if first and peer.may_send(self._window_bytes) and self._in_turn():
                self._begin(peer, peer.waiting.pop(action.tag))
            else:
                self._ask_turn(peer)

    # -- transfers

    def _begin(self, peer: _Peer, action: Transfer) -> None:
        sends = isinstance(action, StartSend)
        begin = peer.link.send if sends else peer.link.receive
        if sends:
            peer.sending_bytes += sum(action.segment_bytes)
        running = _Running(action, [], time.monotonic())
        peer.running[action.tag] = running
        peer.active = True
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
        self._ask_turn(peer)

    def _cancel(self, peer: _Peer, tags: tuple[int, ...]) -> None:
        now_s = time.monotonic()
        for tag in [tag for tag in tags if tag in peer.waiting]:
            self._report(peer.waiting.pop(tag), False)
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
        self._ask_turn(peer)

    def _collect(self, peer: _Peer, *, thorough: bool) -> bool:
        """Report ended transfers, from the oldest up to the first that has not ended; `thorough`: all.

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
            self._report(running.action, running.cancelled_s is None)
        return True

    def _report(self, action: Transfer, ok: bool) -> None:
        assert self._loop is not None
        self._loop.call_soon(self._on_done, TransferDone(action.connection, action.tag, ok))

    # -- progress

    def _in_turn(self) -> bool:
        """Whether this turn has time left. The first call in a round of the event loop begins the turn."""
        if self._turn is None:
            assert self._loop is not None
            self._turn = self._loop.call_soon(self._next_turn)
            self._turn_ends_s = time.monotonic() + TURN_S
            return True
        return time.monotonic() < self._turn_ends_s

    def _next_turn(self) -> None:
        self._turn = None
        for _ in range(len(self._asking)):
            if not self._in_turn():
                break
            peer = self._asking.popleft()
            peer.turn_asked = False
            self._pump(peer)

    def _ask_turn(self, peer: _Peer) -> None:
        if not peer.turn_asked:
            peer.turn_asked = True
            self._asking.append(peer)
            self._in_turn()

    def _readable(self, peer: _Peer) -> None:
        if self._asking or not self._in_turn():
            self._ask_turn(peer)
        else:
            self._pump(peer)

    def _pump(self, peer: _Peer) -> None:
        if self._peers.get(peer.connection) is not peer:
            return
        try:
            more = False
            while not more and peer.link.progress():
                more = not self._in_turn()
            if peer.link.accept() and not peer.greeted:
                self._greet(peer)
            _discard_late(peer)
            if not self._collect(peer, thorough=not more):
                return
            while peer.may_send(self._window_bytes):
                self._begin(peer, peer.waiting.pop(next(iter(peer.waiting))))
                if not self._in_turn():
                    break
            if self._peers.get(peer.connection) is not peer:
                return  # the start of a transfer failed and ended the connection
            if not peer.link.alive:
                self._lose(peer, "the client's endpoint closed")
            elif more or peer.may_send(self._window_bytes) or not peer.link.arm():
                self._ask_turn(peer)
        except PoolUnavailable as error:
            self._lose(peer, str(error))

    def _greet(self, peer: _Peer) -> None:
        if not peer.greeting_operations[0].completed:
            return
        if int.from_bytes(peer.greeting.tobytes(), "little") != peer.number:
            raise PoolUnavailable("the UCX greeting is not this client's")
        peer.greeted = True
        peer.greeting_operations.append(peer.link.send(peer.greeting, GREETED_TAG))

    def _sweep(self) -> None:
        assert self._loop is not None
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
        now_s = time.monotonic()
        active = [peer for peer in self._peers.values() if peer.active or peer.running]
        self._window_bytes = WINDOW_BYTES if len(active) <= 1 else SHARED_WINDOW_BYTES
        for peer in active:
            peer.active = False
        for peer in list(self._peers.values()):
            self._pump(peer)  # before the deadline check: the node itself may have been late
            reason = self._overdue(peer, now_s)
            if reason and self._peers.get(peer.connection) is peer:
                self._lose(peer, reason)

    def _overdue(self, peer: _Peer, now_s: float) -> str:
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

    # -- ending

    def _lose(self, peer: _Peer, reason: str) -> None:
        logger.info("connection %d: UCX: %s", peer.connection, reason)
        self._end(peer)
        assert self._loop is not None
        self._loop.call_soon(self._on_lost, peer.connection, reason)

    def _end(self, peer: _Peer) -> None:
        """Destroy the worker, then report every transfer in progress as failed."""
        assert self._loop is not None
        if self._peers.pop(peer.connection, None) is None:
            return
        self._loop.remove_reader(peer.link.epoll_fd)
        operations = [operation for running in peer.running.values() for operation in running.operations]
        operations += peer.greeting_operations + peer.discards
        peer.greeting_operations.clear()
        peer.discards.clear()
        for running in peer.running.values():
            running.operations.clear()
        peer.link.destroy(operations)
        for action in (*(running.action for running in peer.running.values()), *peer.waiting.values()):
            self._report(action, False)
        peer.running.clear()
        peer.waiting.clear()

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


def _discard_late(peer: _Peer) -> None:
    """Receive and drop messages of cancelled receives. Raises PoolUnavailable for any other message."""
    peer.discards[:] = [operation for operation in peer.discards if not operation.completed]
    while (found := peer.link.unexpected()) is not None:
        tag, length = found
        if length > max(peer.late.pop(tag, 0), GREETING_BYTES):  # a greeting of another client is harmless
            raise PoolUnavailable("the client sent a message that the node did not ask for")
        peer.discards.append(peer.link.receive(np.empty(length, np.uint8), tag))
    while len(peer.late) > LATE_TAGS:
        del peer.late[next(iter(peer.late))]
