"""The node's end of the UCX data path: carries out StartSend, StartReceive and CancelTransfers.

    node.py       open(connection) -> UcxInfo, sent in Welcome     close(connection) when control is gone
                  perform(action)                                  on_done([...])  on_lost(connection)

It offers what TcpServer offers. One thread drives UCX for all clients (`worker.py`), so the event loop is not
slower for others while pages move.

UCX takes 0.6 s to load; on a slow machine this is more than a client waits for. A node that other hosts can
reach loads it at once. A node that only its own host can reach seldom needs it (for a client in another
container, say). It loads the library a while after its start, when first reads have been answered.

Every method is called on the loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from pdserve.errors import PdserveError, PoolUnavailable
from pdserve.kvpool.core.events import TransferAction, TransferDone, failures
from pdserve.kvpool.node.ucx.worker import UcxWorker
from pdserve.kvpool.protocol.messages import UcxInfo
from pdserve.kvpool.protocol.page_bytes import Bytes1D
from pdserve.kvpool.transports.page_residency import populate_in_background

logger = logging.getLogger(__name__)

LOAD_AFTER_S: Final = 5.0
STOP_TIMEOUT_S: Final = 5.0  # for the thread to let go of the memory


class UcxServer:
    """All UCX connections of a node. Its thread begins with `load`, or when the first client comes."""

    def __init__(
        self,
        arena: Bytes1D,
        on_done: Callable[[list[TransferDone]], None],
        on_lost: Callable[[int, str], None],
        *,
        port: int = 0,
        options: Mapping[str, str] | None = None,
        stall_timeout_s: float = 30.0,
    ) -> None:
        """The arguments:

        - `on_done`: told once of each StartSend and StartReceive, from the loop and never within `perform`.
        - `on_lost(connection, reason)`: the UCX connection failed; the control connection should be closed.
        - `port`: first of the ports to listen on (0: any).
        - `stall_timeout_s`: a send, or a cancelled receive, that takes longer ends its connection.
        """
        self._arena = arena
        self._on_done = on_done
        self._on_lost = on_lost
        self.used = False  # a client has come
        self._make_worker = partial(
            UcxWorker, arena, self._tell, port=port, options=options, stall_timeout_s=stall_timeout_s
        )
        self._worker: UcxWorker | None = None
        self._thread: threading.Thread | None = None
        self._loop = asyncio.get_running_loop()
        self._loading: asyncio.Future[None] = self._loop.create_future()
        self._loading.add_done_callback(_log_failure)
        self._later: asyncio.TimerHandle | None = None
        self._stopped = False

    def prepare(self, *, at_once: bool) -> None:
        """The node is ready. `at_once`: load UCX now, for clients on other hosts or after an upgrade."""
        if at_once:
            self.load()
        else:
            self._later = self._loop.call_later(LOAD_AFTER_S, self.load)

    def load(self) -> asyncio.Future[None]:
        """Begin the thread, which loads UCX first. The future raises StartupError."""
        if self._worker is None and not self._stopped:
            self._worker = self._make_worker()
            loaded = partial(self._call, self._loaded)
            self._thread = threading.Thread(
                target=self._worker.run, args=(loaded,), name="pdserve-ucx", daemon=True
            )
            self._thread.start()
        return self._loading

    async def open(self, connection: int) -> UcxInfo:
        """Prepare for one client. `close` undoes it. Raises PoolUnavailable (no free port, no descriptors),
        StartupError.
        """
        self.used = True
        if not self._stopped:
            await asyncio.shield(self.load())
        opened: asyncio.Future[UcxInfo] = self._loop.create_future()

        def deliver(outcome: UcxInfo | PdserveError) -> None:
            if opened.done():
                return
            if isinstance(outcome, PdserveError):
                opened.set_exception(outcome)
            else:
                opened.set_result(outcome)

        tell, worker = partial(self._call, deliver), self._worker
        if self._stopped or worker is None or not worker.give(partial(worker.open, connection, tell)):
            raise PoolUnavailable("the node stops")
        return await opened

    def close(self, connection: int) -> None:
        """End the transfers of a client that disconnected or will be disconnected. Idempotent."""
        if self._worker is not None:
            self._worker.give(partial(self._worker.close, connection))

    def perform(self, connection: int, actions: Sequence[TransferAction]) -> None:
        """Carry out actions of NodeState for one connection."""
        worker = self._worker
        if worker is None or not worker.give(*[partial(worker.perform, action) for action in actions]):
            self._loop.call_soon(self._on_done, failures(actions))

    def stop(self) -> None:
        """End all connections. When it returns, nothing touches the arena any more. Idempotent."""
        self._stopped = True
        if self._later is not None:
            self._later.cancel()
        if self._worker is not None and self._thread is not None:
            self._worker.stop()
            self._thread.join(STOP_TIMEOUT_S)

    # --- the thread

    def _tell(self, done: list[TransferDone], lost: list[tuple[int, str]]) -> None:
        self._call(self._reported, done, lost)

    def _call(self, *call: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the node has ended
            self._loop.call_soon_threadsafe(*call)  # type: ignore[arg-type]

    # --- back on the loop's thread

    def _loaded(self, error: PdserveError | None) -> None:
        if error is not None:
            self._loading.set_exception(error)
            return
        self._loading.set_result(None)
        populate_in_background(self._arena)

    def _reported(self, done: list[TransferDone], lost: list[tuple[int, str]]) -> None:
        if done:
            self._on_done(done)
        for connection, reason in lost:
            self._on_lost(connection, reason)


def _log_failure(loading: asyncio.Future[None]) -> None:
    error = None if loading.cancelled() else loading.exception()
    if error is not None:
        logger.warning("clients on other hosts cannot be served over UCX: %s", error)
