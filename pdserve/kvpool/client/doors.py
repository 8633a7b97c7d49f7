"""The nodes that a client may speak with, of which it speaks with one at a time.

Any node of a pool gives all of it: what it has not it fetches, and what others own it hands on
(core/sharding/). So a client speaks with the nearest node, which is the one of its own host where there is
one: its memory is mapped here, and pages that came from elsewhere are shared by all clients of the host. The
others are for a client that has no node of its own, or whose node is down: then the next one is asked, until
the nearest is back. A node that restarts is waited for.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from pdserve.errors import PoolUnavailable
from pdserve.kvpool.client.config import PoolNodeRef
from pdserve.kvpool.protocol.address import TcpAddress, parse_address


class Link(Protocol):
    """What is asked of the link to a node."""

    @property
    def reachable(self) -> bool:
        """The node is up or restarting."""
        ...

    def close(self) -> None: ...


L = TypeVar("L", bound=Link)


class Doors(Generic[L]):
    """Links by node, the nearest first. Thread-safe as far as the links are."""

    def __init__(self, nodes: Sequence[PoolNodeRef], make: Callable[[PoolNodeRef], L]) -> None:
        """`make`: a link, which connects when it is first used. Raises ConfigError: a malformed address."""
        self.links = {ref.node: make(ref) for ref in nearest_first(nodes)}

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

    def close(self) -> None:
        """Idempotent."""
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
