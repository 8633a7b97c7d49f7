"""The node's end of the UCX data path: carries out StartSend, StartReceive and CancelTransfers.

    node.py       open(connection) -> UcxInfo, sent in Welcome     close(connection) when control is gone
                  perform(action)                                  on_done(TransferDone), on_lost(connection)

Every connection has its own worker and listener (see ucx.py for why). The client proves that an endpoint is
its own by sending the number from Welcome, which is random, as first message; the node sends it back.

No busy polling: each worker's descriptor is watched by the event loop. `_pump` makes progress, begins sends
that wait, and then either arms the worker and returns to sleep, or asks for another turn. A *turn* is one
round of the event loop, and all of UCX together has `TURN_S` in it, by turns of its connections: handing a
page to the kernel copies it, and a client that reads many MiB at once would hold everybody else for as long.
At most `WINDOW_BYTES` of a connection's sends are UCX's at a time, as one step of its may send them all;
where others moved pages within the last second, too, `SHARED_WINDOW_BYTES` (over loopback one connection
reads pages of 1 MiB 15 % slower by it, a quiet neighbour's p99 falls by a quarter).

What takes long and has no connection yet, loading UCX (0.6 s) and
making a worker (a few ms), is done in a thread; afterwards only the loop's thread uses it.

After TransferDone UCX touches the slot no more. A transfer that cannot be ended alone (a send, or a receive
that a message has matched) goes on after CancelTransfers until it ends by itself. One that makes no end for
long is ended with its connection: the worker is destroyed, the client finds its endpoint closed and connects
anew.

A message that no receive waits for would stay in UCX's memory, however large. It may be the page of a receive
that was cancelled: then it is taken and thrown away. Any other, but the smallest, ends the connection.
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

TURN_S: Final = 100e-6  # a page of 256 KiB over TCP; then control messages have their turn
WINDOW_BYTES: Final = 4 * 1024 * 1024  # and a page more
SHARED_WINDOW_BYTES: Final = 512 * 1024  # and a page more
GREETING_TIMEOUT_S: Final = 5.0
SWEEP_S: Final = 1.0  # UCX's keepalive and our deadlines need a look now and then, events or not
LATE_TAGS: Final = 4096  # remembered for each connection; HiCache writes less than that at a time
PORTS: Final = 64  # tried upwards from a configured port


class _Running:
    """One transfer under way. `operations`: those not yet seen completed, last segment first."""

    __slots__ = ("action", "cancelled_s", "ok", "operations", "started_s")

    def __init__(self, action: Transfer, operations: list[Operation], started_s: float) -> None:
        self.action = action
        self.operations = operations
        self.started_s = started_s
        self.ok = True
        self.cancelled_s: float | None = None

    def ended(self) -> bool:
        """All segments completed; sets `ok` false if one failed."""
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
        self.waiting: dict[int, StartSend] = {}  # sends not yet begun, by tag
        self.sending_bytes = 0  # of the transfers that are running
        self.late: dict[int, int] = {}  # by tag, the length of a message whose receive was cancelled
        self.discards: list[Operation] = []  # receives of such messages
        self.turn_asked = False
        self.active = False  # it began a transfer since the last sweep

    def may_send(self, window_bytes: int) -> bool:
        """Whether a send waits that may begin."""
        return bool(self.waiting) and self.sending_bytes < window_bytes


class UcxServer:
    """All UCX connections of a node. Every method is called on the event loop's thread."""

    def __init__(
        self,
        arena: Bytes1D,
        on_done: Callable[[TransferDone], None],
        on_lost: Callable[[int, str], None],
        *,
        host: str = "",
        port: int = 0,
        options: Mapping[str, str] | None = None,
        stall_timeout_s: float = 30.0,
    ) -> None:
        """`on_done` is called from the loop, never within `perform`; once per StartSend and StartReceive.
        `on_lost(connection, reason)`: the UCX connection failed; the control connection should be closed.
        `host`: address for clients (empty: the one they reached us by). `port`: first of the ports to listen
        on (0: any). A send not taken within `stall_timeout_s`, or a cancelled receive that is still going on
        after it, ends its connection.
        """
        self._arena = arena
        self._on_done = on_done
        self._on_lost = on_lost
        self._host = host
        self._port = port
        self._options = dict(options or {})
        self._stall_timeout_s = stall_timeout_s
        self._peers: dict[int, _Peer] = {}
        self._window_bytes = WINDOW_BYTES
        self._library: UcxLibrary | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._turn: asyncio.Handle | None = None  # the next one
        self._turn_ends_s = 0.0
        self._asking: deque[_Peer] = deque()  # in the order in which they have their turns
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
        """End all connections; idempotent."""
        self._stopped = True
        self._opener.shutdown(wait=False, cancel_futures=True)
        for handle in (self._sweeper, self._turn):
            if handle is not None:
                handle.cancel()
        for connection in list(self._peers):
            self.close(connection)

    async def open(self, connection: int) -> UcxInfo:
        """Make ready for one client; after `start`. Raises PoolUnavailable (no free port, no descriptors)."""
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
        return UcxInfo(host=self._host, port=port, connection=peer.number)

    def _make_link(self) -> tuple[UcxLink, int]:
        """A worker, and the port that it listens on. It has a context of its own, because UCXX's contexts may
        not be used by two threads at a time.
        """
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
        """The client disconnected, or is to be disconnected: end its transfers. Idempotent."""
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
        """Report what ended: from the oldest on up to the first that has not, or, thorough, all. One that
        failed ends the connection (its other segments may never end by themselves): then False.
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
        """Whether this turn has time left. The first question of a turn begins it."""
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
                return  # beginning a transfer ended it
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
            self._pump(peer)  # first: the node itself may have had no time
            reason = self._overdue(peer, now_s)
            if reason and self._peers.get(peer.connection) is peer:
                self._lose(peer, reason)

    def _overdue(self, peer: _Peer, now_s: float) -> str:
        """Why the connection has to end by now; empty if it has not."""
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
        """Destroy the worker, then report every transfer that was under way."""
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
    """Take messages for receives that were cancelled. Raises PoolUnavailable: a message had no receive."""
    peer.discards[:] = [operation for operation in peer.discards if not operation.completed]
    while (found := peer.link.unexpected()) is not None:
        tag, length = found
        if length > max(peer.late.pop(tag, 0), GREETING_BYTES):  # a stranger's greeting does no harm
            raise PoolUnavailable("the client sent a message that the node did not ask for")
        peer.discards.append(peer.link.receive(np.empty(length, np.uint8), tag))
    while len(peer.late) > LATE_TAGS:
        del peer.late[next(iter(peer.late))]
