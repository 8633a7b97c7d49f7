"""A node in the test's own process: NodeState on ordinary memory, no socket (door.py gives it one).

Everything that a real node decides, this one decides too, with the same code; what is missing is the shell.
Its faults are switches: `paused` answers nothing, `stop` is the node's death, `restart` its next incarnation
on the same memory.
"""

from __future__ import annotations

import mmap
import secrets
import threading
import time

import numpy as np

from pdserve.errors import PoolTimeout, PoolUnavailable
from pdserve.kvpool.core import events as ev
from pdserve.kvpool.core.sessions import Limits
from pdserve.kvpool.core.state import NodeState
from pdserve.kvpool.core.store.page_store import PageStore
from pdserve.kvpool.core.store.slot_allocator import SlotAllocator
from pdserve.kvpool.core.store.table_scan import scan
from pdserve.kvpool.namespaces.catalog import Namespaces
from pdserve.kvpool.node.config import PoolNodeConfig
from pdserve.kvpool.node.tiers.node_tiers import NodeTiers
from pdserve.kvpool.protocol.messages import Reply, Request
from pdserve.kvpool.protocol.page_bytes import Bytes1D
from pdserve.kvpool.protocol.slot_table import TableLayout
from tests.support.kvpool.table_model import Table


class InprocNode:
    """A node; thread-safe. `memory` is its arena, shape [layout.arena_bytes]. `tiers`: a configuration whose
    tiers it is to have.
    """

    def __init__(
        self, name: str, layout: TableLayout, limits: Limits, tiers: PoolNodeConfig | None = None
    ) -> None:
        self.name = name
        self.layout = layout
        self.limits = limits
        # on a memory page, as tiers want it
        self.memory: Bytes1D = np.frombuffer(mmap.mmap(-1, layout.arena_bytes), dtype=np.uint8)
        self._table = Table(layout)
        self.table = self._table.buffer
        self.paused = False
        self.stopped = False
        self._changed = threading.Condition()
        self._last_connection = 0
        self._config = tiers or PoolNodeConfig()
        self._tiers: NodeTiers | None = None
        self._start("")

    def _start(self, namespaces: str) -> None:
        """`namespaces`: the list of the incarnation before; empty: there was none."""
        self.incarnation = secrets.randbits(62) + 1
        found = Namespaces(self.incarnation)
        found = Namespaces.load(namespaces, self.incarnation) if namespaces else found
        self._replies: dict[int, dict[int, Reply]] = {}
        slots = SlotAllocator(self.layout.arena_bytes, self.layout.slab_bytes, self.layout.min_slot_bytes)
        self._tiers = tiers = NodeTiers(self._config, self.memory, found)
        self._namespaces = tiers.namespaces
        store = PageStore(slots, self._namespaces.begin_sequences(time.time_ns() // 1000))
        self._acts = tiers.acts()
        self.state = NodeState(
            self.name,
            self.incarnation,
            store,
            self.limits,
            time.monotonic(),
            self._namespaces,
            tiers=tiers.specs,
            tiering=tiers.limits,
        )
        tiers.start(self._deliver)

    def _deliver(self, event: ev.Event) -> None:
        with self._changed:
            if not self.stopped:
                self._feed(event)

    def restart(self) -> None:
        """Die without notice and come back on the same memory; every connection is broken."""
        self.close()
        with self._changed:
            self._start(self._namespaces.dump())
            spaces = self._namespaces.numbers_of_spaces
            contents = scan(self.layout, self._table.classes, self._table.rows, spaces)
            self.state.restore(contents, time.monotonic())
            self.stopped = self.paused = False
            self._changed.notify_all()

    def close(self) -> None:
        """Die, and end all threads."""
        self.stop()
        if self._tiers is not None:
            self._tiers.stop()

    def stop(self) -> None:
        """Die."""
        with self._changed:
            self.stopped = True
            self._changed.notify_all()

    def connect(self, client: str) -> int:
        """Raises PoolUnavailable."""
        with self._changed:
            if self.stopped:
                raise PoolUnavailable(f"pool node {self.name} cannot be reached")
            self._last_connection += 1
            self._replies[self._last_connection] = {}
            self._feed(ev.Connected(self._last_connection, "shm", client, 0))
            return self._last_connection

    def post(self, connection: int, message: Request) -> None:
        """Deliver a message. Raises PoolUnavailable."""
        with self._changed:
            self._check(connection)
            if not self.paused:
                self._feed(ev.Received(connection, message))

    def call(self, connection: int, request: Request, deadline: float) -> Reply:
        """Deliver a request and wait for its reply. Raises PoolUnavailable, PoolTimeout."""
        request_id: int = getattr(request, "id", 0)
        with self._changed:
            self._check(connection)
            if not self.paused:
                self._feed(ev.Received(connection, request))
                self._check(connection)
            while request_id not in self._replies[connection]:
                now_s = time.monotonic()
                if now_s >= deadline:
                    raise PoolTimeout(f"pool node {self.name} did not answer in time")
                until_s = deadline if self.paused else min(deadline, self.state.next_deadline_s)
                self._changed.wait(max(0.0, until_s - now_s))
                self._check(connection)
                if not self.paused:
                    self._feed(ev.Tick())
            return self._replies[connection].pop(request_id)

    def disconnect(self, connection: int) -> None:
        """Idempotent."""
        with self._changed:
            if self._replies.pop(connection, None) is not None and not self.stopped:
                self._feed(ev.Disconnected(connection))

    @property
    def held(self) -> tuple[int, int, int]:
        """Pins, reserved bytes and open waits of all clients."""
        with self._changed:
            status = self.state.status(0, 0.0)
        return status.pins, status.reserved_bytes, status.waiters

    def check(self) -> None:
        """Its books are in order."""
        with self._changed:
            self.state.check()

    def _check(self, connection: int) -> None:
        if self.stopped or connection not in self._replies:
            raise PoolUnavailable(f"pool node {self.name} went away")

    def _feed(self, event: ev.Event) -> None:
        now_s = time.monotonic()
        if self.state.next_deadline_s <= now_s:
            self._perform(ev.Tick(), now_s)
        self._perform(event, now_s)
        self._changed.notify_all()

    def _perform(self, event: ev.Event, now_s: float) -> None:
        actions = self.state.handle(event, now_s)
        self._table.follow(actions)
        for action in actions:
            if isinstance(action, ev.Answer):
                if action.connection in self._replies:
                    self._replies[action.connection][getattr(action.message, "id", 0)] = action.message
            elif isinstance(action, ev.ReserveRows):
                for start, end in action.wipe:
                    self.memory[start:end] = 0
            elif isinstance(action, ev.Close):
                self._replies.pop(action.connection, None)
            elif type(action) in self._acts:
                self._acts[type(action)](action)
            elif isinstance(action, ev.SaveNamespaces) and self._tiers is not None:
                self._tiers.save_namespaces(action)
            else:
                assert not isinstance(action, ev.StartSend | ev.StartReceive | ev.CancelTransfers)
