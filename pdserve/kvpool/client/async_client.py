"""The asyncio pool client, for programs with an event loop: it asks, waits, and erases.

It asks one node, the nearest (doors.py), over one connection that all tasks share (async_link.py). Page bytes
are moved by a `PoolClient`, since copying and hashing block. The keys of a node that is down count as absent.
Every call ends at its deadline, which an upgrade of the node extends, as in `PoolClient` (deadline.py).

A wait is divided into requests of WAIT_SLICE_S. So a cancelled task leaves nothing at the node for long, and
each request is of the pool as it is at that time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias

from pdserve.errors import PoolError, PoolTimeout, PoolUnavailable
from pdserve.kvpool.client.async_link import AsyncNodeLink
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.client.deadline import Deadline
from pdserve.kvpool.client.doors import Doors
from pdserve.kvpool.namespaces.tenants import name_of, split
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import DEAD
from pdserve.kvpool.transports.async_control import AsyncControl
from pdserve.kvpool.transports.session import make_hello
from pdserve.security.log_text import printable
from pdserve.security.tls import Certificates
from pdserve.tracing import timed

logger = logging.getLogger(__name__)
MakeQuestion: TypeAlias = Callable[[int, int, list[bytes]], m.Exists | m.Wait]
WAIT_SLICE_S: Final = 1.0
"""A wait is divided into requests of this length: an abandoned one ends soon at the node."""
WAIT_PAUSE_S: Final = 0.001
WAITERS_RETRY_S: Final = 0.05
LOAD_PAUSE_S: Final = 0.02
"""Between two questions for pages that are being loaded."""
ERASE_TIMEOUT_S: Final = 75.0
"""A node answers an erasure after 60 s at most (core/durable_answers.py), another 4 s for its list, and some
for the other nodes.
"""
MEMORY: Final = "dram"


class AsyncPoolClient:
    """One namespace of the pool. Used in one event loop."""

    def __init__(self, config: PoolClientConfig, namespace: str, geometry: dict[str, str]) -> None:
        """Connects lazily. Raises ConfigError."""
        self.config = config
        self.namespace = namespace
        self.geometry = geometry
        self._certificates = Certificates(config.tls)
        self._doors = Doors(config.nodes, self._link)
        self._closed = False

    # -- questions

    async def exists(self, keys: Sequence[bytes], tenant: str = "") -> list[bool]:
        """For each key: whether it is committed, on any node. False if the node cannot be reached. `tenant`:
        whose pages are asked for, here and below; empty: those of nobody.
        """
        with timed("pool exists", pages=len(keys)):
            found = [False] * len(keys)
            for start, reply in await self._ask(keys, m.Exists, tenant):
                found[start : start + len(reply.mask)] = _bools(reply)
            return found

    async def places(self, keys: Sequence[bytes], move: int = 0, tenant: str = "") -> list[str | None]:
        """For each key: where its page is, "dram" or the kind of a tier. None: nowhere, or the node cannot be
        reached. `move`: as in `Exists`, for at most MAX_KEPT_KEYS keys.
        """
        places: list[str | None] = [None] * len(keys)

        def make(request_id: int, namespace: int, part: list[bytes]) -> m.Exists:
            return m.Exists(request_id, namespace, part, places=True, move=move)

        for start, reply in await self._ask(keys, make, tenant):
            for index, number in enumerate(reply.places or reply.mask, start):
                if number != m.NOWHERE:
                    places[index] = _tier(reply, number)
        return places

    async def wait(self, keys: Sequence[bytes], timeout_s: float, tenant: str = "") -> list[bool]:
        """Wait until all keys are committed, for at most `timeout_s`. Returns whether each key is. A node
        that cannot be reached is not waited for.
        """
        with timed("pool wait", pages=len(keys)):
            return await self._wait(keys, timeout_s, tenant)

    async def _wait(self, keys: Sequence[bytes], timeout_s: float, tenant: str) -> list[bool]:
        deadline = time.monotonic() + timeout_s
        result = [False] * len(keys)
        missing = list(range(len(keys)))
        while True:
            until = time.monotonic() + min(WAIT_SLICE_S, max(0.0, deadline - time.monotonic()))

            def make(request_id: int, namespace: int, part: list[bytes], until: float = until) -> m.Wait:
                return m.Wait(request_id, namespace, part, max(0.0, until - time.monotonic()))

            # the node answers at `until`; the answer gets a short time more to arrive
            slice_ends = Deadline(until + self.config.exists_timeout_s)
            for start, reply in await self._ask([keys[i] for i in missing], make, tenant, slice_ends):
                for index, found in zip(missing[start:], _bools(reply), strict=False):
                    result[index] = found
            missing = [index for index in missing if not result[index]]
            is_useless = self._closed or not any(link.reachable for link in self._doors)
            if not missing or is_useless or time.monotonic() >= deadline:
                return result
            await asyncio.sleep(WAIT_PAUSE_S)  # avoids a busy loop if the node answers at once

    async def fates(self, keys: Sequence[bytes], tenant: str = "") -> list[m.Fate | None]:
        """For each of a few keys: what became of the page at the node that owns it now. None: nobody tells.

        At most `MAX_FATES` keys.
        """
        result: list[m.Fate | None] = [None] * len(keys)

        def make(request_id: int, namespace: int, part: list[bytes]) -> m.Exists:
            return m.Exists(request_id, namespace, part, fates=True)

        for start, reply in await self._ask(keys[: m.MAX_FATES], make, tenant):
            result[start : start + len(reply.fates)] = reply.fates
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
            in_memory += found.count(MEMORY)
            below = [key for key, tier in zip(some, found, strict=True) if tier not in (None, MEMORY)]
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
            replies = await self._ask(keys[start : start + m.MAX_KEPT_KEYS], make, tenant)
            there += sum(sum(_bools(reply)) for _, reply in replies)
        return there

    async def erase(self, keys: Sequence[bytes], tenant: str = "") -> dict[str, int | PoolError]:
        """Have all nodes erase their copies of these pages. How many there were once nothing of them is left,
        or why that cannot be said, by the name of the node that was asked; and an error for each that is
        away.
        """
        parts = [list(keys[start : start + m.MAX_KEYS]) for start in range(0, len(keys), m.MAX_KEYS)]
        makes = [partial(_erase, part) for part in parts]
        return await self._count(makes, self._name(tenant))

    async def erase_tenant(self, tenant: str) -> dict[str, int | PoolError]:
        """Have all nodes erase all pages of the tenant in this namespace. The rest as in `erase`."""
        name = name_of(self.namespace, tenant)
        return await self._count([lambda i, _: m.DropNamespace(i, name)], "")

    async def _count(
        self, makes: Sequence[Callable[[int, int], m.Request]], name: str
    ) -> dict[str, int | PoolError]:
        """The sum of the counts that these requests are answered with, one after the other."""
        count, node = 0, ""
        try:
            link = self._doors.chosen
            node = link.name
            for make in makes:
                reply = await link.ask(make, self._within(ERASE_TIMEOUT_S), name)
                if not isinstance(reply, m.Done):
                    return {node: link.refused(reply)}
                count += reply.count
            said = await link.ask(lambda i, _: m.Status(i), self._within(self.config.connect_timeout_s))
        except PoolError as error:
            return {node: error}
        members = said.members if isinstance(said, m.StatusReport) else []
        away = [member.node for member in members if member.status == DEAD]
        text = "pool node {} is away: it erases them when it returns"
        return {node: count, **{one: PoolUnavailable(text.format(one)) for one in away}}

    async def tenants(self) -> dict[str, dict[str, tuple[int, int]] | PoolError]:
        """By configured node and tenant, bytes in memory and in tiers; of nobody under the empty name."""

        async def one(link: AsyncNodeLink) -> dict[str, tuple[int, int]] | PoolError:
            try:
                reply = await link.ask(lambda i, _: m.Status(i), self._within(self.config.connect_timeout_s))
            except PoolError as error:
                return error
            if not isinstance(reply, m.StatusReport):
                return link.refused(reply)
            named = {split(space.name): space for space in reply.namespaces}
            return {
                tenant: (space.slot_bytes, space.tier_bytes)
                for (model, tenant), space in named.items()
                if model == self.namespace
            }

        links = list(self._doors)
        found = await asyncio.gather(*map(one, links))
        return {link.name: said for link, said in zip(links, found, strict=True)}

    async def check(self) -> dict[str, PoolError | None]:
        """Whether the node that is asked serves the namespace: None or the error, by its name."""
        if not self._doors.links:
            return {}
        try:
            link, reply = await self._reply(
                lambda i, _: m.Ping(i), self._within(self.config.connect_timeout_s)
            )
            return {link.name: None if isinstance(reply, m.Done) else link.refused(reply)}
        except PoolError as error:
            return {self._doors.chosen.name: error}

    def close(self) -> None:
        """Close all connections. Idempotent. Operations in progress end with misses."""
        self._closed = True
        self._doors.close()

    # -- asking

    def _within(self, timeout_s: float) -> Deadline:
        return Deadline(time.monotonic() + timeout_s, self.config.restart_wait_s)

    async def _ask(
        self, keys: Sequence[bytes], make: MakeQuestion, tenant: str, deadline: Deadline | None = None
    ) -> list[tuple[int, m.Present]]:
        """The node's answers about the keys, a message's worth each, with the index of its first key. A
        message without an answer is left out.
        """
        within = deadline or self._within(self.config.exists_timeout_s)
        starts = range(0, len(keys), m.MAX_KEYS)
        name = self._name(tenant)
        parts = [self._present(list(keys[at : at + m.MAX_KEYS]), within, make, name) for at in starts]
        replies = await asyncio.gather(*parts)
        return [(start, reply) for start, reply in zip(starts, replies, strict=True) if reply is not None]

    async def _present(
        self, keys: list[bytes], deadline: Deadline, make: MakeQuestion, name: str
    ) -> m.Present | None:
        """The node's answer about the keys."""
        try:
            while True:
                link, reply = await self._reply(lambda i, number: make(i, number, keys), deadline, name)
                if isinstance(reply, m.Present) and len(reply.mask) == len(keys):
                    return reply
                if not isinstance(reply, m.Fault) or reply.code != "too_many_waiters":
                    raise link.refused(reply)
                # waits of cancelled tasks still count at the node until their slice ends
                if time.monotonic() + WAITERS_RETRY_S >= deadline.at_s:
                    raise PoolTimeout(f"pool node {link.name}: {printable(reply.message)}")
                await asyncio.sleep(WAITERS_RETRY_S)
        except PoolError as error:
            logger.debug("%s", error)
            return None

    async def _reply(
        self, make: Callable[[int, int], m.Request], deadline: Deadline, name: str = ""
    ) -> tuple[AsyncNodeLink, m.Reply]:
        """The reply of the nearest node, or if that fails at once of the next one. Raises PoolError."""
        link = self._doors.chosen
        try:
            return link, await link.ask(make, deadline, name)
        except PoolUnavailable:
            if (other := self._doors.after(link)) is None:
                raise
        return other, await other.ask(make, deadline, name)

    # -- the node

    def _name(self, tenant: str) -> str:
        """As `AsyncNodeLink.ask` wants it."""
        return name_of(self.namespace, tenant) if tenant else ""

    def _link(self, ref: PoolNodeRef) -> AsyncNodeLink:
        config = self.config
        return AsyncNodeLink(
            ref.node,
            partial(self._connect, ref.address),
            connect_timeout_s=config.connect_timeout_s,
            patience_s=min(config.exists_timeout_s, config.connect_timeout_s) / 2,
            retry_after_s=config.retry_after_s,
            restart_wait_s=config.restart_wait_s,
        )

    async def _connect(self, address: str) -> AsyncControl:
        if self._closed:
            raise PoolUnavailable("the client is closed")
        hello = make_hello("worker", "", "none", self.config.token)
        tls = self._certificates.client_context
        control = await AsyncControl.connect(address, hello, self.namespace, self.geometry, tls)
        self._doors.learn(control.welcome.nodes)
        return control


def _erase(keys: list[bytes], request_id: int, namespace: int) -> m.Erase:
    return m.Erase(request_id, namespace, keys)


def _bools(reply: m.Present) -> list[bool]:
    return [byte == 1 for byte in reply.mask]


def _tier(reply: m.Present, number: int) -> str:
    """What a place in the answer stands for. A node that does not say it is taken to mean its memory."""
    tier = number - m.IN_MEMORY - 1
    return printable(reply.tiers[tier]) if 0 <= tier < len(reply.tiers) else MEMORY
