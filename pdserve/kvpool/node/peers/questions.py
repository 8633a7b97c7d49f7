"""Questions of this node's clients that other nodes answer: carries out AskOwners and WatchOwners, and has
pages dropped everywhere.

One message for each node that is asked, over one control connection to it that all clients share. A node that
does not answer in time knows of no page.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

from msgspec.structs import replace

from pdserve.errors import PdserveError, PoolRefused, RequestRefused
from pdserve.kvpool.cluster.membership import Cluster
from pdserve.kvpool.core.events import AskOwners, Event, PagesSeen, WatchOwners
from pdserve.kvpool.namespaces.catalog import Namespaces
from pdserve.kvpool.node.peers.channels import PeerControls
from pdserve.kvpool.node.peers.page_push import LocalSession
from pdserve.kvpool.node.peers.peer_link import Space, address_of, space_of
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.frames import expected
from pdserve.kvpool.protocol.messages import Hello
from pdserve.security.tls import Certificates

logger = logging.getLogger(__name__)
R = TypeVar("R", bound=m.Reply)
Dropping: TypeAlias = m.Clear | m.Discard | m.Erase | m.DropNamespace

ASK_TIMEOUT_S: Final = 0.5
"""Clients wait twice as long."""
WATCH_MARGIN_S: Final = 0.05
"""An answer is on its way for so long at most, or is of no use."""
DROP_TIMEOUT_S: Final = 66.0
"""A node answers an erasure after 60 s at most (core/durable_answers.py), and another 4 s for its list."""
ROUNDS: Final = 2
MAX_TASKS: Final = 4096


class Questions:
    """`local`: the node's session with itself. `answer` sends a reply to a client, `feed` gives events to the
    node's state. Lives in its event loop.
    """

    def __init__(
        self,
        name: str,
        hello: Hello,
        certificates: Certificates,
        cluster: Cluster,
        namespaces: Namespaces,
        local: LocalSession,
        answer: Callable[[int, m.Reply], None],
        feed: Callable[[Event], None],
    ) -> None:
        self._name = name
        self._links = PeerControls(hello, certificates)
        self._cluster = cluster
        self._namespaces = namespaces
        self._local = local
        self._answer = answer
        self._feed = feed
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers: dict[str, tuple[int, dict[tuple[str, int], int]]] = {}  # by peer: incarnation, numbers

    def ask(self, action: AskOwners) -> None:
        """An action of NodeState. The client gets its answer in any case."""
        if not self._spawn(self._ask(action)):
            self._answer(action.connection, action.present)

    def watch(self, action: WatchOwners) -> None:
        """An action of NodeState."""
        for node, keys in action.others.items():
            self._spawn(self._watch(node, action.namespace, keys, action.timeout_s - WATCH_MARGIN_S))

    def drop(self, connection: int, request: Dropping) -> None:
        """Have all nodes drop pages for a client, which may have that done. It is answered when all that live
        have done it, or with a Fault.

        Twice: what a node read meanwhile from one that had not done it yet goes the second time.
        """
        if not self._spawn(self._drop(connection, request)):
            self._answer(connection, m.Fault(request.id, "overloaded", f"node {self._name} asks too much"))

    async def close(self) -> None:
        """Ask nothing more. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._links.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> bool:
        if len(self._tasks) >= MAX_TASKS:
            work.close()
            return False
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def _ask(self, action: AskOwners) -> None:
        request = action.request

        async def one(node: str, indices: list[int]) -> tuple[list[int], m.Present] | None:
            keys = [request.keys[index] for index in indices]
            fates = request.fates and indices[0] < m.MAX_FATES

            def make(request_id: int, number: int) -> m.Exists:
                return replace(request, id=request_id, namespace=number, keys=keys, fates=fates)

            try:
                space = space_of(self._namespaces, request.namespace)
                present = await self._call(node, space, make, m.Present, ASK_TIMEOUT_S)
            except PdserveError as error:
                logger.debug("node %s: asking %s: %s", self._name, node, error)
                return None
            return indices, present

        answers = await asyncio.gather(*(one(node, indices) for node, indices in action.others.items()))
        present = action.present
        for answer in answers:
            if answer is not None:
                present = joined(present, *answer)
        self._answer(action.connection, present)

    async def _drop(self, connection: int, request: Dropping) -> None:
        count, failed = 0, dict[str, BaseException]()
        for _ in range(ROUNDS):
            # this node last: it reads from the others; and in any case, whatever becomes of them
            for node, done in (await self._drop_there(request)).items():
                if isinstance(done, m.Done):
                    count += done.count
                else:
                    failed[node] = done
            try:
                reply = await self._local.call(lambda i: replace(request, id=i))
                count += expected(reply, m.Done, self._name).count
            except PdserveError as error:
                failed[self._name] = error
        if not failed:
            self._answer(connection, m.Done(request.id, count))
            return
        codes = {error.code if isinstance(error, RequestRefused) else "" for error in failed.values()}
        code = (codes.pop() if len(codes) == 1 else "") or "not_everywhere"
        text = "; ".join(f"{node}: {error}" for node, error in failed.items())
        self._answer(connection, m.Fault(request.id, code, text))

    async def _drop_there(self, request: Dropping) -> dict[str, m.Done | BaseException]:
        """Have all other nodes that live do it; what became of it, by node."""
        nodes = [member.node for member in self._cluster.alive() if member.node != self._name]
        if isinstance(request, m.DropNamespace):
            work = [self._ask_one(node, partial(_named, request), DROP_TIMEOUT_S) for node in nodes]
        else:
            space = space_of(self._namespaces, request.namespace)
            make = partial(_in_namespace, request)
            work = [self._call(node, space, make, m.Done, DROP_TIMEOUT_S) for node in nodes]
        return dict(zip(nodes, await asyncio.gather(*work, return_exceptions=True), strict=True))

    async def _ask_one(self, node: str, make: Callable[[int], m.Request], timeout_s: float) -> m.Done:
        reply, _ = await self._links.call(self._address(node), make, timeout_s, node=node)
        return expected(reply, m.Done, node)

    async def _watch(self, node: str, namespace: int, keys: list[bytes], timeout_s: float) -> None:
        def make(request_id: int, number: int) -> m.Wait:
            return m.Wait(request_id, number, keys, max(0.0, timeout_s))

        try:
            space = space_of(self._namespaces, namespace)
            present = await self._call(node, space, make, m.Present, max(0.0, timeout_s) + ASK_TIMEOUT_S)
        except PdserveError as error:
            logger.debug("node %s: waiting at %s: %s", self._name, node, error)
            return
        seen = [key for key, there in zip(keys, present.mask, strict=False) if there]
        if seen:
            self._feed(PagesSeen(namespace, seen))

    async def _call(
        self,
        node: str,
        space: Space,
        make: Callable[[int, int], m.Request],
        kind: type[R],
        timeout_s: float,
    ) -> R:
        """The node's reply to `make(id, namespace)`. Raises PoolError."""
        address = self._address(node)
        name, geometry, generation = space
        for _ in range(2):
            incarnation, numbers = self._numbers.get(node, (0, {}))
            number = numbers.get((name, generation))
            if number is None:
                reply, welcome = await self._links.call(
                    address,
                    lambda i: m.OpenNamespace(i, name, dict(geometry), generation),
                    ASK_TIMEOUT_S,
                    node=node,
                )
                number = expected(reply, m.Opened, node).namespace
                incarnation, numbers = (
                    welcome.incarnation,
                    numbers if incarnation == welcome.incarnation else {},
                )
                self._numbers[node] = incarnation, {**numbers, (name, generation): number}
            reply, welcome = await self._links.call(
                address, partial(_numbered, make, number), timeout_s, node=node
            )
            unknown = isinstance(reply, m.Fault) and reply.code == "unknown_namespace"
            if welcome.incarnation == incarnation and not unknown:
                return expected(reply, kind, node)
            self._numbers.pop(node, None)  # it has restarted, or dropped the namespace
        raise PoolRefused(f"pool node {node} restarts")

    def _address(self, node: str) -> str:
        """Raises PoolRefused."""
        address = address_of(self._cluster, node)
        if address is None:
            raise PoolRefused(f"pool node {node} is not in the pool any more")
        return address


def _named(request: m.DropNamespace, request_id: int) -> m.Request:
    return replace(request, id=request_id)


def _in_namespace(request: m.Clear | m.Discard | m.Erase, request_id: int, number: int) -> m.Request:
    if isinstance(request, m.Erase):
        return replace(request, id=request_id, namespace=number, away=None)
    return replace(request, id=request_id, namespace=number)


def _numbered(make: Callable[[int, int], m.Request], number: int, request_id: int) -> m.Request:
    return make(request_id, number)


def joined(present: m.Present, indices: list[int], other: m.Present) -> m.Present:
    """An answer with what another node said about the keys at these indices: a page is there if any node has
    it, where it is in memory; the fate is its owner's word.
    """
    mask, places = bytearray(present.mask), bytearray(present.places)
    fates, tiers = list(present.fates), list(present.tiers)
    for at, there in zip(indices, other.mask, strict=False):
        mask[at] |= there == 1
    for at, place in zip(indices, other.places, strict=False) if places else ():
        if place == m.IN_MEMORY or places[at] == m.NOWHERE:
            kind = place - m.IN_MEMORY - 1
            if 0 <= kind < len(other.tiers):
                if other.tiers[kind] not in tiers:
                    tiers.append(other.tiers[kind])
                place = m.IN_MEMORY + 1 + tiers.index(other.tiers[kind])
            places[at] = place
    for at, fate in zip(indices, other.fates, strict=False):
        if at < len(fates):
            fates[at] = fate
    return replace(present, mask=bytes(mask), places=bytes(places), fates=fates, tiers=tiers)
