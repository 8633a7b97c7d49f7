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

from pdserve.engine.config import Role
from pdserve.engine.sglang.children import entry  # before SGLang, in the children too
from pdserve.engine.worker import WorkerConfig
from pdserve.errors import ConfigError, StartupError
from pdserve.integrations.dynamo.config import DynamoConfig
from pdserve.integrations.dynamo.runtime_data import shared_cache
from pdserve.integrations.embedded import prepare
from pdserve.kvpool.hicache.object_layout import no_layout

logger = logging.getLogger(__name__)

TESTED_DYNAMO: Final = "1.6.1"


def run(config: DynamoConfig, role: Role) -> int:
    """Serve until stopped; the exit status. Raises ConfigError, StartupError."""
    _check_dynamo()
    if not (config.pool.nodes or config.pool.etcd.endpoints):
        raise ConfigError("pool.nodes is empty: list the nodes of the pool")
    prepared = prepare(_as_worker(config, role), role)
    shared = shared_cache(
        prepared.namespace, prepared.geometry, pairs=prepared.pairs, events=config.pool_events
    )
    if config.pool_events and shared is None:
        logger.warning("Dynamo's router will not know the pool's pages: %s", no_layout(prepared.geometry))
    from pdserve.engine.sglang.children import embedded

    embedded.install(run_scheduler_process)
    _serve([*prepared.argv, *_events(config.kv_events)], shared, config.kv_events_host)
    return 0


def run_scheduler_process(*args: Any, **kwargs: Any) -> Any:
    """As SGLang's, in its own process: prepared, then as Dynamo starts it."""
    entry.prepare_scheduler()
    from dynamo.sglang.nixl_telemetry import run_scheduler_process_with_rank_fixups

    return run_scheduler_process_with_rank_fixups(*args, **kwargs)


def _as_worker(config: DynamoConfig, role: Role) -> WorkerConfig:
    return WorkerConfig(
        engine=config.engine,
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
            "Dynamo is not installed here: run launch/dynamo.sh, which makes .venv-dynamo"
        ) from None
    if found != TESTED_DYNAMO:
        logger.warning("Dynamo %s is installed; pdserve is tested with %s", found, TESTED_DYNAMO)
