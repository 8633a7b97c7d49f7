"""The asyncio pool client: the same operations as `PoolClient`, for programs with an event loop.

Questions (exists, wait, check, status, clear) go over one connection per node, shared by all tasks. Page
bytes (get, put) are moved by a `PoolClient` in threads, since copying and hashing block: at most
`connections_per_node` batches per node at a time, others wait for their turn within their deadline. It is
made when the first page moves. Both follow one view of the pool.

A node that is away is not asked again before `retry_after_s`; its keys count as absent. Every call ends by
its deadline, which a node that is being upgraded puts off, as in `PoolClient` (deadline.py).

A wait is asked for in slices of WAIT_SLICE_S, not in one request with a message to cancel it: a task that is
cancelled then leaves nothing at the node for long, whatever became of its connection, and each slice asks
whoever owns the page by then, which one long request could not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeAlias, TypeVar

from pdserve.errors import FrameError, PoolError, PoolRefused, PoolRestarting, PoolTimeout, PoolUnavailable
from pdserve.kvpool.client.client import WAIT_PAUSE_S, WAIT_SLICE_S, PoolClient
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.kvpool.client.deadline import Deadline
from pdserve.kvpool.client.routing import Rings, Search
from pdserve.kvpool.client.topology import SharedViews
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.frames import refusal
from pdserve.kvpool.protocol.page_bytes import PageBuffers
from pdserve.kvpool.transports.async_control import AsyncControl, LastWordsLost
from pdserve.kvpool.transports.base import Connector
from pdserve.kvpool.transports.session import make_hello
from pdserve.tracing import timed

logger = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R", bound=m.Reply)
MakeRequest: TypeAlias = Callable[[int, int], m.Request]  # id, namespace
MakeQuestion: TypeAlias = Callable[[int, int, list[bytes]], m.Exists | m.Wait]
WAITERS_RETRY_S: Final = 0.05
RESTART_RETRY_S: Final = 0.02
OVERSLEPT_S: Final = 0.1
MAX_BATCHES: Final = 64  # page batches under way at a time, however many nodes


class AsyncPoolClient:
    """One namespace of the pool over all its nodes; lives in one event loop."""

    def __init__(
        self,
        config: PoolClientConfig,
        namespace: str,
        geometry: dict[str, str],
        *,
        connector: Connector | None = None,
    ) -> None:
        """Connects lazily. `connector` replaces the configured transport of page bytes (tests)."""
        self.config = config
        self.namespace = namespace
        self._geometry = geometry
        self._connector = connector
        self._views = SharedViews(config)
        self._seeds = {ref.node: ref.address for ref in config.nodes}
        self._open: dict[str, AsyncControl] = {}
        self._connecting: dict[str, asyncio.Lock] = {}
        self._retry_at_s: dict[str, float] = {}
        self._restarting_until_s: dict[str, float] = {}
        batches = min(MAX_BATCHES, max(1, len(config.nodes)) * config.connections_per_node)
        self._turn = asyncio.Semaphore(batches)
        self._threads = ThreadPoolExecutor(batches, "pdserve-pages")
        self._pages: PoolClient | None = None
        self._making = threading.Lock()
        self._closed = False

    @property
    def rings(self) -> Rings:
        """The nodes as this client knows them at the moment."""
        return self._views.rings

    # -- questions

    async def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are committed; False where the owner is away."""
        with timed("pool exists", pages=len(keys)):
            return await self._exists(keys)

    async def _exists(self, keys: Sequence[bytes]) -> list[bool]:
        deadline = self._within(self.config.exists_timeout_s)
        asked = [""] * len(keys)
        rings = self.rings
        search = Search(keys, rings)
        result = await self._ask(rings.split(keys), keys, [False] * len(keys), asked, deadline, m.Exists)
        while missed := [i for i, found in enumerate(result) if not found]:
            others = search.further(missed, asked, self.rings)
            if not others:
                break
            await self._ask(others, keys, result, asked, deadline, m.Exists)
        return result

    async def wait(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        """Block until all keys are committed, at most `timeout_s`; which are. Ends early for nodes that are
        away.
        """
        with timed("pool wait", pages=len(keys)):
            return await self._wait(keys, timeout_s)

    async def _wait(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        deadline = time.monotonic() + timeout_s
        result = [False] * len(keys)
        missing = list(range(len(keys)))
        while True:
            left = [keys[i] for i in missing]
            slice_s = min(WAIT_SLICE_S, max(0.0, deadline - time.monotonic()))
            for place, found in zip(missing, await self._wait_slice(left, slice_s), strict=True):
                result[place] = found
            missing = self._answerable(keys, [i for i in missing if not result[i]])
            if not missing or time.monotonic() >= deadline or self._closed:
                return result
            await asyncio.sleep(WAIT_PAUSE_S)  # should a node answer at once, this is no race

    async def check(self) -> dict[str, PoolError | None]:
        """Ask every node whether it is there and has the namespace; per node, None or what went wrong."""
        answers = await self._each_node(lambda i, _: m.Ping(i), m.Done, self.config.connect_timeout_s)
        return {node: answer if isinstance(answer, PoolError) else None for node, answer in answers.items()}

    async def status(self) -> dict[str, m.StatusReport]:
        """Status of every reachable node."""
        timeout_s = self.config.exists_timeout_s
        answers = await self._each_node(lambda i, _: m.Status(i), m.StatusReport, timeout_s)
        return {node: answer for node, answer in answers.items() if isinstance(answer, m.StatusReport)}

    async def clear(self) -> int:
        """Drop every page of the namespace on every reachable node; how many went."""
        answers = await self._each_node(m.Clear, m.Done, self.config.exists_timeout_s)
        for node, answer in answers.items():
            if isinstance(answer, PoolRefused):
                logger.warning("pool node %s: clearing the namespace: %s", node, answer)
        return sum(answer.count for answer in answers.values() if isinstance(answer, m.Done))

    def _within(self, timeout_s: float) -> Deadline:
        return Deadline(time.monotonic() + timeout_s, self.config.restart_wait_s)

    # -- pages

    async def get(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> list[bool]:
        """As `PoolClient.get`. Nothing writes into the buffers after the return, also when the task is
        cancelled: then it ends when the read does.
        """
        return await self._move(
            keys, self.config.get_timeout_s, lambda client, within_s: client.get(keys, pages, within_s)
        )

    async def put(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> list[bool]:
        """As `PoolClient.put`. Nothing reads from the buffers after the return; see `get`."""
        return await self._move(
            keys, self.config.put_timeout_s, lambda client, within_s: client.put(keys, pages, within_s)
        )

    async def _move(
        self, keys: Sequence[bytes], timeout_s: float, move: Callable[[PoolClient, float], list[bool]]
    ) -> list[bool]:
        """Run `move` in a thread, when it is its turn, with the seconds left; all False when that does not
        come in time.
        """
        until_s = time.monotonic() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._turn.acquire()
        except TimeoutError:
            return [False] * len(keys)
        try:
            if self._closed:
                return [False] * len(keys)
            moving = asyncio.get_running_loop().run_in_executor(
                self._threads, self._with_pages, move, until_s
            )
            return await _to_the_end(moving)
        finally:
            self._turn.release()

    def _with_pages(self, move: Callable[[PoolClient, float], list[bool]], until_s: float) -> list[bool]:
        """In a thread: making a `PoolClient` may load UCX."""
        with self._making:
            if self._pages is None:
                self._pages = PoolClient(
                    self.config,
                    self.namespace,
                    self._geometry,
                    connector=self._connector,
                    name="async",
                    views=self._views,
                )
        return move(self._pages, max(0.0, until_s - time.monotonic()))

    def close(self) -> None:
        """Close all connections; idempotent. Operations under way end with misses."""
        self._closed = True
        for control in self._open.values():
            control.close()
        self._open.clear()
        with self._making:
            if self._pages is not None:
                self._pages.close()
        self._threads.shutdown(wait=False)

    # -- asking

    async def _wait_slice(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        """Wait a moment at the owners for what the earlier owners do not have."""
        until = time.monotonic() + timeout_s
        # the node answers at `until`; the answer gets a moment more to travel
        deadline = Deadline(until + self.config.exists_timeout_s)
        asked, result = [""] * len(keys), [False] * len(keys)
        rings = self.rings

        def make(request_id: int, namespace: int, part: list[bytes]) -> m.Wait:
            return m.Wait(request_id, namespace, part, max(0.0, until - time.monotonic()))

        if rings.previous is not None:
            await self._ask(rings.earlier(keys), keys, result, asked, deadline, m.Exists)
        waiting = {
            node: left
            for node, places in rings.split(keys).items()
            if (left := [place for place in places if not result[place]])
        }
        return await self._ask(waiting, keys, result, asked, deadline, make)

    def _answerable(self, keys: Sequence[bytes], missing: list[int]) -> list[int]:
        """Those whose owner can tell when they come."""
        owned = self.rings.split([keys[i] for i in missing])
        return sorted(missing[i] for node, places in owned.items() if not self._away(node) for i in places)

    async def _ask(
        self,
        jobs: Mapping[str, list[int]],
        keys: Sequence[bytes],
        result: list[bool],
        asked: list[str],
        deadline: Deadline,
        make: MakeQuestion,
    ) -> list[bool]:
        """Ask each node for the keys at its places; what it answers goes into `result`, its name into
        `asked`.
        """

        async def part(node: str, places: list[int]) -> None:
            for place in places:
                asked[place] = node
            try:
                mask = await self._present(node, [keys[i] for i in places], deadline, make)
            except PoolError as error:
                logger.debug("pool node %s: %s", node, error)
                return
            for place, byte in zip(places, mask, strict=True):
                result[place] = byte == 1

        pieces = [
            part(node, places[start : start + m.MAX_KEYS])
            for node, places in jobs.items()
            for start in range(0, len(places), m.MAX_KEYS)
        ]
        await asyncio.gather(*pieces)
        return result

    async def _present(self, node: str, keys: list[bytes], deadline: Deadline, make: MakeQuestion) -> bytes:
        """The node's mask of the keys. Raises PoolError."""
        while True:
            reply, control = await self._call(node, lambda i, namespace: make(i, namespace, keys), deadline)
            if isinstance(reply, m.Present) and len(reply.mask) == len(keys):
                return reply.mask
            if isinstance(reply, m.Fault) and reply.code == "too_many_waiters":
                # others wait on this connection, some perhaps for nobody any more: their place comes free
                if time.monotonic() + WAITERS_RETRY_S >= deadline.at_s:
                    raise PoolTimeout(f"pool node {node}: {reply.message}")
                await asyncio.sleep(WAITERS_RETRY_S)
                continue
            raise self._refused(node, control, reply)

    async def _each_node(
        self, make: MakeRequest, kind: type[R], timeout_s: float
    ) -> dict[str, R | PoolError]:
        """Every node's answer, or why there is none; all are asked at once."""

        async def one(node: str) -> R | PoolError:
            try:
                reply, control = await self._call(node, make, self._within(timeout_s))
                return reply if isinstance(reply, kind) else self._refused(node, control, reply)
            except PoolError as error:
                return error

        nodes = list(self._addresses())
        return dict(zip(nodes, await asyncio.gather(*map(one, nodes)), strict=True))

    def _refused(self, node: str, control: AsyncControl, reply: m.Reply) -> PoolRefused:
        # a namespace that was dropped, say: the next connection opens it again
        self._drop(node, control)
        text = refusal(reply)
        logger.warning("pool node %s: %s", node, text)
        return PoolRefused(f"pool node {node}: {text}")

    async def _call(self, node: str, make: MakeRequest, deadline: Deadline) -> tuple[m.Reply, AsyncControl]:
        """The node's reply, and the connection that it came by. A connection that turns out to have been
        closed is replaced once, an announced restart is waited for; neither counts against the node. Raises
        PoolError.
        """
        excused = True
        while True:
            control: AsyncControl | None = None
            try:
                control, is_new = await self._control(node, deadline)
                return await self._bounded(node, control, make, deadline.at_s), control
            except PoolRestarting:
                self._drop(node, control, leave_alone=False)
                deadline.put_off()
                now_s = time.monotonic()
                until_s = self._restarting_until_s.setdefault(node, now_s + self.config.restart_wait_s)
                if now_s >= until_s:
                    del self._restarting_until_s[node]
                    self._drop(node, None)
                if now_s + RESTART_RETRY_S >= min(deadline.at_s, until_s):
                    raise
                await asyncio.sleep(RESTART_RETRY_S)
            except PoolUnavailable as error:
                if control is None:
                    raise
                final = not excused or (is_new and not isinstance(error, LastWordsLost))
                self._drop(node, control, leave_alone=final)
                if final:
                    raise
                excused = False

    async def _bounded(self, node: str, control: AsyncControl, make: MakeRequest, deadline: float) -> m.Reply:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise PoolTimeout(f"pool node {node}: connecting took all the time")
        asked_s = time.monotonic()
        try:
            return await control.call(lambda i: make(i, control.namespace), left_s)
        except TimeoutError:
            # A silent node is treated as gone: the next call reconnects or skips it. Not one that has said
            # something else meanwhile, or was given next to no time: others wait on this connection.
            config = self.config
            patience_s = min(config.exists_timeout_s, config.connect_timeout_s) / 2
            if control.read_s < asked_s and time.monotonic() - asked_s >= patience_s:
                self._drop(node, control)
            raise PoolTimeout(f"pool node {node} did not answer in {left_s:.1f} s") from None

    # -- connections

    def _addresses(self) -> dict[str, str]:
        """Where each node is: as configured, else as the view says."""
        known = self.rings.addresses
        if len(known) <= 1:
            known = {**self._seeds, **known}  # nobody else would tell when the others are back
        return {node: self._seeds.get(node, address) for node, address in known.items()}

    def _away(self, node: str) -> bool:
        return time.monotonic() < self._retry_at_s.get(node, 0.0)

    async def _control(self, node: str, deadline: Deadline) -> tuple[AsyncControl, bool]:
        """The connection to the node, and whether it is new. Raises PoolError."""
        if (control := self._alive(node)) is not None:
            return control, False
        async with self._connecting.setdefault(node, asyncio.Lock()):
            if (control := self._alive(node)) is not None:
                return control, False
            if self._closed:
                raise PoolUnavailable(f"pool node {node}: the client is closed")
            if self._away(node):
                raise PoolUnavailable(f"pool node {node} is down")
            address = self._addresses().get(node)
            if address is None:
                raise PoolUnavailable(f"pool node {node} has left the pool")
            restarts = time.monotonic() < self._restarting_until_s.get(node, 0.0)
            if restarts:
                deadline.put_off()
            if time.monotonic() >= deadline.at_s:
                # others took it, connecting: that says nothing of the node
                raise PoolTimeout(f"pool node {node}: no time was left to ask it")
            return await self._connect(node, address, deadline.at_s, restarts), True

    def _alive(self, node: str) -> AsyncControl | None:
        control = self._open.get(node)
        return control if control is not None and not control.broken else None

    async def _connect(self, node: str, address: str, deadline: float, restarts: bool) -> AsyncControl:
        hello = make_hello("worker", "", "none", self.config.token, views=True)
        timeout_s = min(self.config.connect_timeout_s, max(0.0, deadline - time.monotonic()))
        if restarts:  # an upgraded node lets us wait in its queue until it is there
            timeout_s = max(0.0, min(deadline, self._restarting_until_s[node]) - time.monotonic())
        until_s = time.monotonic() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                control = await self._greeted(address, hello)
        except PoolRestarting:
            raise
        except (TimeoutError, PoolError, FrameError) as error:
            excused = restarts or time.monotonic() > until_s + OVERSLEPT_S  # the loop was busy: our own doing
            if not (excused and isinstance(error, TimeoutError)):
                self._retry_at_s[node] = time.monotonic() + self.config.retry_after_s
                self._views.on_unreachable(node)
            if isinstance(error, TimeoutError):
                raise PoolTimeout(f"pool node {node} does not answer") from None
            raise
        self._views.on_view(control.welcome, control.welcome)
        self._restarting_until_s.pop(node, None)
        self._open[node] = control
        return control

    async def _greeted(self, address: str, hello: m.Hello) -> AsyncControl:
        try:
            return await AsyncControl.connect(
                address, hello, self.namespace, self._geometry, self._views.on_view
            )
        except LastWordsLost:
            await asyncio.sleep(RESTART_RETRY_S)
            return await AsyncControl.connect(
                address, hello, self.namespace, self._geometry, self._views.on_view
            )

    def _drop(self, node: str, control: AsyncControl | None, *, leave_alone: bool = True) -> None:
        if control is not None:
            control.close()
            if self._open.get(node) is control:
                del self._open[node]
        if leave_alone:
            self._retry_at_s[node] = time.monotonic() + self.config.retry_after_s
            self._views.on_unreachable(node)


async def _to_the_end(moving: asyncio.Future[T]) -> T:
    """Wait for it even if this task is cancelled meanwhile: a thread uses the caller's buffers, until its
    deadline at most.
    """
    try:
        return await asyncio.shield(moving)
    except asyncio.CancelledError:
        while not moving.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([moving])
        raise
