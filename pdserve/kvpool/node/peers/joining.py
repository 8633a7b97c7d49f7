"""How a node finds the others: configured addresses, DNS names and etcd; and that no two nodes have one name.

A node asks these addresses (*seeds*) before it listens; one answer is enough, and no answer is no error.
While it runs it asks again where no living member is known. Two nodes with one name find out when they hear
of each other: at its start a node gives way, later the node with the larger incarnation.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pdserve.discovery.dns import DnsName, DnsWatch, host_port, is_dns_name, parse_dns_name
from pdserve.errors import FrameError, PdserveError, PoolError, PoolRefused, StartupError
from pdserve.kvpool.cluster.membership import Cluster, Update
from pdserve.kvpool.node.config import PoolNodeConfig
from pdserve.kvpool.node.peers.channels import PeerControls
from pdserve.kvpool.node.timers import clock_ms
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import (
    ACTIVE,
    LEAVING,
    ClusterState,
    GetView,
    Gossip,
    Gossiped,
    Member,
)

if TYPE_CHECKING:
    from pdserve.discovery.etcd import EtcdMember, EtcdMembership

logger = logging.getLogger(__name__)

SEEDS_A_ROUND: Final = 3


@dataclass(frozen=True)
class Before:
    """What this node was in the pool before it was upgraded: its status, and the other nodes' addresses."""

    status: int
    peers: Sequence[str]


class Joining:
    """The seeds of one node. `apply` takes what was learnt, `sync` exchanges states with an address, `fail`
    ends the node. `before`: set after an upgrade.
    """

    def __init__(
        self,
        config: PoolNodeConfig,
        cluster: Cluster,
        links: PeerControls,
        apply: Callable[[Update], None],
        sync: Callable[[str], None],
        fail: Callable[[PdserveError], None],
        before: Before | None,
    ) -> None:
        self.etcd: EtcdMembership | None = None
        self.started = False  # the node runs: seeds are asked when they are found
        self._config = config
        self._name = config.name
        self._cluster = cluster
        self._links = links
        self._apply = apply
        self._sync = sync
        self._fail = fail
        self._before = before
        self._here = {config.address, *config.listen}
        listed = [a for a in config.cluster.peers if a not in self._here and not is_dns_name(a)]
        self._named = {"config": dict.fromkeys(listed, "")}
        """By source: address to name, where the source says one."""
        self.seeds = dict(self._named["config"])
        """Of all sources: address to name, once known."""
        names = [parse_dns_name(a, "tcp") for a in config.cluster.peers if is_dns_name(a)]
        self._dns = DnsWatch(names, self._found_by_dns) if names else None
        self._round = 0
        self.rivalry = False  # another node with this name is being looked for

    async def join(self) -> None:
        """Learn what the others know, before any of them knows this node. Raises StartupError: they refuse
        it, or a node with its name lives.
        """
        known = () if self._before is None else self._before.peers
        if not known:  # else it is asked once the node serves
            await self._look_up()
        addresses = {*self.seeds, *known}
        if addresses and not await self._ask_seeds(addresses):
            logger.warning("node %s: no peer answers, it starts alone and tries again", self._name)

    async def _look_up(self) -> None:
        """Ask DNS and etcd for the other nodes, where they are configured."""
        config = self._config.cluster
        with contextlib.suppress(TimeoutError):  # the watch goes on with the same lookup
            async with asyncio.timeout(config.ping_timeout_s):
                if self._dns is not None:
                    await self._dns.look()
        if not config.etcd.endpoints:
            return
        self.etcd = self._open_etcd()
        try:
            async with asyncio.timeout(config.ping_timeout_s):
                self._found_in_etcd(await self.etcd.nodes())
        except (PoolError, TimeoutError) as error:
            logger.warning("node %s: etcd does not tell of other nodes yet: %s", self._name, error)

    def follow(self) -> list[Coroutine[Any, Any, None]]:
        """What runs while the node does: it looks for other nodes, and keeps this node's key in etcd."""
        following = [] if self._dns is None else [self._dns.run()]
        return [*following, self._follow_etcd()] if self._config.cluster.etcd.endpoints else following

    async def close(self, *, keeps_key: bool) -> None:
        """Take this node's key out of etcd, or leave it there for the next program; after `follow` was
        cancelled.
        """
        if self._dns is not None:
            self._dns.close()
        if self.etcd is not None:
            await self.etcd.close(keeps_key=keeps_key)

    async def _follow_etcd(self) -> None:
        if self.etcd is None:
            self.etcd = await asyncio.to_thread(self._open_etcd)
        await self.etcd.run()

    def _open_etcd(self) -> EtcdMembership:
        # it loads an HTTP client, which few nodes need
        from pdserve.discovery.etcd import EtcdMember, EtcdMembership

        config = self._config.cluster
        own = EtcdMember(self._name, self._config.address, self._config.weight)
        return EtcdMembership(config.etcd, config.name, own, self._found_in_etcd, secret=config.token)

    def _found_in_etcd(self, nodes: list[EtcdMember]) -> None:
        self._found("etcd", {node.address: node.node for node in nodes})

    def _found_by_dns(self, found: Mapping[DnsName, Sequence[str]]) -> None:
        addresses = [
            f"tcp:{host_port(address, name.port)}" for name, some in found.items() for address in some
        ]
        self._found("dns", dict.fromkeys(addresses, ""))

    def _found(self, source: str, named: dict[str, str]) -> None:
        """A source names these nodes, by address, and no others: the unknown ones are asked at once."""
        self._named[source] = {a: name for a, name in named.items() if a not in self._here}
        known = self.seeds
        self.seeds = {
            a: name or known.get(a, "") for some in self._named.values() for a, name in some.items()
        }
        if self.started:
            self.look_for_seeds()

    def name_seed(self, address: str, node: str) -> None:
        """The node at a seed's address has this name."""
        if address in self.seeds:
            self.seeds[address] = node

    def look_for_seeds(self) -> None:
        """Ask again at addresses where no living member is known, a few at a time."""
        self._round += 1
        alive = self._cluster.alive()
        known = {member.address for member in alive}
        names = {member.node for member in alive}
        unknown = [a for a, name in self.seeds.items() if a not in known and name not in names]
        for place in range(min(SEEDS_A_ROUND, len(unknown))):
            self._sync(unknown[(self._round * SEEDS_A_ROUND + place) % len(unknown)])

    async def _ask_seeds(self, addresses: Iterable[str]) -> bool:
        """Whether one answered."""
        asking = [asyncio.ensure_future(self._ask_seed(address)) for address in addresses]
        try:
            async with asyncio.timeout(self._config.cluster.ping_timeout_s):
                for answer in asyncio.as_completed(asking):
                    state = await answer
                    if state is not None:
                        await self._check_name(state)
                        self._apply(self._cluster.receive(state, clock_ms()))
                        return True
        except TimeoutError:
            pass
        except FrameError as error:
            raise StartupError(f"node {self._name} cannot join: {error}") from error
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        return False

    async def _ask_seed(self, address: str) -> ClusterState | None:
        """What the node there knows; None if there is none, or only this one."""
        state = ClusterState(self._config.cluster.name, [], [])
        timeout_s = self._config.cluster.ping_timeout_s
        try:
            reply, welcome = await self._links.call(
                address, lambda i: Gossip(i, self._name, state), timeout_s
            )
        except PoolRefused as error:
            raise StartupError(f"node {self._name} cannot join: {error}") from error
        except PoolError as error:
            logger.info("node %s: no answer from peer %s: %s", self._name, address, error)
            return None
        if welcome.node == self._name:
            self._refuse_namesake(address)
        if isinstance(reply, m.Fault):
            raise StartupError(f"node {self._name} cannot join: pool node {address}: {reply.message}")
        self.name_seed(address, welcome.node)
        return reply.state if isinstance(reply, Gossiped) else None

    async def _check_name(self, state: ClusterState) -> None:
        """Raises StartupError if a node of this one's name lives."""
        if self._before is not None:
            return  # that is this one
        for member in state.members:
            if member.node == self._name and member.status in (ACTIVE, LEAVING) and await self._lives(member):
                self._refuse_namesake(member.address)

    def _refuse_namesake(self, address: str) -> None:
        raise StartupError(f"another node at {address} has the name {self._name}: give this one another name")

    async def _lives(self, rival: Member) -> bool:
        """Whether a node of this name and the rival's incarnation answers at its address."""
        try:
            _, welcome = await self._links.call(rival.address, GetView, self._config.cluster.ping_timeout_s)
        except PdserveError:
            return False
        return (welcome.node, welcome.incarnation) == (self._name, rival.incarnation)

    async def settle_rivalry(self, rival: Member) -> None:
        """Two nodes of one name started at once, or in two parts of a network: one ends."""
        self.rivalry = True
        try:
            if await self._lives(rival):
                logger.error("node %s: another node has its name: %s", self._name, rival.address)
                if self._cluster.me.incarnation > rival.incarnation:
                    self._fail(StartupError(f"another node at {rival.address} has the name {self._name}"))
        finally:
            self.rivalry = False
