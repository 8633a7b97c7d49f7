"""The asyncio pool client, for programs with an event loop: it asks, waits, and erases.

It uses one connection per node, shared by all tasks (async_link.py). Page bytes are moved by a `PoolClient`,
since copying and hashing block. The keys of a node that is down count as absent. Every call ends at its
deadline, which an upgrade of a node extends, as in `PoolClient` (deadline.py).

A wait is divided into requests of WAIT_SLICE_S. So a cancelled task leaves nothing at the node for long, and
each request goes to the nodes that own the pages at that time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import starmap
from typing import Final, NamedTuple, TypeAlias

from pdserve.errors import PoolError, PoolTimeout, PoolUnavailable
from pdserve.kvpool.client.async_link import AsyncNodeLink
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.kvpool.client.deadline import Deadline
from pdserve.kvpool.client.routing import Rings, Search
from pdserve.kvpool.client.topology import SharedViews
from pdserve.kvpool.namespaces.tenants import name_of, split
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.transports.async_control import AsyncControl
from pdserve.kvpool.transports.session import make_hello
from pdserve.security.log_text import printable
from pdserve.security.tls import Certificates
from pdserve.tracing import timed

logger = logging.getLogger(__name__)
MakeQuestion: TypeAlias = Callable[[int, int, list[bytes]], m.Exists | m.Wait]
Note: TypeAlias = Callable[[str, Sequence[int], m.Present], None]
WAIT_SLICE_S: Final = 1.0
"""A wait is divided into requests of this length. So it follows moving pages, and an abandoned wait ends soon
at the node."""
WAIT_PAUSE_S: Final = 0.001
WAITERS_RETRY_S: Final = 0.05
LOAD_PAUSE_S: Final = 0.02
"""Between two questions for pages that are being loaded."""
ERASE_TIMEOUT_S: Final = 70.0
"""A node answers an erasure after 60 s at most (core/erasures.py), and another 4 s for its list."""
MEMORY: Final = "dram"


class Place(NamedTuple):
    """Where a page is. `tier`: "dram", or the kind of a tier of the node."""

    node: str
    tier: str


class AsyncPoolClient:
    """One namespace of the pool over all its nodes. Used in one event loop."""

    def __init__(self, config: PoolClientConfig, namespace: str, geometry: dict[str, str]) -> None:
        """Connects lazily. Raises ConfigError if the configured nodes form no valid ring."""
        self.config = config
        self.namespace = namespace
        self.geometry = geometry
        self._certificates = Certificates(config.tls)
        self._views = SharedViews(config)
        self._views.subscribe(self._follow)
        self._seeds = {ref.node: ref.address for ref in config.nodes}
        self._links: dict[str, AsyncNodeLink] = {}  # links to nodes that were used
        self._closed = False

    @property
    def rings(self) -> Rings:
        """The nodes as this client knows them now."""
        return self._views.rings

    # -- questions

    async def exists(self, keys: Sequence[bytes], tenant: str = "") -> list[bool]:
        """For each key: whether it is committed. False if its owner cannot be reached. `tenant`: whose pages
        are asked for, here and below; empty: those of nobody.
        """
        with timed("pool exists", pages=len(keys)):
            return await self._exists(keys, tenant)

    async def places(self, keys: Sequence[bytes], move: int = 0, tenant: str = "") -> list[Place | None]:
        """For each key: where its page is. None: nowhere, or its owner cannot be reached. `move`: as in
        `Exists`, for at most MAX_KEPT_KEYS keys.
        """
        places: list[Place | None] = [None] * len(keys)

        def note(node: str, asked: Sequence[int], reply: m.Present) -> None:
            for index, number in zip(asked, reply.places or reply.mask, strict=False):
                if number != m.NOWHERE:
                    places[index] = Place(node, _tier(reply, number))

        def make(request_id: int, namespace: int, part: list[bytes]) -> m.Exists:
            return m.Exists(request_id, namespace, part, places=True, move=move)

        await self._exists(keys, tenant, make, note)
        return places

    async def _exists(
        self, keys: Sequence[bytes], tenant: str, make: MakeQuestion = m.Exists, note: Note | None = None
    ) -> list[bool]:
        deadline = self._within(self.config.exists_timeout_s)
        asked = [""] * len(keys)
        rings = self.rings
        search = Search(keys, rings)
        result = [False] * len(keys)
        await self._ask(rings.split(keys), keys, result, asked, deadline, make, tenant, note)
        while missed := [i for i, found in enumerate(result) if not found]:
            others = search.further(missed, asked, self.rings)
            if not others:
                break
            await self._ask(others, keys, result, asked, deadline, make, tenant, note)
        return result

    async def wait(self, keys: Sequence[bytes], timeout_s: float, tenant: str = "") -> list[bool]:
        """Wait until all keys are committed, for at most `timeout_s`. Returns whether each key is.

        Keys of nodes that cannot be reached are not waited for.
        """
        with timed("pool wait", pages=len(keys)):
            return await self._wait(keys, timeout_s, tenant)

    async def _wait(self, keys: Sequence[bytes], timeout_s: float, tenant: str) -> list[bool]:
        deadline = time.monotonic() + timeout_s
        result = [False] * len(keys)
        missing = list(range(len(keys)))
        while True:
            left = [keys[i] for i in missing]
            slice_s = min(WAIT_SLICE_S, max(0.0, deadline - time.monotonic()))
            for index, found in zip(missing, await self._wait_slice(left, slice_s, tenant), strict=True):
                result[index] = found
            missing = self._answerable(keys, [i for i in missing if not result[i]])
            if not missing or time.monotonic() >= deadline or self._closed:
                return result
            await asyncio.sleep(WAIT_PAUSE_S)  # avoids a busy loop if a node answers at once

    async def fates(self, keys: Sequence[bytes], tenant: str = "") -> list[m.Fate | None]:
        """For each of a few keys: what became of the page at the node that owns it now. None: nobody tells.

        At most `MAX_FATES` keys.
        """
        deadline = self._within(self.config.exists_timeout_s)
        result: list[m.Fate | None] = [None] * len(keys)

        async def part(node: str, indices: list[int]) -> None:
            own = [keys[index] for index in indices]
            try:
                link, name = self._link(node), self._name(tenant)
                reply = await link.ask(lambda i, number: m.Exists(i, number, own, True), deadline, name)
            except PoolError as error:
                logger.debug("pool node %s: %s", node, error)
                return
            if isinstance(reply, m.Present) and len(reply.fates) == len(own):
                for index, fate in zip(indices, reply.fates, strict=True):
                    result[index] = fate

        await asyncio.gather(*starmap(part, self.rings.split(keys[: m.MAX_FATES]).items()))
        return result

    async def raise_pages(self, keys: Sequence[bytes], timeout_s: float, tenant: str = "") -> int:
        """Have pages that only tiers have loaded into memory, the first ones first, for at most `timeout_s`.
        Returns how many of the keys were in memory then.
        """
        deadline_s = time.monotonic() + timeout_s
        in_memory, left = 0, list(keys)
        while left:
            some, rest = left[: m.MAX_KEPT_KEYS], left[m.MAX_KEPT_KEYS :]
            found = await self.places(some, m.UP, tenant)
            in_memory += sum(place is not None and place.tier == MEMORY for place in found)
            below = [
                key
                for key, place in zip(some, found, strict=True)
                if place is not None and place.tier != MEMORY
            ]
            left = below + rest
            if below and time.monotonic() >= deadline_s:
                break
            if below:
                await asyncio.sleep(LOAD_PAUSE_S)
        return in_memory

    async def keep(self, keys: Sequence[bytes], keep_s: float, tenant: str = "") -> int:
        """Have those pages that are in memory at the nodes that own them kept for `keep_s` from now on;
        below 0: no longer. Returns how many of the keys are there. A node that cannot be reached, or
        keeps too many, keeps none: nothing rests on it.
        """
        return await self._hint(keys, tenant, keep_s=keep_s)

    async def demote(self, keys: Sequence[bytes], tenant: str = "") -> int:
        """Have those pages that are in memory evicted before others, unless they are kept. The rest as in
        `keep`.
        """
        return await self._hint(keys, tenant, move=m.DOWN)

    async def _hint(self, keys: Sequence[bytes], tenant: str, *, keep_s: float = 0.0, move: int = 0) -> int:
        def make(request_id: int, namespace: int, part: list[bytes]) -> m.Exists:
            return m.Exists(request_id, namespace, part, keep_s=keep_s, move=move)

        there = 0
        for start in range(0, len(keys), m.MAX_KEPT_KEYS):
            some = keys[start : start + m.MAX_KEPT_KEYS]
            deadline = self._within(self.config.exists_timeout_s)
            asked, found = [""] * len(some), [False] * len(some)
            there += sum(await self._ask(self.rings.split(some), some, found, asked, deadline, make, tenant))
        return there

    async def erase(self, keys: Sequence[bytes], tenant: str = "") -> dict[str, int | PoolError]:
        """Have every node erase its copies of these pages. By node, how many there were once nothing of them
        is left, or why it cannot say so.
        """
        parts = [keys[start : start + m.MAX_KEYS] for start in range(0, len(keys), m.MAX_KEYS)]
        makes = [partial(_erase, part) for part in parts]
        return await self._each(makes, self._name(tenant))

    async def erase_tenant(self, tenant: str) -> dict[str, int | PoolError]:
        """Have every node erase all pages of the tenant in this namespace. The rest as in `erase`."""
        name = name_of(self.namespace, tenant)
        return await self._each([lambda i, _: m.DropNamespace(i, name)], "")

    async def tenants(self) -> dict[str, dict[str, tuple[int, int]] | PoolError]:
        """By node and tenant, bytes in memory and in tiers; of nobody under the empty name."""

        async def one(node: str) -> dict[str, tuple[int, int]] | PoolError:
            try:
                reply = await self._link(node).ask(
                    lambda i, _: m.Status(i), self._within(self.config.connect_timeout_s)
                )
            except PoolError as error:
                return error
            if not isinstance(reply, m.StatusReport):
                return self._link(node).refused(reply)
            named = {split(space.name): space for space in reply.namespaces}
            return {
                tenant: (space.slot_bytes, space.tier_bytes)
                for (model, tenant), space in named.items()
                if model == self.namespace
            }

        nodes = list(self._addresses())
        return dict(zip(nodes, await asyncio.gather(*map(one, nodes)), strict=True))

    async def _each(
        self, makes: Sequence[Callable[[int, int], m.Request]], name: str
    ) -> dict[str, int | PoolError]:
        """The sum of the counts that each node answers these requests with, one after the other."""

        async def one(node: str) -> int | PoolError:
            count = 0
            try:
                for make in makes:
                    reply = await self._link(node).ask(make, self._within(ERASE_TIMEOUT_S), name)
                    if not isinstance(reply, m.Done):
                        return self._link(node).refused(reply)
                    count += reply.count
            except PoolError as error:
                return error
            return count

        nodes = list(self._addresses())
        return dict(zip(nodes, await asyncio.gather(*map(one, nodes)), strict=True))

    async def check(self) -> dict[str, PoolError | None]:
        """Check that every node serves the namespace. Returns None or the error for each node."""

        async def one(node: str) -> PoolError | None:
            try:
                link = self._link(node)
                reply = await link.ask(lambda i, _: m.Ping(i), self._within(self.config.connect_timeout_s))
                return None if isinstance(reply, m.Done) else link.refused(reply)
            except PoolError as error:
                return error

        nodes = list(self._addresses())
        return dict(zip(nodes, await asyncio.gather(*map(one, nodes)), strict=True))

    def close(self) -> None:
        """Close all connections. Idempotent. Operations in progress end with misses."""
        self._closed = True
        for link in self._links.values():
            link.close()

    def _within(self, timeout_s: float) -> Deadline:
        return Deadline(time.monotonic() + timeout_s, self.config.restart_wait_s)

    # -- asking

    async def _wait_slice(self, keys: Sequence[bytes], timeout_s: float, tenant: str) -> list[bool]:
        """Wait for one slice at the owners for keys that the earlier owners do not have."""
        until = time.monotonic() + timeout_s
        # the node answers at `until`; the answer gets a short time more to arrive
        deadline = Deadline(until + self.config.exists_timeout_s)
        asked, result = [""] * len(keys), [False] * len(keys)
        rings = self.rings

        def make(request_id: int, namespace: int, part: list[bytes]) -> m.Wait:
            return m.Wait(request_id, namespace, part, max(0.0, until - time.monotonic()))

        if rings.previous is not None:
            await self._ask(rings.earlier(keys), keys, result, asked, deadline, m.Exists, tenant)
        waiting = {
            node: left
            for node, indices in rings.split(keys).items()
            if (left := [index for index in indices if not result[index]])
        }
        return await self._ask(waiting, keys, result, asked, deadline, make, tenant)

    def _answerable(self, keys: Sequence[bytes], missing: list[int]) -> list[int]:
        """The indices in `missing` whose owner can report a later commit."""

        def reachable(node: str) -> bool:
            return node not in self._links or self._links[node].reachable

        owned = self.rings.split([keys[i] for i in missing])
        return sorted(missing[i] for node, indices in owned.items() if reachable(node) for i in indices)

    async def _ask(
        self,
        jobs: Mapping[str, list[int]],
        keys: Sequence[bytes],
        result: list[bool],
        asked: list[str],
        deadline: Deadline,
        make: MakeQuestion,
        tenant: str,
        note: Note | None = None,
    ) -> list[bool]:
        """Ask each node for its keys, given by index.

        Store answers in `result`, the node's name in `asked`. `note` is called with each answer.
        """

        async def part(node: str, indices: list[int]) -> None:
            for index in indices:
                asked[index] = node
            try:
                reply = await self._present(node, [keys[i] for i in indices], deadline, make, tenant)
            except PoolError as error:
                logger.debug("pool node %s: %s", node, error)
                return
            for index, byte in zip(indices, reply.mask, strict=True):
                result[index] = byte == 1
            if note is not None:
                note(node, indices, reply)

        pieces = [
            part(node, indices[start : start + m.MAX_KEYS])
            for node, indices in jobs.items()
            for start in range(0, len(indices), m.MAX_KEYS)
        ]
        await asyncio.gather(*pieces)
        return result

    async def _present(
        self, node: str, keys: list[bytes], deadline: Deadline, make: MakeQuestion, tenant: str
    ) -> m.Present:
        """The node's answer about the keys. Raises PoolError."""
        link, name = self._link(node), self._name(tenant)
        while True:
            reply = await link.ask(lambda i, namespace: make(i, namespace, keys), deadline, name)
            if isinstance(reply, m.Present) and len(reply.mask) == len(keys):
                return reply
            if not isinstance(reply, m.Fault) or reply.code != "too_many_waiters":
                raise link.refused(reply)
            # waits of cancelled tasks still count at the node until their slice ends
            if time.monotonic() + WAITERS_RETRY_S >= deadline.at_s:
                raise PoolTimeout(f"pool node {node}: {printable(reply.message)}")
            await asyncio.sleep(WAITERS_RETRY_S)

    # -- nodes

    def _name(self, tenant: str) -> str:
        """As `AsyncNodeLink.ask` wants it."""
        return name_of(self.namespace, tenant) if tenant else ""

    def _addresses(self) -> dict[str, str]:
        """The address of each node: as configured, else as in the view."""
        return {node: first for node, (first, *_) in self.rings.reachable_at(self._seeds).items()}

    def _link(self, node: str) -> AsyncNodeLink:
        """The link to a node. Raises PoolUnavailable if the node left or the client is closed."""
        if self._closed:
            raise PoolUnavailable(f"pool node {node}: the client is closed")
        if node not in self._addresses():
            raise PoolUnavailable(f"pool node {node} has left the pool")
        link = self._links.get(node)
        if link is None:
            config = self.config
            link = self._links[node] = AsyncNodeLink(
                node,
                partial(self._connect, node),
                connect_timeout_s=config.connect_timeout_s,
                patience_s=min(config.exists_timeout_s, config.connect_timeout_s) / 2,
                retry_after_s=config.retry_after_s,
                restart_wait_s=config.restart_wait_s,
                on_lost=self._views.on_unreachable,
            )
        return link

    async def _connect(self, node: str) -> AsyncControl:
        address = self._addresses().get(node)
        if address is None:
            raise PoolUnavailable(f"pool node {node} has left the pool")
        hello = make_hello("worker", "", "none", self.config.token, views=True)
        on_view = self._views.on_view
        tls = self._certificates.client_context
        control = await AsyncControl.connect(address, hello, self.namespace, self.geometry, on_view, tls)
        on_view(control.welcome, control.welcome)
        return control

    def _follow(self) -> None:
        """The view changed: end the links to nodes that left."""
        for node in self._links.keys() - self._addresses().keys():
            self._links.pop(node).close()


def _erase(keys: Sequence[bytes], request_id: int, namespace: int) -> m.Erase:
    return m.Erase(request_id, namespace, list(keys))


def _tier(reply: m.Present, number: int) -> str:
    """What a place in the answer stands for. A node that does not say it is taken to mean its memory."""
    tier = number - m.IN_MEMORY - 1
    return printable(reply.tiers[tier]) if 0 <= tier < len(reply.tiers) else MEMORY
