"""The synchronous pool client: batches of pages to and from all nodes. Thread-safe; used by SGLang's HiCache
threads.

A batch is split by owner on the ring and the parts run in parallel. What the first round did not bring is
asked for where it may be instead (views.py says where): at the earlier owner while pages move, at the owner
when a hot page's replica did not have it, at the new owner when a write came to the wrong node.

Operations never raise for what the pool may do: a node that is away, late or full makes its keys misses
(reads) or unstored (writes), and is counted. Every call is bounded by the time-outs of its configuration,
whatever the pool does: its own, and `restart_wait_s` more while a node is being upgraded (deadline.py).
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_all
from functools import partial
from typing import Final, TypeVar

from pdserve.errors import PoolError
from pdserve.kvpool.client import operations
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.kvpool.client.connection_pool import OpenConnection
from pdserve.kvpool.client.connector import connector_for
from pdserve.kvpool.client.deadline import Deadline
from pdserve.kvpool.client.operations import MOVED, STORED, UNSTORED, ClientCounters, Tally
from pdserve.kvpool.client.replica_hints import HotPages, choose
from pdserve.kvpool.client.routing import Rings, Search
from pdserve.kvpool.client.topology import PoolLinks, SharedViews
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.page_bytes import PageBuffers
from pdserve.kvpool.transports.base import Connector

logger = logging.getLogger(__name__)
T = TypeVar("T")

WAIT_SLICE_S: Final = 1.0
"""A wait is asked for in slices: so it follows its pages when they move, and one that was given up does not
keep its place at the node for long."""
WAIT_PAUSE_S: Final = 0.001


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
        views: SharedViews | None = None,
        seed: int | None = None,
    ) -> None:
        """Connects lazily. `connector` replaces the transport chosen by the configuration (tests), `seed` the
        randomness by which reads of hot pages spread; `views` are shared with another client.
        """
        self.config = config
        self.namespace = namespace
        self._tally = Tally()
        self._links = PoolLinks(
            config,
            namespace,
            geometry,
            connector or connector_for(config, name),
            views or SharedViews(config),
        )
        self._hot = HotPages()
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._closed = False
        self._workers = 0
        self._threads = self._make_threads(len(config.nodes))

    @property
    def counters(self) -> ClientCounters:
        """What this client did."""
        return self._tally.counters

    # -- reading

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are committed."""
        return self._look(keys, self._within(self.config.exists_timeout_s))

    def get(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffers], within_s: float = math.inf
    ) -> list[bool]:
        """Read pages into the caller's buffers; True where the buffers now hold the page, checked. `within_s`
        where there is less time than configured.

        A buffer whose page is reported False may hold anything. Nothing writes into the buffers after the
        return.
        """
        deadline = self._within(min(within_s, self.config.get_timeout_s))
        asked = [""] * len(keys)
        replicas: dict[int, int] = {}

        page_bytes = sum(segment.nbytes for segment in pages[0]) if keys else 0

        def part(opened: OpenConnection, places: list[int]) -> list[bool]:
            chosen = [keys[i] for i in places], [pages[i] for i in places]
            found, copies = operations.read(opened, *chosen, deadline.at_s, self._tally)
            replicas.update(
                (place, count) for place, hit, count in zip(places, found, copies, strict=True) if hit
            )
            return found

        rings = self._links.rings
        jobs = self._plan_reads(keys, rings, page_bytes)
        most = m.pages_a_message(page_bytes)
        result = self._run(jobs, [False] * len(keys), asked, deadline, part, page_bytes=page_bytes, most=most)
        first_asked = list(asked)
        self._search_on(keys, rings, result, asked, deadline, part, page_bytes=page_bytes)
        self._remember(keys, rings, result, asked, first_asked, replicas)
        read = [i for i, found in enumerate(result) if found]
        self._tally.add(
            pages_read=len(read),
            pages_missed=len(keys) - len(read),
            pages_fallback=sum(first_asked[i] != asked[i] for i in read),
            bytes_read=sum(segment.nbytes for i in read for segment in pages[i]),
        )
        return result

    def wait(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        """Block until all keys are committed, at most `timeout_s`; which are."""
        deadline = time.monotonic() + timeout_s
        result = [False] * len(keys)
        missing = list(range(len(keys)))
        while True:
            left = [keys[i] for i in missing]
            slice_s = min(WAIT_SLICE_S, operations.remaining_s(deadline))
            for place, found in zip(missing, self._wait_slice(left, slice_s), strict=True):
                result[place] = found
            missing = self._answerable(keys, [i for i in missing if not result[i]])
            if not missing or time.monotonic() >= deadline:
                return result
            time.sleep(WAIT_PAUSE_S)  # should a node answer at once, this is no race

    # -- writing

    def put(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffers], within_s: float = math.inf
    ) -> list[bool]:
        """Write pages; True where the page is in the pool, or on its way there by another writer."""
        deadline = self._within(min(within_s, self.config.put_timeout_s))
        asked = [""] * len(keys)
        page_bytes = sum(segment.nbytes for segment in pages[0]) if keys else 0

        def part(opened: OpenConnection, places: list[int]) -> list[int]:
            chosen = [keys[i] for i in places], [pages[i] for i in places]
            stored = operations.write(opened, *chosen, deadline.at_s, self._tally)
            if MOVED in stored:
                with opened.best_effort():
                    self._links.ask_view(opened, deadline.at_s)
            return stored

        jobs = self._links.rings.split(keys)
        run = partial(self._run, repeatable=False, most=m.pages_a_message(page_bytes))
        result = run(jobs, [UNSTORED] * len(keys), asked, deadline, part)
        if MOVED in result:
            again = {
                node: moved
                for node, places in self._links.rings.split(keys).items()
                if (moved := [i for i in places if result[i] == MOVED and asked[i] != node])
            }
            run(again, result, asked, deadline, part)
        return [became == STORED for became in result]

    def clear(self) -> int:
        """Drop every page of the namespace on every reachable node; how many went."""
        return sum(self._each_node(operations.clear).values())

    # -- the pool as a whole

    def check(self) -> dict[str, PoolError | None]:
        """Ask every node whether it is there and has the namespace; per node, None or what went wrong."""
        outcome: dict[str, PoolError | None] = {}
        for name, link in self._links.links.items():
            deadline = self._within(self.config.connect_timeout_s)
            try:
                link.use(deadline, lambda opened, until=deadline: operations.ping(opened, until.at_s))  # type: ignore[misc]
                outcome[name] = None
            except PoolError as error:
                outcome[name] = error
        return outcome

    def status(self) -> dict[str, m.StatusReport]:
        """Status of every reachable node."""
        return self._each_node(operations.status)

    @property
    def rings(self) -> Rings:
        """The nodes as this client knows them at the moment."""
        return self._links.rings

    @property
    def nodes_up(self) -> int:
        return sum(link.up for link in self._links.links.values())

    def close(self) -> None:
        """Close all connections; idempotent. Operations under way end with misses."""
        self._closed = True
        self._links.close()
        # without cancel_futures: `wait_all` would never see those as done. They end by themselves, refused.
        self._threads.shutdown(wait=False)

    # -- looking

    def _within(self, timeout_s: float) -> Deadline:
        return Deadline(time.monotonic() + timeout_s, self.config.restart_wait_s)

    def _look(self, keys: Sequence[bytes], deadline: Deadline) -> list[bool]:
        """Which keys the owners have, or those who owned them before."""
        asked = [""] * len(keys)

        def part(opened: OpenConnection, places: list[int]) -> list[bool]:
            return operations.exists(opened, [keys[i] for i in places], deadline.at_s)

        rings = self._links.rings
        result = self._run(rings.split(keys), [False] * len(keys), asked, deadline, part)
        self._search_on(keys, rings, result, asked, deadline, part)
        return result

    def _wait_slice(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        """Wait a moment at the owners for what the earlier owners do not have."""
        until = time.monotonic() + timeout_s
        # the node answers at `until`; the reply gets a moment more
        deadline = Deadline(until + self.config.exists_timeout_s)
        asked = [""] * len(keys)
        result = [False] * len(keys)

        def look(opened: OpenConnection, places: list[int]) -> list[bool]:
            return operations.exists(opened, [keys[i] for i in places], deadline.at_s)

        def part(opened: OpenConnection, places: list[int]) -> list[bool]:
            chosen = [keys[i] for i in places]
            return operations.wait(opened, chosen, operations.remaining_s(until), deadline.at_s)

        rings = self._links.rings
        self._run(self._reachable(rings.earlier(keys)), result, asked, deadline, look)
        waiting = {
            node: left
            for node, places in rings.split(keys).items()
            if (left := [place for place in places if not result[place]])
        }
        return self._run(waiting, result, asked, deadline, part)

    def _answerable(self, keys: Sequence[bytes], missing: list[int]) -> list[int]:
        """Those whose owner can tell when they come."""
        owned = self._reachable(self._links.rings.split([keys[i] for i in missing]))
        return sorted(missing[i] for places in owned.values() for i in places)

    def _search_on(
        self,
        keys: Sequence[bytes],
        rings: Rings,
        result: list[bool],
        asked: list[str],
        deadline: Deadline,
        part: Callable[[OpenConnection, list[int]], list[bool]],
        *,
        page_bytes: int = 0,
    ) -> None:
        """Look for what the nodes chosen by `rings` did not have, wherever else it may be."""
        search = Search(keys, rings)
        while missed := [i for i, found in enumerate(result) if not found]:
            others = self._reachable(search.further(missed, asked, self._links.rings))
            if not others:
                return
            most = m.pages_a_message(page_bytes) if page_bytes else m.MAX_KEYS
            self._run(others, result, asked, deadline, part, page_bytes=page_bytes, most=most)

    def _reachable(self, jobs: Mapping[str, list[int]]) -> dict[str, list[int]]:
        """Without nodes that are down: a second look is not worth waiting for."""
        links = self._links.links
        return {node: places for node, places in jobs.items() if node in links and links[node].reachable}

    # -- hot pages

    def _plan_reads(self, keys: Sequence[bytes], rings: Rings, page_bytes: int) -> dict[str, list[int]]:
        """Whom to ask for each key: its owner, or for a hot page the less loaded of two of its holders."""
        plan = rings.split(keys)
        if not len(self._hot) or len(rings.ring.nodes) < 2:
            return plan
        links = self._links.links
        load_bytes = {node: link.outstanding_bytes for node, link in links.items()}
        now_s = time.monotonic()
        spread: dict[str, list[int]] = {}
        with self._lock:
            for owner, places in plan.items():
                for place in places:
                    node, copies = owner, self._hot.replicas(keys[place], now_s)
                    if copies:
                        successors = rings.ring.successors(keys[place], copies + 1)
                        holders = [one.node for one in successors if self._is_up(one.node)] or [owner]
                        node = choose(holders, load_bytes, self._random.random(), self._random.random())
                        load_bytes[node] = load_bytes.get(node, 0) + page_bytes
                    spread.setdefault(node, []).append(place)
        return spread

    def _is_up(self, node: str) -> bool:
        link = self._links.links.get(node)
        return link is not None and link.up

    def _remember(
        self,
        keys: Sequence[bytes],
        rings: Rings,
        result: Sequence[bool],
        asked: Sequence[str],
        first_asked: Sequence[str],
        replicas: Mapping[int, int],
    ) -> None:
        """Note which pages are hot: what their owners said, and where a replica was missing."""
        if not any(replicas.values()) and not len(self._hot):
            return
        now_s = time.monotonic()
        served = 0
        with self._lock:
            for owner, places in rings.split(keys).items():
                for place in places:
                    if first_asked[place] != owner:
                        served += result[place] and asked[place] != owner
                        if asked[place] == owner:
                            self._hot.forget(keys[place])
                    if asked[place] == owner and place in replicas:
                        self._hot.note(keys[place], replicas[place], now_s)
        self._tally.add(pages_replica=served)

    # -- splitting

    def _run(
        self,
        jobs: Mapping[str, list[int]],
        result: list[T],
        asked: list[str],
        deadline: Deadline,
        part: Callable[[OpenConnection, list[int]], list[T]],
        *,
        repeatable: bool = True,
        page_bytes: int = 0,
        most: int = m.MAX_KEYS,
    ) -> list[T]:
        """Run `part` once per node and message of `most` keys with the places of its keys. Its answers come
        into `result`, the node's name into `asked`; where a node failed `result` stays as it is. `page_bytes`
        is what a page weighs on the node meanwhile.
        """
        pieces = [
            (node, places[start : start + most])
            for node, places in jobs.items()
            for start in range(0, len(places), most)
        ]

        def run(node: str, places: list[int]) -> None:
            for place in places:
                asked[place] = node
            try:
                link = self._links.link(node)
                with link.busy(page_bytes * len(places)):
                    answers = link.use(deadline, lambda opened: part(opened, places), repeatable=repeatable)
            except PoolError as error:
                logger.debug("pool node %s: %s", node, error)
                self._tally.add(failures=1)
                return
            for place, answer in zip(places, answers, strict=True):
                result[place] = answer

        # The caller's own thread takes the last piece, and then those that no thread has begun. Every step of
        # one has the deadline, so joining needs none of its own; and all are joined whatever happens, because
        # one may be writing into the caller's buffers.
        work = [_Piece(partial(run, *piece)) for piece in pieces]
        for piece in work[:-1]:
            self._submit(piece)
        try:
            for piece in reversed(work):
                piece.run()
        finally:
            for piece in work:
                piece.join()
        for piece in work:
            piece.outcome.result()
        return result

    def _submit(self, piece: _Piece) -> None:
        """Let a thread run the piece, if there is one."""
        if len(self._links.links) > self._workers:
            self._more_threads()
        while True:
            threads = self._threads
            try:
                threads.submit(piece.run)
                return
            except RuntimeError:  # no thread can be started, or the process ends; the piece may be queued
                if threads is self._threads:
                    return

    def _make_threads(self, nodes: int) -> ThreadPoolExecutor:
        self._workers = nodes
        workers = max(1, nodes * self.config.connections_per_node)
        return ThreadPoolExecutor(workers, thread_name_prefix="pdserve-pool")

    def _more_threads(self) -> None:
        """The pool has grown. Threads come as they are needed; what the old ones have to do they finish."""
        with self._lock:
            nodes = len(self._links.links)
            if nodes > self._workers and not self._closed:
                old, self._threads = self._threads, self._make_threads(nodes)
                old.shutdown(wait=False)

    def _each_node(self, part: Callable[[OpenConnection, float], T]) -> dict[str, T]:
        result: dict[str, T] = {}
        for name, link in self._links.links.items():
            deadline = self._within(self.config.exists_timeout_s)
            try:
                result[name] = link.use(deadline, lambda opened, until=deadline: part(opened, until.at_s))  # type: ignore[misc]
            except PoolError as error:
                logger.debug("pool node %s: %s", name, error)
                self._tally.add(failures=1)
        return result


class _Piece:
    """A part of a batch, done by the first thread that comes to it, and by none once it is joined."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.outcome: Future[None] = Future()
        self._work = work
        self._taken = threading.Lock()

    def run(self) -> None:
        if not self._taken.acquire(blocking=False):
            return
        try:
            self._work()
        except BaseException as error:
            self.outcome.set_exception(error)
            raise
        self.outcome.set_result(None)

    def join(self) -> None:
        if self._taken.acquire(blocking=False):
            self.outcome.set_result(None)
        wait_all([self.outcome])
