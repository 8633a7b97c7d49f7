"""Configuration of a pool client."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pdserve.discovery.config import EtcdConfig
from pdserve.kvpool.protocol.messages import DataPathChoice

POOL_TOKEN_VARIABLE = "PDSERVE_HICACHE_POOL_TOKEN"
"""How a worker hands `pool.token` to SGLang's processes, whose arguments are logged."""


class PoolNodeRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One pool node, as clients find it."""

    node: Annotated[str, Meta(description="name of the node, as in its own configuration")]
    address: Annotated[str, Meta(description='control address: "unix:/path" or "tcp:host:port"')]
    weight: Annotated[int, Meta(ge=1, description="share of the ring, proportional to capacity")] = 1


class PoolClientConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a worker reaches the pool. Every time-out, with `restart_wait_s` on top, is below the 10 s that
    SGLang grants a storage backend.
    """

    nodes: Annotated[
        list[PoolNodeRef],
        Meta(description="nodes of the pool to begin with, the others are learnt from them; empty: no pool"),
    ] = []
    etcd: Annotated[
        EtcdConfig, Meta(description="where to look the nodes up instead, once, when the worker starts")
    ] = EtcdConfig()
    cluster: Annotated[str, Meta(min_length=1, description="name of the pool in etcd")] = "pool"
    etcd_wait_s: Annotated[
        float, Meta(ge=0, description="how long a worker waits for the pool's first node to be in etcd")
    ] = 30.0
    data_path: Annotated[
        DataPathChoice, Meta(description="how page bytes travel: shm (same host), ucx, or auto")
    ] = "auto"
    checksum: Annotated[
        bool, Meta(description="compute a checksum of every page written and check every page read")
    ] = True
    namespace: Annotated[
        str, Meta(description="namespace to use; empty: one per model revision and KV geometry")
    ] = ""
    token: Annotated[str, Meta(description="access token of the namespace")] = ""
    connect_timeout_s: Annotated[float, Meta(gt=0, description="time to connect and shake hands")] = 1.0
    exists_timeout_s: Annotated[float, Meta(gt=0, description="time for one lookup")] = 1.0
    get_timeout_s: Annotated[float, Meta(gt=0, description="time to read one batch of pages")] = 5.0
    put_timeout_s: Annotated[float, Meta(gt=0, description="time to write one batch of pages")] = 5.0
    retry_after_s: Annotated[
        float,
        Meta(
            gt=0,
            description="a node that failed is left alone this long, then probed in the background; sooner "
            "where nobody listens",
        ),
    ] = 0.5
    restart_wait_s: Annotated[
        float, Meta(ge=0, description="how much longer an operation may take while a node is being upgraded")
    ] = 3.0
    connections_per_node: Annotated[
        int, Meta(ge=1, description="concurrent operations per node and process")
    ] = 4
    ucx: Annotated[
        dict[str, str], Meta(description="UCX settings without their UCX_ prefix, e.g. TLS, NET_DEVICES")
    ] = {}
