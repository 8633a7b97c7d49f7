"""Configuration of how pool nodes find and watch each other."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pdserve.discovery.config import EtcdConfig
from pdserve.security.tokens import Secret
from pdserve.sizes import parse_bytes


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pool that a node belongs to. A loss is noticed within 2 s."""

    name: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
            description="Name of the pool; a node of another pool is refused.",
        ),
    ] = "pool"
    peers: Annotated[
        list[str],
        Meta(
            description="Addresses of other nodes; its own address may be among them. One node that "
            "answers is enough: it names the others. `dns+tcp:NAME:PORT`: all addresses that DNS gives the "
            "name, looked up every 5 s."
        ),
    ] = []
    etcd: Annotated[
        EtcdConfig, Meta(description="Where nodes keep their addresses for clients, and find each other.")
    ] = EtcdConfig()
    advertise: Annotated[
        str,
        Meta(description="Address of this node for clients and other nodes; empty: the first of `listen`."),
    ] = ""
    token: Annotated[
        Secret,
        Meta(
            description="Secret of the pool's nodes, equal on all of them; also from "
            "PDSERVE_POOL_CLUSTER_TOKEN."
        ),
    ] = Secret("")
    ping_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            description="A node without an answer for this long is suspected, and dead if no other node "
            "reaches it in half of this. Pings follow each other in 0.3 of it.",
        ),
    ] = 1.0


class MovingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a node pushes pages to their owners when the ring has changed. Sizes may be written like `4GiB`."""

    bytes_s: Annotated[int | str, Meta(description="Most bytes pushed per second; 0: no limit.")] = "500MB"
    batch_bytes: Annotated[int | str, Meta(description="Bytes pushed at a time, at least one page.")] = "8MiB"
    timeout_s: Annotated[
        float,
        Meta(gt=0, description="Longest time of one request to another node; more for a large batch."),
    ] = 5.0

    def __post_init__(self) -> None:
        for name in ("bytes_s", "batch_bytes"):
            try:
                size_bytes = parse_bytes(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            if size_bytes < 0:
                raise ValueError(f"{name} must not be negative, it is {size_bytes}")
