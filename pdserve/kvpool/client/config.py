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

    node: Annotated[str, Meta(description="Name of the node, as in its own configuration.")]
    address: Annotated[str, Meta(description="Control address: `unix:/path` or `tcp:host:port`.")]


class PoolClientConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a worker reaches the pool. Every time-out, with `restart_wait_s` on top, is below the 10 s that
    SGLang grants a storage backend.
    """

    nodes: Annotated[
        list[PoolNodeRef],
        Meta(
            description="nodes of the pool to speak with, one at a time: that of this host, else the next; "
            "each gives the whole pool, and names the others; empty: no pool"
        ),
    ] = []
    etcd: Annotated[
        EtcdConfig, Meta(description="where to look the nodes up instead, once, when the worker starts")
    ] = EtcdConfig()
    cluster: Annotated[str, Meta(min_length=1, description="Name of the pool in etcd.")] = "pool"
    data_path: Annotated[
        DataPathChoice,
        Meta(
            description="Data path of page bytes: shm (same host only), ucx, tcp, or auto (shm where "
            "possible, else tcp). Nodes choose for themselves what they use among each other."
        ),
    ] = "auto"
    checksum: Annotated[
        bool, Meta(description="Compute a checksum of every written page, and check it at every read.")
    ] = True
    namespace: Annotated[
        str, Meta(description="Namespace in the pool; empty: one for each model revision and KV geometry.")
    ] = ""
    token: Annotated[
        Secret, Meta(description="Access token of the namespace; also from PDSERVE_POOL_TOKEN.")
    ] = Secret("")
    page_key: Annotated[
        Secret,
        Meta(
            description="Secret of the workers that share pages; every page carries a tag made with it, and "
            "none is read without. Empty: checksums only. Also from PDSERVE_POOL_PAGE_KEY."
        ),
    ] = Secret("")
    tls: Annotated[TlsConfig, Meta(description="Certificates; with `ca` nodes are reached by TLS.")] = (
        TlsConfig()
    )
    connect_timeout_s: Annotated[
        float, Meta(gt=0, description="Longest time of a connect, including the handshake.")
    ] = 1.0
    exists_timeout_s: Annotated[float, Meta(gt=0, description="Longest time of one lookup.")] = 1.0
    get_timeout_s: Annotated[float, Meta(gt=0, description="Longest time to read one batch of pages.")] = 5.0
    put_timeout_s: Annotated[float, Meta(gt=0, description="Longest time to write one batch of pages.")] = 5.0
    retry_after_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Time without requests to a node after a failure; then it is probed in the "
            "background. If its port is closed, the probe comes earlier.",
        ),
    ] = 0.5
    restart_wait_s: Annotated[
        float, Meta(ge=0, description="Additional time of an operation while a node is being upgraded.")
    ] = 3.0

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
