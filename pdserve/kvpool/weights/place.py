"""Which pool a model is in, and how it is reached: by the address of a node, or as the worker says.

A worker tells its processes of its pool by an environment variable, without secrets. Secrets have variables
of their own, which SGLang does not log.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping
from typing import Final, TypeVar

import msgspec
from msgspec.structs import replace

from pdserve.errors import ConfigError, PoolError, PoolTimeout, PoolUnavailable
from pdserve.kvpool.admin.node_client import TIMEOUT_S, NodeClient
from pdserve.kvpool.client.config import (
    PAGE_KEY_VARIABLE,
    POOL_TOKEN_VARIABLE,
    PoolClientConfig,
    PoolNodeRef,
    with_pool_secrets,
)
from pdserve.kvpool.weights.names import ModelUrl
from pdserve.security.tls import Certificates, TlsConfig
from pdserve.security.tokens import Secret, decode_secret, reveal, withhold_secret

POOL_VARIABLE: Final = "PDSERVE_WEIGHTS_POOL"
"""The worker's PoolClientConfig in JSON, with its nodes and without secrets."""
T = TypeVar("T")


def tell_children(config: PoolClientConfig, environ: MutableMapping[str, str]) -> None:
    """Let SGLang's processes find this pool. `config`: with its nodes (`locate_pool`) and secrets."""
    environ[POOL_VARIABLE] = msgspec.json.encode(config, enc_hook=withhold_secret).decode()
    environ[POOL_TOKEN_VARIABLE] = reveal(config.token)
    environ[PAGE_KEY_VARIABLE] = reveal(config.page_key)


def pool_of(url: ModelUrl, environ: Mapping[str, str] = os.environ) -> PoolClientConfig:
    """How the model's pool is reached. Raises ConfigError for a pool that nobody named, PoolError for a node
    that does not answer.
    """
    told = _told(environ)
    if told is not None and told.nodes and url.pool in (told.cluster, *_addresses(told)):
        return told
    if url.address is None:
        known = (
            f"here it is '{told.cluster}' (pool.cluster)" if told else "no worker's settings say where it is"
        )
        raise ConfigError(
            f"pool '{url.pool}' is not known: {known}; a node's address does too: pdserve://HOST:PORT/NAME"
        )
    plain = with_pool_secrets(PoolClientConfig(tls=_tls_of(environ)), environ)
    return pool_at(url.address, told or plain)


def pool_at(address: str, settings: PoolClientConfig) -> PoolClientConfig:
    """`settings` with the nodes that the one at `address` knows. Raises PoolError, ConfigError."""
    tls = Certificates(settings.tls).client_context
    with NodeClient(address, reveal(settings.token), TIMEOUT_S, tls) as node:
        own = node.status().node
        others = [each for each in node.nodes if each.node != own]
    refs = [PoolNodeRef(node=each.node, address=each.address) for each in others]
    return replace(settings, nodes=[PoolNodeRef(node=own, address=address), *refs])


def ask_pool(config: PoolClientConfig, question: Callable[[NodeClient], T]) -> T:
    """The answer of the first node that has one. Raises PoolError: the last node's, where none has."""
    tls = Certificates(config.tls).client_context
    problem: PoolError = PoolUnavailable("the pool has no nodes")
    for ref in config.nodes:
        try:
            with NodeClient(ref.address, reveal(config.token), TIMEOUT_S, tls) as node:
                return question(node)
        except (PoolUnavailable, PoolTimeout) as error:
            problem = error
    raise problem


def _told(environ: Mapping[str, str]) -> PoolClientConfig | None:
    """What the worker told this process."""
    said = environ.get(POOL_VARIABLE, "")
    if not said:
        return None
    try:
        told = msgspec.json.decode(said, type=PoolClientConfig, dec_hook=decode_secret)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{POOL_VARIABLE} holds no pool's settings: {error}") from error
    token, page_key = environ.get(POOL_TOKEN_VARIABLE, ""), environ.get(PAGE_KEY_VARIABLE, "")
    return replace(told, token=Secret(token), page_key=Secret(page_key))


def _addresses(config: PoolClientConfig) -> list[str]:
    """As a URL has them."""
    return [ref.address.removeprefix("tcp:") for ref in config.nodes]


def _tls_of(environ: Mapping[str, str]) -> TlsConfig:
    """The certificates that `pdserve pool` takes from the environment too."""
    names = {"ca": "CA", "certificate": "CERTIFICATE", "key": "KEY"}
    found = {name: environ.get(f"PDSERVE_POOL_TLS_{upper}") or None for name, upper in names.items()}
    try:
        return msgspec.convert(found, TlsConfig, dec_hook=decode_secret)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"PDSERVE_POOL_TLS_*: {error}") from error
