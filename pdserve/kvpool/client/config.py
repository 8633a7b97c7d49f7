"""Configuration of a pool client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from pdserve.discovery.config import EtcdConfig
from pdserve.kvpool.protocol.messages import DataPathChoice
from pdserve.security.tls import TlsConfig
from pdserve.security.tokens import Secret, given_secret, secret_of

POOL_TOKEN_VARIABLE = "PDSERVE_HICACHE_POOL_TOKEN"
"""How a worker hands `pool.token` to SGLang's processes, whose arguments are logged."""
PAGE_KEY_VARIABLE = "PDSERVE_HICACHE_PAGE_KEY"
"""The same for `pool.page_key`."""


class PoolNodeRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One pool node, as clients find it."""

    node: str
    """Name of the node, as in its own configuration."""
    address: str
    """Control address: `unix:/path` or `tcp:host:port`."""


class PoolClientConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a worker reaches the pool. Every time-out, with `restart_wait_s` on top, is below the 10 s that
    SGLang grants a storage backend.
    """

    nodes: list[PoolNodeRef] = []
    """nodes of the pool to speak with, one at a time: that of this host, else the next; each gives the whole
    pool, and names the others; empty: no pool
    """
    etcd: EtcdConfig = EtcdConfig()
    """where to look the nodes up instead, once, when the worker starts"""
    cluster: Annotated[str, Meta(min_length=1)] = "pool"
    """Name of the pool in etcd."""
    data_path: DataPathChoice = "auto"
    """Data path of page bytes: shm (same host only), ucx, tcp, or auto (shm where possible, else tcp). Nodes
    choose for themselves what they use among each other.
    """
    checksum: bool = True
    """Compute a checksum of every written page, and check it at every read."""
    namespace: str = ""
    """Namespace in the pool; empty: one for each model revision and KV geometry."""
    token: Secret = Secret("")
    """Access token of the namespace; also from PDSERVE_POOL_TOKEN."""
    page_key: Secret = Secret("")
    """Secret of the workers that share pages; every page carries a tag made with it, and none is read
    without. Empty: checksums only. Also from PDSERVE_POOL_PAGE_KEY.
    """
    tls: TlsConfig = TlsConfig()
    """Certificates; with `ca` nodes are reached by TLS."""
    connect_timeout_s: Annotated[float, Meta(gt=0)] = 1.0
    """Longest time of a connect, including the handshake."""
    exists_timeout_s: Annotated[float, Meta(gt=0)] = 1.0
    """Longest time of one lookup."""
    get_timeout_s: Annotated[float, Meta(gt=0)] = 5.0
    """Longest time to read one batch of pages."""
    put_timeout_s: Annotated[float, Meta(gt=0)] = 5.0
    """Longest time to write one batch of pages."""
    retry_after_s: Annotated[float, Meta(gt=0)] = 0.5
    """Time without requests to a node after a failure; then it is probed in the background. If its port is
    closed, the probe comes earlier.
    """
    restart_wait_s: Annotated[float, Meta(ge=0)] = 3.0
    """Additional time of an operation while a node is being upgraded."""

    def __post_init__(self) -> None:
        if self.tls.certificate is not None and self.tls.ca is None:
            raise ValueError(
                "tls.ca is needed beside tls.certificate: without it, nodes are reached in clear"
            )


def with_pool_secrets(config: PoolClientConfig, environ: Mapping[str, str]) -> PoolClientConfig:
    """The configuration with the secrets themselves, wherever they were given. Raises ConfigError."""
    token = given_secret(config.token, "PDSERVE_POOL_TOKEN", environ)
    page_key = secret_of("pool.page_key", config.page_key, "PDSERVE_POOL_PAGE_KEY", environ)
    return replace(config, token=Secret(token), page_key=Secret(page_key))
