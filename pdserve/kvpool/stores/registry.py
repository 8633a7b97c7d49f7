"""The installed kinds of stores (entry point group `pdserve.kvpool.stores`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pdserve.errors import ConfigError
from pdserve.kvpool.client.config import OWN_ENGINE, PoolClientConfig
from pdserve.kvpool.stores.base import MakeStore, StoreSettings
from pdserve.settings.plugins import load

GROUP: Final = "pdserve.kvpool.stores"


def kind_of(engine: str) -> MakeStore:
    """What makes the clients of `pool.engine`. Raises ConfigError."""
    make: MakeStore = load(GROUP, engine, "pool.engine", "store", OWN_ENGINE)
    return make


def check_engine(config: PoolClientConfig) -> tuple[str, ...]:
    """What another engine than pool nodes cannot do, in words. Raises ConfigError where it can never serve a
    worker of this configuration: it is not installed, or an option is set that only pool nodes know.
    """
    kind = kind_of(config.engine)
    given = {
        "nodes": config.nodes,
        "etcd.endpoints": config.etcd.endpoints,
        "token": config.token,
        "token_file": config.token_file,
        "page_key": config.page_key,
        "page_key_file": config.page_key_file,
        "tls": config.tls.as_client,
        "compute_tokens_s": config.compute_tokens_s,
    }
    wrong = [f"pool.{name}" for name, value in given.items() if value]
    if wrong:
        raise ConfigError(
            f'{", ".join(wrong)}: only pool nodes know this; pool.engine = "{config.engine}" has pool.options'
        )
    if not config.page_mover:
        raise ConfigError(
            f'pool.page_mover = false: with pool.engine = "{config.engine}" pages are moved in a process of '
            "their own, which can be ended when the store hangs"
        )
    check_options: Callable[[StoreSettings], None] | None = getattr(kind, "check_options", None)
    if check_options is not None:
        check_options(StoreSettings(namespace="", options=config.options))
    return tuple(getattr(kind, "lacks", ()))
