"""A thread that moves the pages of one client over its data connection.

    loop's thread     give(StartSend | StartReceive | CancelTransfers)      stop()
                       send_at_once([StartSend, ...]) -> [TransferDone, ...]
    worker's thread    run(stream), from the first page to the last          tell([TransferDone, ...])

The worker's thread alone touches slots, but for short pages: while it sleeps and nothing leaves, the loop's
thread sends them, since waking another thread takes longer. What the kernel does not take is left to the
worker. A transfer is reported when the slot's memory is out of reach here, so nothing writes into a slot or
reads it after its TransferDone:

| when a transfer is cancelled | then |
|---|---|
| a receive whose page has not begun | it ends; the page is dropped if it comes all the same |
| a receive whose page is arriving | it ends; the rest of the page is dropped |
| a send that has not begun | it ends; the client is told that the page will not come |
| a send that has begun | it goes on, and ends as failed |

A page that is leaving, or that is dropped, may take `stall_timeout_s`. Then the connection ends, and with it
all transfers. A page that arrives slowly is cancelled when its reservation's lease ends.

A message that the node did not ask for, or of another length, ends the connection before any of its bytes
are read.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from pdserve.errors import PoolUnavailable
from pdserve.kvpool.core.events import CancelTransfers, StartReceive, StartSend, TransferAction, TransferDone
from pdserve.kvpool.node.inbox import Inbox
from pdserve.kvpool.transports.tcp.stream import GREETED_TAG, Buffers, Incoming, Outgoing, PageStream

LATE_TAGS: Final = 4096  # cancelled receives whose pages may still come, per connection
UNTOLD: Final = 32  # ends of transfers that are reported together, while there is more to move


class PageWorker:
    """The transfers of one connection."""

    def __init__(
        self,
        connection: int,
        arena: memoryview,
        stall_timeout_s: float,
        tell: Callable[[list[TransferDone]], None],
    ) -> None:
        """`tell` is called from the worker's thread. Raises OSError if there is no descriptor left."""
        self._connection = connection
        self._arena = arena
        self._stall_timeout_s = stall_timeout_s
        self._tell = tell
        self._inbox = Inbox[TransferAction]()
        self.give = self._inbox.give
        """Carry an action out; called by the loop's thread. False: the worker has ended."""
        self.stop = self._inbox.stop
        """Let `run` end soon; called by the loop's thread. Idempotent."""
        self._expected: dict[int, StartReceive] = {}  # by tag; their pages have not begun
        self._arriving: StartReceive | None = None
        self._late: dict[int, int] = {}  # tag -> length, of cancelled receives whose pages have not come
        self._dropping_since_s: float | None = None
        self._sending: dict[int, bool] = {}  # tag -> not cancelled
        self._done: list[TransferDone] = []  # not told yet
        self._turn = threading.Lock()  # to send; the worker's thread has it, but while it sleeps
        self._turn.acquire()

    def send_at_once(self, actions: Sequence[StartSend]) -> list[TransferDone] | None:
        """Begin to send short pages; called by the loop's thread. The transfers that have ended; those of the
        others are told. None: the worker's thread is busy, and nothing was done.
        """
        if not self._turn.acquire(blocking=False):
            return None
        try:
            if self._inbox.waiting:
                return None
            self._send(actions)
            with contextlib.suppress(PoolUnavailable):  # the worker's thread meets it too
                self._outgoing.step()
            if self._outgoing:
                self._inbox.give()
            done, self._done = self._done, []
            return done
        finally:
            self._turn.release()

    def discard(self) -> None:
        """Free what a worker holds that never ran. Idempotent."""
        self._inbox.end()

    def run(self, stream: PageStream) -> str:
        """Greet the client, then move pages until the connection ends. Returns the reason. Closes the stream,
        and has reported every transfer when it returns.
        """
        incoming = Incoming(stream, self._begin, self._received)
        outgoing = Outgoing(stream, self._sent)
        self._incoming, self._outgoing = incoming, outgoing
        outgoing.add(GREETED_TAG)
        poller = select.poll()
        poller.register(self._inbox.fileno(), select.POLLIN)
        poller.register(stream.fileno(), select.POLLIN)
        try:
            while not self._inbox.stopping:
                self._take_actions()
                moved = incoming.step()
                moved = outgoing.step() or moved
                self._check_stalls(time.monotonic())
                if moved and len(self._done) < UNTOLD:
                    continue
                self._tell_done()
                if not moved:
                    events = stream.receive_waits | (stream.send_waits if outgoing else 0)
                    poller.modify(stream.fileno(), events)
                    self._sleep(poller)
            return "the connection was closed"
        except PoolUnavailable as error:
            return str(error)
        finally:
            stream.close()
            self._fail_all()

    def _sleep(self, poller: select.poll) -> None:
        """Until there may be something to do."""
        patience_ms, is_sending = self._patience_ms(time.monotonic()), bool(self._outgoing)
        if not is_sending:
            self._turn.release()
        try:
            poller.poll(patience_ms)
        finally:
            if not is_sending:
                self._turn.acquire()

    def _take_actions(self) -> None:
        for action in self._inbox.take():
            if isinstance(action, StartReceive):
                self._expected[action.tag] = action
            elif isinstance(action, StartSend):
                self._send([action])
            else:
                self._cancel(action.tags)

    def _send(self, actions: Sequence[StartSend]) -> None:
        for action in actions:
            self._sending[action.tag] = True
            self._outgoing.add(action.tag, self._places(action))

    def _cancel(self, tags: tuple[int, ...]) -> None:
        for tag in tags:
            action = self._expected.pop(tag, None)
            if action is not None:
                self._late[tag] = sum(action.segment_bytes)
                self._report(tag, False)
            elif self._arriving is not None and self._arriving.tag == tag:
                self._incoming.drop()
                self._arriving = None
                self._dropping_since_s = time.monotonic()
                self._report(tag, False)
            elif tag in self._sending:
                if self._outgoing.withdraw(tag):
                    del self._sending[tag]
                    self._report(tag, False)
                else:
                    self._sending[tag] = False
        while len(self._late) > LATE_TAGS:
            del self._late[next(iter(self._late))]

    def _begin(self, tag: int, length: int) -> Buffers | None:
        """A header has arrived."""
        self._take_actions()  # its grant may be as young as that
        action = self._expected.get(tag)
        if action is not None and length == sum(action.segment_bytes):
            self._arriving = self._expected.pop(tag)
            return self._places(action)
        if action is None and self._late.pop(tag, None) == length:
            self._dropping_since_s = time.monotonic()
            return None
        raise PoolUnavailable("the client sent a page that the node did not ask for, or of another length")

    def _received(self, tag: int) -> None:
        if self._arriving is not None:
            self._arriving = None
            self._report(tag, True)
        self._dropping_since_s = None

    def _sent(self, tag: int) -> None:
        if tag != GREETED_TAG:
            self._report(tag, self._sending.pop(tag))

    def _places(self, action: StartSend | StartReceive) -> list[memoryview]:
        return [self._arena[action.offset : action.offset + sum(action.segment_bytes)]]

    def _report(self, tag: int, ok: bool) -> None:
        self._done.append(TransferDone(self._connection, tag, ok))

    def _tell_done(self) -> None:
        if self._done:
            done, self._done = self._done, []
            self._tell(done)

    # -- deadlines and the end

    def _stall_ends_s(self) -> float | None:
        since_s = [one for one in (self._outgoing.stuck_since_s, self._dropping_since_s) if one is not None]
        return min(since_s) + self._stall_timeout_s if since_s else None

    def _check_stalls(self, now_s: float) -> None:
        ends_s = self._stall_ends_s()
        if ends_s is not None and now_s >= ends_s:
            raise PoolUnavailable(
                f"the client took, or has not finished sending, no page for {self._stall_timeout_s:.0f} s"
            )

    def _patience_ms(self, now_s: float) -> float | None:
        ends_s = self._stall_ends_s()
        return None if ends_s is None else max(1.0, (ends_s - now_s) * 1000)

    def _fail_all(self) -> None:
        """Report every transfer that has not ended; from now on `give` refuses."""
        tags = [*self._expected, *self._sending]
        if self._arriving is not None:
            tags.append(self._arriving.tag)
        tags += [action.tag for action in self._inbox.end() if not isinstance(action, CancelTransfers)]
        for tag in tags:
            self._report(tag, False)
        self._expected.clear()
        self._sending.clear()
        self._arriving = None
        del self._incoming, self._outgoing  # they may hold a slot's memory
        self._tell_done()
