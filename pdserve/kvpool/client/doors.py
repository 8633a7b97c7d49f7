"""The nodes that a client may speak with, of which it speaks with one at a time.

Any node of a pool gives all of it: what it has not it fetches, and what others own it hands on
(core/sharding/). So a client speaks with the nearest node, which is the one of its own host where there is
one: its memory is mapped here, and pages that came from elsewhere are shared by all clients of the host. The
others are for a client that has no node of its own, or whose node is down: then the next one is asked, until
the nearest is back. A node that restarts is waited for.

One node that is configured is enough: each names the others when it is connected to.
"""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from pdserve.errors import PoolUnavailable
from pdserve.kvpool.client.config import PoolNodeRef
from pdserve.kvpool.protocol.address import TcpAddress, parse_address
from pdserve.kvpool.protocol.base import NodeAddress


class Link(Protocol):
    """What is asked of the link to a node."""

    @property
    def reachable(self) -> bool:
        """The node is up or restarting."""
        ...

    def close(self) -> None: ...


L = TypeVar("L", bound=Link)


class Doors(Generic[L]):
    """Links by node, the nearest first; replaced as a whole. Thread-safe as far as the links are."""

    def __init__(self, nodes: Sequence[PoolNodeRef], make: Callable[[PoolNodeRef], L]) -> None:
        """`make`: a link, which connects when it is first used. Raises ConfigError: a malformed address."""
        self._configured = {ref.node: ref for ref in nodes}
        self._make = make
        self._lock = threading.Lock()
        self._closed = False
        self._refs = {ref.node: ref for ref in nearest_first(nodes)}
        self.links = {node: make(ref) for node, ref in self._refs.items()}

    def learn(self, nodes: Sequence[NodeAddress]) -> None:
        """These are the pool's nodes, as one of them says. What is configured is believed before."""
        told = {one.node: PoolNodeRef(node=one.node, address=one.address) for one in nodes}
        wanted = self._configured | told | self._configured  # first, too, of those that are as near
        with self._lock:
            if wanted == self._refs or self._closed:
                return
            links = {}
            for ref in nearest_first([*wanted.values()]):
                is_known = self._refs.get(ref.node) == ref
                links[ref.node] = self.links[ref.node] if is_known else self._make(ref)
            gone = [link for node, link in self.links.items() if links.get(node) is not link]
            self._refs, self.links = wanted, links
        for link in gone:
            link.close()

    def __iter__(self) -> Iterator[L]:
        return iter(self.links.values())

    @property
    def chosen(self) -> L:
        """The link to the node to ask now. Raises PoolUnavailable: there is none."""
        for link in self:
            if link.reachable:
                return link
        for link in self:
            return link  # the nearest says what is wrong with it
        raise PoolUnavailable("the pool has no nodes")

    def after(self, failed: L) -> L | None:
        """Whom to ask in place of the node that has just failed; None: nobody, or it is as good as before."""
        if failed.reachable:
            return None
        return next((link for link in self if link.reachable), None)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._closed = True
        for link in self:
            link.close()


def nearest_first(nodes: Sequence[PoolNodeRef]) -> list[PoolNodeRef]:
    """Nodes of this host before others. The others are in an order that differs from host to host, so that
    clients without a node of their own spread. Raises ConfigError: a malformed address.
    """
    here = socket.gethostname()

    def distance(ref: PoolNodeRef) -> tuple[int, bytes]:
        where = parse_address(ref.address) if ref.address.startswith("tcp:") else None
        if not isinstance(where, TcpAddress):
            return 0, b""
        if is_of_this_host(where.host):
            return 1, b""
        return 2, hashlib.blake2b(f"{here}\0{ref.node}".encode(), digest_size=8).digest()

    return sorted(nodes, key=distance)


def is_of_this_host(host: str) -> bool:
    """Whether this is this host's name, or a numeric address of it. Names are not looked up: that may take
    seconds.
    """
    if host in ("localhost", socket.gethostname()):
        return True
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.inet_pton(family, host)
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.bind((host, 0))
    except OSError:
        return False
    return True
