"""A worker's SGLang in another program that serves it (`sglang.Engine`): arguments, processes, page names.

The program keeps its own front. The pool's pages, their names and namespaces, and what is changed in SGLang's
scheduler are those of a worker, so both share pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from pdserve.engine.args import server_argv
from pdserve.engine.config import Role
from pdserve.engine.launch import (
    checked_args,
    identified,
    located,
    prepare_process,
    prepared_direct,
    set_environment,
)
from pdserve.engine.worker import WorkerConfig
from pdserve.pages import KvGeometry


@dataclass(frozen=True)
class Embedded:
    """What the program starts SGLang with."""

    argv: list[str]
    """SGLang's words, after `sglang serve`."""
    namespace: str
    geometry: KvGeometry
    pairs: bool
    """As in `pages.page_hashes`."""


def prepare(config: WorkerConfig, role: Role) -> Embedded:
    """Prepare this process, which has not imported SGLang yet, and open the pool's namespace. `config` has
    the pool as its storage. Raises ConfigError, StartupError.
    """
    config = located(config)
    engine_config, device = prepare_process(config.engine)
    config = replace(config, engine=engine_config)
    direct = prepared_direct(config, role, device)
    from pdserve.engine.sglang.storage import pool_storage

    identity, namespace = identified(config, checked_args(config, role, device))
    storage = pool_storage(config.pool, namespace, identity.geometry)
    set_environment(config.pool)
    argv = server_argv(config.engine, role, device, storage, config.tls, direct)
    return Embedded(argv, namespace, identity.geometry, identity.pairs)
