"""The synchronous pool client: batches of pages to and from all nodes. Thread-safe; used by SGLang's HiCache
threads.

A batch is split by owner on the ring and the parts run in parallel. Operations never raise for what the pool
may do: a node that is away, late or full makes its keys misses (reads) or unstored (writes), and is counted.
Every call is bounded by the time-outs of its configuration, whatever the pool does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_all
from dataclasses import dataclass
from typing import TypeVar

from pdserve.errors import PoolError, PoolRefused
from pdserve.kvpool import messages as m
from pdserve.kvpool.client_config import PoolClientConfig
from pdserve.kvpool.connectors import connector_for
from pdserve.kvpool.link import NodeLink, OpenConnection
from pdserve.kvpool.ring import Ring
from pdserve.kvpool.transports.base import CORRUPT, OK, Connection, Connector, PageBuffers

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class ClientCounters:
    """What this client did; monotonic. `failures` are node operations cut short by an error or a deadline."""

    pages_read: int = 0
    pages_missed: int = 0
    pages_written: int = 0
    pages_present: int = 0  # writes not needed: it was there, or another client was writing it
    pages_refused: int = 0  # writes the pool had no room for
    pages_lost: int = 0  # reads whose lease ended during the copy
    pages_corrupt: int = 0  # reads whose checksum did not match
    bytes_read: int = 0
    bytes_written: int = 0
    failures: int = 0


class PoolClient:
    """One namespace of the pool, over all its nodes."""

    def __init__(
        self,
        config: PoolClientConfig,
        namespace: str,
        geometry: dict[str, str],
        *,
        connector: Connector | None = None,
        name: str = "client",
    ) -> None:
        """Connects lazily. `connector` replaces the transport chosen by the configuration (tests)."""
        self.config = config
        self.namespace = namespace
        self.counters = ClientCounters()
        self._count_lock = threading.Lock()
        chosen = connector or connector_for(config, name)
        self._links = {
            ref.node: NodeLink(
                ref.node,
                _connect_to(chosen, ref.address),
                namespace=namespace,
                geometry=geometry,
                limit=config.connections_per_node,
                connect_timeout_s=config.connect_timeout_s,
                retry_after_s=config.retry_after_s,
            )
            for ref in config.nodes
        }
        self._ring = Ring([m.NodeAddress(ref.node, ref.address, ref.weight) for ref in config.nodes])
        workers = max(1, len(config.nodes) * config.connections_per_node)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="pdserve-pool")

    # -- reading

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are committed."""
        deadline = time.monotonic() + self.config.exists_timeout_s

        def part(opened: OpenConnection, places: list[int], until: float) -> list[bool]:
            request = m.Exists(opened.next_id(), opened.namespace, [keys[i] for i in places])
            present = _mask(_expect(opened, request, m.Present, until))
            _check_length(opened, present, places)
            return present

        return self._fan_out(keys, False, deadline, part)

    def get(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> list[bool]:
        """Read pages into the caller's buffers; True where the buffers now hold the page, checked.

        A buffer whose page is reported False may hold anything. Nothing writes into the buffers after the
        return.
        """
        deadline = time.monotonic() + self.config.get_timeout_s

        def part(opened: OpenConnection, places: list[int], until: float) -> list[bool]:
            return self._get_on(opened, [keys[i] for i in places], [pages[i] for i in places], until)

        return self._fan_out(keys, False, deadline, part)

    def wait(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        """Block until all keys are committed, at most `timeout_s`; which are."""
        deadline = time.monotonic() + timeout_s

        def part(opened: OpenConnection, places: list[int], until: float) -> list[bool]:
            left_s = max(0.0, deadline - time.monotonic())
            request = m.Wait(opened.next_id(), opened.namespace, [keys[i] for i in places], left_s)
            present = _mask(_expect(opened, request, m.Present, until))
            _check_length(opened, present, places)
            return present

        # the node answers at the deadline; the reply gets a moment more
        return self._fan_out(keys, False, deadline + self.config.exists_timeout_s, part)

    # -- writing

    def put(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> list[bool]:
        """Write pages; True where the page is in the pool, or on its way there by another writer."""
        deadline = time.monotonic() + self.config.put_timeout_s

        def part(opened: OpenConnection, places: list[int], until: float) -> list[bool]:
            return self._put_on(opened, [keys[i] for i in places], [pages[i] for i in places], until)

        return self._fan_out(keys, False, deadline, part)

    def clear(self) -> int:
        """Drop every page of the namespace on every reachable node; how many went."""

        def part(opened: OpenConnection, until: float) -> int:
            return _expect(opened, m.Clear(opened.next_id(), opened.namespace), m.Done, until).count

        return sum(self._each_node(part).values())

    # -- the pool as a whole

    def check(self) -> dict[str, PoolError | None]:
        """Connect to every node and open the namespace there; per node, None or what went wrong."""
        outcome: dict[str, PoolError | None] = {}
        for name, link in self._links.items():
            try:
                link.check(time.monotonic() + self.config.connect_timeout_s)
                outcome[name] = None
            except PoolError as error:
                outcome[name] = error
        return outcome

    def status(self) -> dict[str, m.StatusReport]:
        """Status of every reachable node."""

        def part(opened: OpenConnection, until: float) -> m.StatusReport:
            return _expect(opened, m.Status(opened.next_id()), m.StatusReport, until)

        return self._each_node(part)

    @property
    def nodes_up(self) -> int:
        return sum(link.up for link in self._links.values())

    def close(self) -> None:
        """Close all connections; idempotent. Operations under way end with misses."""
        for link in self._links.values():
            link.close()
        # without cancel_futures: `wait_all` would never see those as done. They end by themselves, refused.
        self._threads.shutdown(wait=False)

    # -- one node

    def _get_on(
        self, opened: OpenConnection, keys: list[bytes], pages: list[PageBuffers], deadline: float
    ) -> list[bool]:
        segment_bytes = [segment.nbytes for segment in pages[0]]
        request = m.Get(opened.next_id(), opened.namespace, keys, segment_bytes)
        pins = _expect(opened, request, m.Got, deadline).pins
        _check_length(opened, pins, keys)
        held = [i for i, pin in enumerate(pins) if pin.status == m.HIT]
        result = [False] * len(keys)
        if held:
            outcomes = opened.connection.read_pages(
                [pins[i] for i in held], [pages[i] for i in held], deadline
            )
            opened.connection.post(m.Release([pins[i].slot for i in held], [pins[i].sequence for i in held]))
            for i, outcome in zip(held, outcomes, strict=True):
                result[i] = outcome == OK
            corrupt = [i for i, outcome in zip(held, outcomes, strict=True) if outcome == CORRUPT]
            lost = sum(outcome not in (OK, CORRUPT) for outcome in outcomes)
            self._count(pages_corrupt=len(corrupt), pages_lost=lost)
            if corrupt:
                logger.error(
                    "pool node %s: %d of %d pages did not match their checksum; they are recomputed",
                    opened.connection.welcome.node,
                    len(corrupt),
                    len(held),
                )
                sequences = [pins[i].sequence for i in corrupt]
                bad = [keys[i] for i in corrupt]
                _expect(
                    opened, m.Discard(opened.next_id(), opened.namespace, bad, sequences), m.Done, deadline
                )
        read = sum(result)
        self._count(pages_read=read, pages_missed=len(keys) - read, bytes_read=read * sum(segment_bytes))
        return result

    def _put_on(
        self, opened: OpenConnection, keys: list[bytes], pages: list[PageBuffers], deadline: float
    ) -> list[bool]:
        segment_bytes = [segment.nbytes for segment in pages[0]]
        request = m.Reserve(opened.next_id(), opened.namespace, keys, segment_bytes)
        grants = _expect(opened, request, m.Reserved, deadline).grants
        _check_length(opened, grants, keys)
        mine = [i for i, grant in enumerate(grants) if grant.status == m.GRANTED]
        result = [grant.status in (m.PRESENT, m.BUSY) for grant in grants]
        self._count(
            pages_present=sum(result),
            pages_refused=sum(grant.status in (m.FULL, m.TOO_LARGE) for grant in grants),
        )
        if mine:
            granted = [grants[i] for i in mine]
            checksums = opened.connection.write_pages(granted, [pages[i] for i in mine], deadline)
            commit = m.Commit(
                opened.next_id(), [g.slot for g in granted], [g.sequence for g in granted], checksums
            )
            done = _mask(_expect(opened, commit, m.Committed, deadline))
            _check_length(opened, done, mine)
            for i, committed in zip(mine, done, strict=True):
                result[i] = committed
            self._count(pages_written=sum(done), bytes_written=sum(done) * sum(segment_bytes))
        return result

    # -- splitting

    def _fan_out(
        self,
        keys: Sequence[bytes],
        absent: T,
        deadline: float,
        part: Callable[[OpenConnection, list[int], float], list[T]],
    ) -> list[T]:
        """Run `part` once per owner (and MAX_KEYS) with the places of its keys; `absent` where a
        node failed.
        """
        result = [absent] * len(keys)
        if not self._links:
            return result
        jobs = [
            (node, places[start : start + m.MAX_KEYS])
            for node, places in self._ring.split(keys).items()
            for start in range(0, len(places), m.MAX_KEYS)
        ]

        def run(node: str, places: list[int]) -> None:
            try:
                with self._links[node].borrow(deadline) as opened:
                    answers = part(opened, places, deadline)
            except PoolError as error:
                logger.debug("pool node %s: %s", node, error)
                self._count(failures=1)
                return
            for place, answer in zip(places, answers, strict=True):
                result[place] = answer

        # The caller's own thread takes the last job. Every step of a job has the deadline, so joining needs
        # none of its own; and all are joined whatever happens, because a job may be writing into the caller's
        # buffers.
        futures = [self._submit(run, *job) for job in jobs[:-1]]
        try:
            if jobs:
                run(*jobs[-1])
        finally:
            wait_all(futures)
        for future in futures:
            future.result()
        return result

    def _submit(self, run: Callable[[str, list[int]], None], node: str, places: list[int]) -> Future[None]:
        try:
            return self._threads.submit(run, node, places)
        except RuntimeError:  # closed while we came here: every link refuses
            refused: Future[None] = Future()
            refused.set_result(None)
            self._count(failures=1)
            return refused

    def _each_node(self, part: Callable[[OpenConnection, float], T]) -> dict[str, T]:
        result: dict[str, T] = {}
        for name, link in self._links.items():
            deadline = time.monotonic() + self.config.exists_timeout_s
            try:
                with link.borrow(deadline) as opened:
                    result[name] = part(opened, deadline)
            except PoolError as error:
                logger.debug("pool node %s: %s", name, error)
                self._count(failures=1)
        return result

    def _count(self, **amounts: int) -> None:
        with self._count_lock:
            for name, amount in amounts.items():
                setattr(self.counters, name, getattr(self.counters, name) + amount)


def _connect_to(connector: Connector, address: str) -> Callable[[float], Connection]:
    return lambda deadline: connector.connect(address, deadline)


R = TypeVar("R", bound=m.Reply)


def _expect(opened: OpenConnection, request: m.Request, kind: type[R], deadline: float) -> R:
    """The reply of the wanted kind. Raises PoolRefused for a Fault, and what `Connection.call` raises."""
    reply = opened.connection.call(request, deadline)
    if isinstance(reply, kind):
        return reply
    text = f"unexpected {type(reply).__name__}"
    if isinstance(reply, m.Fault):
        text = f"{reply.code}: {reply.message}"
    raise PoolRefused(f"pool node {opened.connection.welcome.node}: {text}")


def _check_length(opened: OpenConnection, answers: Sequence[object], asked: Sequence[object]) -> None:
    """Raises PoolRefused."""
    if len(answers) != len(asked):
        node = opened.connection.welcome.node
        raise PoolRefused(f"pool node {node} answered {len(answers)} of {len(asked)} keys")


def _mask(reply: m.Present | m.Committed) -> list[bool]:
    return [byte == 1 for byte in reply.mask]
