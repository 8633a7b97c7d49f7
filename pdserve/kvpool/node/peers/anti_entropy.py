"""What one node says to another so that both know the same. asyncio.

An exchange begins with "this is the digest of all that I know", or with a change; the other answers with all
that it knows unless the digests are equal, and is told everything if they still differ then. States larger
than a frame go in parts, which is as good as whole (cluster/state.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from msgspec.structs import replace

from pdserve.errors import FrameError, PdserveError, PoolRefused, PoolTimeout
from pdserve.kvpool.cluster.failure_detector import Outcome
from pdserve.kvpool.cluster.membership import Cluster, Update
from pdserve.kvpool.cluster.state import parts
from pdserve.kvpool.node.peers.channels import PeerControls
from pdserve.kvpool.node.timers import clock_ms
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import ClusterState, Gossip, Gossiped, NamespaceRecord

logger = logging.getLogger(__name__)

PART_BYTES: Final = 1 << 20  # of namespaces in one message; a frame holds four times as much


@dataclass
class _Told:
    """What a member is to be told: by an exchange that is under way, and after it."""

    namespaces: dict[str, NamespaceRecord] = field(default_factory=dict)
    again: bool = False


class AntiEntropy:
    """The exchanges of one node with all others. `apply` takes what was learnt; `spawn` runs a task."""

    def __init__(
        self,
        cluster: Cluster,
        links: PeerControls,
        timeout_s: float,
        apply: Callable[[Update], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._cluster = cluster
        self._links = links
        self._timeout_s = timeout_s
        self._apply = apply
        self._spawn = spawn
        self._telling: dict[str, _Told] = {}

    def tell_all(self, namespaces: Mapping[str, NamespaceRecord]) -> None:
        """Tell every living member at once."""
        for member in self._cluster.alive():
            if member.node != self._cluster.name:
                self.tell(member.node, namespaces)

    def tell(self, node: str, namespaces: Mapping[str, NamespaceRecord]) -> None:
        """Make the member know what this node knows; these namespaces without being asked."""
        if node not in self._cluster.members:
            return
        told = self._telling.get(node)
        if told is None:
            self._telling[node] = _Told(dict(namespaces))
            self._spawn(self._telling_of(node))
        else:
            told.namespaces |= namespaces
            told.again = True

    async def _telling_of(self, node: str) -> None:
        told = self._telling[node]
        try:
            while True:
                told.again = False
                news, told.namespaces = told.namespaces, {}
                member = self._cluster.members.get(node)
                if member is None:
                    return  # it is forgotten
                await self.exchange(member.address, self._timeout_s, node=node, push=news)
                if not told.again:
                    return
        except PdserveError as error:
            logger.debug("node %s: node %s could not be told: %s", self._cluster.name, node, error)
        finally:
            del self._telling[node]

    async def exchange(
        self,
        address: str,
        timeout_s: float,
        *,
        node: str = "",
        push: Mapping[str, NamespaceRecord] | None = None,
    ) -> m.Welcome:
        """Let both know what either knows. `push`: begin with the members and these namespaces, not with a
        digest alone. Raises PoolError, ConfigError.
        """
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        first = [self.nothing()]
        if push is not None:
            first = list(parts(replace(self._cluster.state, namespaces=list(push.values())), PART_BYTES))
        for state in first:
            digest, welcome = await self._say(address, state, deadline_s, node)
        if digest != self._cluster.digest:
            for state in parts(self._cluster.whole, PART_BYTES):
                await self._say(address, state, deadline_s, node)
        return welcome

    async def _say(
        self, address: str, state: ClusterState, deadline_s: float, node: str
    ) -> tuple[bytes, m.Welcome]:
        """Send one message and take in the answer; the other's digest."""
        digest = self._cluster.digest
        timeout_s = max(0.001, deadline_s - asyncio.get_running_loop().time())
        reply, welcome = await self._links.call(
            address, lambda i: Gossip(i, self._cluster.name, state, digest), timeout_s, node=node
        )
        if isinstance(reply, m.Fault):
            raise PoolRefused(f"pool node {address}: {reply.message}")
        if not isinstance(reply, Gossiped):
            raise FrameError(f"pool node {address} answered Gossip with {type(reply).__name__}")
        self._apply(self._cluster.receive(reply.state, clock_ms()))
        return reply.digest, welcome

    async def ping(self, node: str, timeout_s: float) -> Outcome:
        """An exchange, for the sake of the answer. Who says no to it is not the member that we look for."""
        member = self._cluster.members.get(node)
        try:
            if member is None:
                return "silent"
            await self.exchange(member.address, timeout_s, node=node)
        except (PoolTimeout, PoolRefused, FrameError) as error:
            logger.debug("node %s: no sign of life from node %s: %s", self._cluster.name, node, error)
            return "silent"
        except PdserveError as error:
            logger.debug("node %s: node %s: %s", self._cluster.name, node, error)
            return "refused"
        return "answered"

    def nothing(self) -> ClusterState:
        """A state that says nothing."""
        return ClusterState(self._cluster.state.cluster, [], [])
