"""Configuration of how pool nodes find and watch each other."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pdserve.discovery.config import EtcdConfig
from pdserve.security.tokens import Secret
from pdserve.sizes import Size


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pool that a node belongs to. A loss is noticed within 2 s."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "pool"
    """Name of the pool; a node of another pool is refused."""
    peers: list[str] = []
    """Addresses of other nodes; its own address may be among them. One node that answers is enough: it names
    the others. `dns+tcp:NAME:PORT`: all addresses that DNS gives the name, looked up every 5 s.
    """
    etcd: EtcdConfig = EtcdConfig()
    """Where nodes keep their addresses for clients, and find each other."""
    advertise: str = ""
    """Address of this node for clients and other nodes; empty: the first of `listen`."""
    token: Secret = Secret("")
    """Secret of the pool's nodes, equal on all of them; also from PDSERVE_POOL_CLUSTER_TOKEN."""
    ping_timeout_s: Annotated[float, Meta(gt=0)] = 1.0
    """A node without an answer for this long is suspected, and dead if no other node reaches it in half of
    this. Pings follow each other in 0.3 of it.
    """


class MovingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a node pushes pages to their owners when the ring has changed."""

    bytes_s: Annotated[Size, Meta(ge=0)] = 500_000_000
    """Most bytes pushed per second, like `500MB`; 0: no limit."""
