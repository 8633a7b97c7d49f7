"""The start of a worker: checks, identity of its pages, SGLang's server with the worker's routes."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from pdserve.discovery.workers import Registration
from pdserve.engine.args import (
    Storage,
    cpu_total_tokens,
    needed,
    served_model_name,
    server_argv,
)
from pdserve.engine.config import EngineConfig, Role
from pdserve.engine.device import Device, choose_device, choose_dtype
from pdserve.engine.drain import Drain
from pdserve.engine.handoff import DirectConfig, check_direct, prepare_direct
from pdserve.engine.http.timing import WorkerMetrics
from pdserve.engine.model_dir import bind_address, check_model_dir
from pdserve.engine.sglang import models, prepare, selfcheck
from pdserve.engine.sglang.engine import Engine
from pdserve.engine.sglang.prepare import START, show_start
from pdserve.engine.sglang.server import clients, serve, until_stopped
from pdserve.engine.sglang.server_args import (
    check_needs,
    check_supported,
    parse_args,
    ranks_here,
    resolved,
)
from pdserve.engine.turns.shelf import Shelf
from pdserve.engine.worker import Worker, WorkerConfig, WorkerRoutes, check_namespace, install
from pdserve.errors import ConfigError
from pdserve.kvpool.client.async_client import AsyncPoolClient
from pdserve.kvpool.client.config import (
    PAGE_KEY_VARIABLE,
    POOL_TOKEN_VARIABLE,
    PoolClientConfig,
    with_pool_secrets,
)
from pdserve.kvpool.client.locate import locate_pool
from pdserve.kvpool.weights.names import is_pool_url
from pdserve.kvpool.weights.place import tell_children
from pdserve.resources.gpus import node_count
from pdserve.resources.machine import this_machine
from pdserve.resources.memory import host_pool_gb
from pdserve.security.tls import Certificates
from pdserve.security.tokens import reveal, secret_of
from pdserve.tracing import check_tracing, open_tracer

if TYPE_CHECKING:
    from pdserve.engine.sglang.geometry import KvIdentity  # imports SGLang

logger = logging.getLogger(__name__)

MEDIA_HASHES: Final = "SGLANG_MM_PRECOMPUTE_HASH"
"""SGLang hashes images in this process, not in the scheduler, so that their pages can be named here."""


def run_worker(config: WorkerConfig, role: Role, routes: Callable[[Worker], WorkerRoutes]) -> int:
    """Serve until SIGTERM or Ctrl-C; the exit status.

    Raises ConfigError or StartupError, each one line, before SGLang loads the model where possible.
    """
    _check_storage(config)
    token = secret_of("cluster_token", config.cluster_token, "PDSERVE_CLUSTER_TOKEN", os.environ)
    check_token(config, token)
    metrics_token = secret_of("metrics_token", config.metrics_token, "PDSERVE_METRICS_TOKEN", os.environ)
    certificates = Certificates(config.tls)  # refuses files that cannot be used, before anything slow
    check_tracing(config.tracing)
    url = advertised(config)
    with until_stopped(), contextlib.ExitStack() as owned:
        config = located(config)
        bound = bind_address(config.engine.host, config.engine.port)
        for one in bound:
            owned.callback(one.close)
        engine_config, device = prepare_process(config.engine)
        config = replace(config, engine=engine_config)
        direct = prepared_direct(config, role, device)
        # SGLang may be imported from here on
        from pdserve.engine.sglang.geometry import longest_tokens
        from pdserve.engine.sglang.storage import pool_storage

        found = checked_args(config, role, device)
        identity, namespace = identified(config, found)
        # without the pool as storage no page ever gets there: nobody may wait for one
        reached = config.pool if config.storage == "pool" else PoolClientConfig()
        pool = AsyncPoolClient(reached, namespace, identity.geometry.as_dict())

        drain = Drain(config.stop_grace_s, config.stop_notice_s, clients)
        metrics, shelf = WorkerMetrics(), _shelf(config, pool)
        if shelf is not None:
            owned.callback(shelf.close)
        stored = namespace if config.storage == "pool" else ""
        engine = Engine(drain, metrics, config.exact_turns, shelf, stored)

        longest = longest_tokens(found) if _stages(config) else 0

        def configure(app: Any) -> None:
            tracer = open_tracer(config.tracing, f"pdserve-{role}")
            if tracer is not None:
                owned.callback(tracer.close)
            worker = Worker(role, config, identity, engine, pool, drain, metrics, tracer)
            install(app, worker, routes(worker), token, metrics_token)

        storage = _storage_of(config, pool_storage(config.pool, namespace, identity.geometry, longest))
        server_args = parse_args(server_argv(config.engine, role, device, storage, config.tls, direct))
        if server_args.node_rank:  # the first host's worker serves
            owned.close()
        START.info("loading %s, whose pages are in namespace %s", served_model_name(config.engine), namespace)
        if not token:
            logger.warning("insecure, no cluster_token: every client generates, users of this host control")
        set_environment(config.pool)
        register = owned.enter_context(_registered(config, role, url, token))
        serve(server_args, drain, engine, certificates, bound, configure_app=configure, on_ready=register)
    return 0


def located(config: WorkerConfig) -> WorkerConfig:
    """With the nodes and secrets of the pool, where nodes are needed. Raises ConfigError, StartupError."""
    from_pool = is_pool_url(config.engine.model_path)
    if config.storage == "pool" or from_pool:
        config = replace(config, pool=locate_pool(with_pool_secrets(config.pool, os.environ)))
        tell_children(config.pool, os.environ)
    return config


def set_environment(pool: PoolClientConfig) -> None:
    """Of this process and its children. SGLang logs and shows its arguments, so they hold no secrets."""
    os.environ[POOL_TOKEN_VARIABLE] = reveal(pool.token)
    os.environ[PAGE_KEY_VARIABLE] = reveal(pool.page_key)
    os.environ.setdefault(MEDIA_HASHES, "1")


def _shelf(config: WorkerConfig, pool: AsyncPoolClient) -> Shelf | None:
    """The tokens of answers in the pool, beside its pages."""
    if config.storage != "pool" or not config.exact_turns.enabled:
        return None
    return Shelf(pool, config.exact_turns.lookup_s)


def _check_storage(config: WorkerConfig) -> None:
    """Raises ConfigError for a storage that cannot work."""
    pool = config.pool
    if config.storage == "pool" and not (pool.nodes or pool.etcd.endpoints):
        raise ConfigError(
            "pool.nodes is empty: list the nodes of the pool, or set pool.etcd.endpoints to find them, "
            'or storage = "none" to do without'
        )
    if _stages(config) and config.storage != "pool":
        raise ConfigError(
            'engine.hicache_host_memory_mode = "buffer_only" needs storage = "pool": host memory keeps no '
            "pages then, and no other storage is tried with it"
        )


def check_token(config: WorkerConfig, token: str) -> None:
    """Raises ConfigError for a worker that everybody may use, unless it is meant to be one."""
    if not token and not config.insecure:
        raise ConfigError(
            "a worker needs the cluster's token, or every user of this host controls it: set "
            "cluster_token_file or PDSERVE_CLUSTER_TOKEN, here and at the router, or insecure = true"
        )


def advertised(config: WorkerConfig) -> str:
    """The worker's URL for routers. Raises ConfigError for one of another scheme than it serves."""
    engine, scheme = config.engine, "https" if config.tls.as_server else "http"
    host = f"[{engine.host}]" if ":" in engine.host else engine.host
    if config.advertise and not config.advertise.startswith(f"{scheme}://"):
        how = "with" if config.tls.as_server else "without"
        raise ConfigError(f"advertise: this worker serves {how} TLS: write {scheme}://HOST:PORT")
    return config.advertise or f"{scheme}://{host}:{engine.port}"


def prepare_process(config: EngineConfig) -> tuple[EngineConfig, Device]:
    """Check everything that can be checked before SGLang starts, and prepare this process to import it. The
    settings with what "auto" is on this machine, and the device.

    Raises ConfigError for settings that cannot work; StartupError for the model path, the address, the
    accelerator, or an SGLang that does not fit.
    """
    several_hosts = node_count(config.extra_args) > 1
    if several_hosts and not config.trusted_network:
        raise ConfigError(
            "--nnodes: ranks on several hosts talk without a token, and whoever reaches their ports owns the "
            "worker: set engine.trusted_network = true if nobody else does"
        )
    model = check_model_dir(config.model_path)
    show_start()
    selfcheck.check()
    START.info("importing SGLang %s", selfcheck.TESTED_SGLANG)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    if dtype != config.dtype:
        START.info('engine.dtype = "auto": %s, since this processor computes no bfloat16', dtype)
        config = replace(config, dtype=dtype)
    if device == "cpu" and config.max_total_tokens is None:
        config = replace(config, max_total_tokens=cpu_total_tokens(config, model))
    config = with_host_memory(config, device)
    server_argv(config, "agg", device, {})  # refuses what no role can have, before anything slow
    prepare.choose(device, several_hosts=several_hosts)
    models.choose([str(name) for name in model["architectures"]])
    with prepare.without_gc():
        prepare.load_plugins()
    return config, device


def with_host_memory(config: EngineConfig, device: Device) -> EngineConfig:
    """With the host memory of each rank, where nothing says how much: its share of this host's."""
    flags = {word.partition("=")[0] for word in config.extra_args}
    is_said = config.hicache_size_gb or config.hicache_ratio is not None
    if device == "cpu" or is_said or flags & {"--hicache-size", "--hicache-ratio"}:
        return config
    here = this_machine({})  # GPUs that this worker does not see count: theirs take their shares too
    share_gb = host_pool_gb(here.memory_bytes, [gpu.memory_bytes for gpu in here.gpus])
    START.info("engine.hicache_size_gb: %d for each rank, its share of this host's memory", share_gb)
    return replace(config, hicache_size_gb=share_gb)


def _storage_of(config: WorkerConfig, pool_storage: dict[str, Any]) -> Storage:
    if config.storage == "none":
        return None
    return pool_storage if config.storage == "pool" else config.storage


def _direct(config: WorkerConfig) -> DirectConfig | None:
    return config.direct if config.handoff == "direct" else None


def prepared_direct(config: WorkerConfig, role: Role, device: Device) -> DirectConfig | None:
    """The direct hand-off, with this process prepared for it; None: there is none. Raises ConfigError,
    StartupError.
    """
    direct = _direct(config)
    if direct is not None:
        check_direct(direct, role, device, host_memory=config.engine.hicache_host_memory_mode)
        prepare_direct(config.engine.host, device)
    return direct


def identified(config: WorkerConfig, found: Any) -> tuple[KvIdentity, str]:
    """The identity of the worker's pages, and their namespace, opened where the pool is their storage.
    `found`: from `checked_args`. Raises StartupError.
    """
    from pdserve.engine.sglang.geometry import check_cached, kv_identity

    if config.storage != "none":
        check_cached(found)
    prepare.prepare_ranks(ranks_here(found))
    identity = kv_identity(found, reveal(config.pool.page_key), config.engine.page_pieces)
    namespace = config.pool.namespace or identity.geometry.namespace(served_model_name(config.engine))
    if config.storage == "pool":
        check_namespace(config.pool, namespace, identity)
    return identity, namespace


def _stages(config: WorkerConfig) -> bool:
    """Host memory holds pages only on their way."""
    return config.engine.hicache_host_memory_mode == "buffer_only"


def checked_args(config: WorkerConfig, role: Role, device: Device) -> Any:
    """SGLang's resolved arguments, but for the names of the pages. Raises ConfigError where the user's own
    flags change what a worker needs.
    """
    storage, direct = _storage_of(config, {}), _direct(config)
    found = resolved(parse_args(server_argv(config.engine, role, device, storage, config.tls, direct)))
    check_supported(found)
    if config.engine.extra_args:
        plain = replace(config.engine, extra_args=[])
        own = resolved(parse_args(server_argv(plain, role, device, storage, config.tls, direct)))
        check_needs(found, own, needed(device))
    return found


@contextlib.contextmanager
def _registered(config: WorkerConfig, role: Role, url: str, token: str) -> Iterator[Callable[[], None]]:
    """Gives what registers the worker in etcd, once it is ready, for as long as the block runs."""
    if not config.etcd.endpoints:
        yield lambda: None
        return
    registration = Registration(config.etcd, role, url, token)
    try:
        yield registration.start
    finally:
        registration.stop()
