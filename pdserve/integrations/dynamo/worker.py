"""Dynamo's SGLang worker in this process, with the pool as its storage.

Dynamo makes `sglang.Engine` from SGLang's own words, and serves it. Three of its parts are replaced, and
nothing else:

- how its schedulers start: they are prepared as those of a worker, then have Dynamo's own fix-ups;
- what it tells the router of a shared cache;
- where it hears its schedulers' events. Dynamo connects to this host's network address, at which nobody
  publishes when `kv_events` names another. SGLANG_HOST_IP would also change where decode workers look for
  the KV of prefill workers.
"""

from __future__ import annotations

import json
import logging
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

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
from pdserve.engine.sglang.children import entry  # before SGLang, in the children too
from pdserve.engine.worker import WorkerConfig
from pdserve.errors import ConfigError, StartupError
from pdserve.integrations.dynamo.config import DynamoConfig
from pdserve.kvpool.protocol.kv_events import OBJECT_SUFFIX
from pdserve.pages import KV, KvGeometry

logger = logging.getLogger(__name__)

TESTED_DYNAMO: Final = "1.6.1"


def run(config: DynamoConfig, role: Role) -> int:
    """Serve until stopped; the exit status. Raises ConfigError, StartupError."""
    _check_dynamo()
    if not (config.pool.nodes or config.pool.etcd.endpoints):
        raise ConfigError("pool.nodes is empty: list the nodes of the pool")
    argv, shared = _prepare(_as_worker(config, role), role, config.pool_events)
    from pdserve.engine.sglang.children import entry

    entry.install_in_program(run_scheduler_process)
    _serve([*argv, *_events(config.kv_events)], shared, config.kv_events_host)
    return 0


def _prepare(config: WorkerConfig, role: Role, events: str) -> tuple[list[str], dict[str, Any] | None]:
    """Prepare this process, which has not imported SGLang yet, as that of a worker of pdserve. Returns
    SGLang's arguments, and what Dynamo's router is told of the pool. Raises ConfigError, StartupError.
    """
    config = located(config)
    engine, device = prepare_process(config.engine)
    config = replace(config, engine=engine)
    direct = prepared_direct(config, role, device)
    from pdserve.engine.sglang.storage import pool_storage

    identity, namespace = identified(config, checked_args(config, role, device))
    storage = pool_storage(config.pool, namespace, identity.geometry)
    set_environment(config.pool)
    shared = shared_cache(namespace, identity.geometry, pairs=identity.pairs, events=events)
    if events and shared is None:
        logger.warning("Dynamo's router will not know the pool's pages: %s", _unnameable(identity.geometry))
    return server_argv(config.engine, role, device, storage, config.tls, direct), shared


def run_scheduler_process(*args: Any, **kwargs: Any) -> Any:
    """As SGLang's, in its own process: prepared, then as Dynamo starts it."""
    entry.prepare_scheduler()
    from dynamo.sglang.nixl_telemetry import run_scheduler_process_with_rank_fixups

    return run_scheduler_process_with_rank_fixups(*args, **kwargs)


def _as_worker(config: DynamoConfig, role: Role) -> WorkerConfig:
    return WorkerConfig(
        engine=config.engine.as_engine(),
        pool=config.pool,
        direct=config.direct,
        handoff="pool" if role == "agg" else "direct",
        insecure=True,
    )


def _events(address: str) -> list[str]:
    """SGLang's words for the events of its own memory."""
    if not address:
        return []
    said = {"publisher": "zmq", "topic": "kv-events", "endpoint": address, "bind": True, "format": "dynamo"}
    return ["--kv-events-config", json.dumps(said)]


def _serve(argv: list[str], shared: dict[str, Any] | None, events_host: str) -> None:
    import uvloop
    from dynamo.sglang import main, publisher, register

    main.install_scheduler_process_wrapper = lambda: None  # `run_scheduler_process` does it
    register._get_mooncake_runtime_data = lambda _: shared
    if events_host:
        publisher.get_local_ip_auto = lambda: events_host
    uvloop.run(main.worker(argv))


def _check_dynamo() -> None:
    try:
        found = version("ai-dynamo")
    except PackageNotFoundError:
        raise StartupError(
            "Dynamo is not installed here: docs/other-engines.md says how to make .venv-dynamo"
        ) from None
    if found != TESTED_DYNAMO:
        logger.warning("Dynamo %s is installed; pdserve is tested with %s", found, TESTED_DYNAMO)


def shared_cache(namespace: str, geometry: KvGeometry, *, pairs: bool, events: str) -> dict[str, Any] | None:
    """What a worker tells Dynamo's KV router of the pool: its runtime data `sglang_hicache_mooncake`. None:
    the router cannot name the pool's pages. `events`: where it hears of them. Pure.

    The router (1.6.1, `lib/llm/src/kv_router/shared_cache.rs`) knows one kind of shared cache: Mooncake below
    SGLang's HiCache. From a prompt's tokens and the layout that workers report, it computes the names of
    objects, and looks them up among those that an event stream announced. It asks no Mooncake server. So the
    pool's nodes publish such events (`events.format = "objects"`), and workers report a layout that gives the
    same names.
    """
    if not events or _unnameable(geometry):
        return None
    return {
        "backend": "mooncake",
        "page_size": int(geometry.page_size),
        "tp_size": 1,
        "pp_size": 1,
        # one object `PREFIX_PAGE__k` for each page, which 1.6.1 knows of models with latent attention only
        "is_mla_model": True,
        "is_eagle": pairs,
        "tp_lcm_size": None,
        "should_split_heads": False,
        "extra_backend_tag": None,
        "key_prefix": namespace,
        "kv_events_endpoint": events,
        "hicache_object_layout": {  # later versions read the names there
            "pools": [{"pool": KV, "suffixes": [OBJECT_SUFFIX], "hit_policy": "all_pages"}],
            "key_prefix": namespace,
            "is_mla_backend": geometry.tp_size == "replicated",
            "pp_rank": 0,
            "pp_size": 1,
        },
    }


def _unnameable(geometry: KvGeometry) -> str:
    """Why a router cannot name the objects of such pages from a prompt's tokens; empty where it can."""
    if geometry.tp_size not in ("1", "replicated") or geometry.pp_size != "1":
        return "ranks have objects of their own, which cannot be named from tokens alone"
    if geometry.window_pages.keys() != {KV}:
        return "pages have parts beside KV, which cannot be named from tokens alone"
    return ""
