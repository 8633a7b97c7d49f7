"""The start of a worker: checks, identity of its pages, SGLang's server with the role's routes."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from pdserve.discovery.workers import Registration
from pdserve.engine.args import Storage, served_model_name, server_argv
from pdserve.engine.drain import Drain
from pdserve.engine.http.guard import Starting
from pdserve.engine.http.timing import WorkerMetrics
from pdserve.engine.sglang.server import clients, parse_args, prepare_engine, serve, until_stopped
from pdserve.engine.worker import (
    Engine,
    Role,
    RoleParts,
    Worker,
    WorkerConfig,
    check_namespace,
    install,
)
from pdserve.errors import ConfigError
from pdserve.kvpool.client.async_client import AsyncPoolClient
from pdserve.kvpool.client.config import POOL_TOKEN_VARIABLE, PoolClientConfig
from pdserve.kvpool.client.locate import locate_pool
from pdserve.tokens import secret_of
from pdserve.tracing import Tracer, open_tracer

logger = logging.getLogger(__name__)


def run_worker(config: WorkerConfig, role: Role, parts: Callable[[Worker], RoleParts]) -> int:
    """Serve until SIGTERM or Ctrl-C; the exit status.

    Raises ConfigError or StartupError, each one line, before SGLang loads the model where possible.
    """
    if config.storage == "pool" and not (config.pool.nodes or config.pool.etcd.endpoints):
        raise ConfigError(
            "pool.nodes is empty: list the nodes of the pool, or set pool.etcd.endpoints to find them, "
            'or storage = "none" to do without'
        )
    token = secret_of(
        "cluster_token", config.cluster_token, config.cluster_token_file, "PDSERVE_CLUSTER_TOKEN", os.environ
    )
    with until_stopped():
        if config.storage == "pool":
            config = replace(config, pool=locate_pool(config.pool))
        device = prepare_engine(config.engine)
        # SGLang may be imported from here on
        from pdserve.engine.sglang.geometry import kv_identity

        plain = server_argv(config.engine, role, device, {} if config.storage == "pool" else None)
        identity = kv_identity(parse_args(plain))
        label = served_model_name(config.engine)
        namespace = config.pool.namespace or identity.geometry.namespace(label)
        if config.storage == "pool":
            check_namespace(config.pool, namespace, identity)
        # without the pool as storage no page ever gets there: nobody may wait for one
        reached = config.pool if config.storage == "pool" else PoolClientConfig()
        pool = AsyncPoolClient(reached, namespace, identity.geometry.as_dict())

        tracer = open_tracer(config.tracing, f"pdserve-{role}")
        starting, drain = Starting(), Drain(config.stop_grace_s, config.stop_notice_s, clients)

        def configure(app: Any) -> None:
            engine, metrics = Engine(app), WorkerMetrics()
            worker = Worker(role, config, namespace, identity, engine, pool, drain, metrics, tracer)
            install(app, worker, parts(worker), token, starting)

        argv = server_argv(
            config.engine, role, device, _storage(config, namespace, identity.geometry.as_dict())
        )
        logger.info("worker %s of %s, namespace %s", role, label, namespace)
        os.environ[POOL_TOKEN_VARIABLE] = config.pool.token  # SGLang logs and shows what its arguments hold
        with _registered(config, role) as register, _closing(tracer):

            def on_ready() -> None:
                starting.end()
                register()

            serve(argv, drain, configure_app=configure, on_ready=on_ready)
    return 0


@contextlib.contextmanager
def _registered(config: WorkerConfig, role: Role) -> Iterator[Callable[[], None]]:
    """Gives what registers the worker in etcd, once it is ready, for as long as the block runs."""
    if not config.etcd.endpoints:
        yield lambda: None
        return
    engine = config.engine
    host = f"[{engine.host}]" if ":" in engine.host else engine.host
    registration = Registration(config.etcd, role, config.advertise or f"http://{host}:{engine.port}")
    try:
        yield registration.start
    finally:
        registration.stop()


@contextlib.contextmanager
def _closing(tracer: Tracer | None) -> Iterator[None]:
    try:
        yield
    finally:
        if tracer is not None:
            tracer.close()


def _storage(config: WorkerConfig, namespace: str, geometry: dict[str, str]) -> Storage:
    if config.storage == "none":
        return None
    if config.storage != "pool":
        return config.storage
    return {
        "backend_name": "pdserve",
        "module_path": "pdserve.kvpool.hicache",
        "class_name": "PdserveHiCache",
        "interface_v1": 1,
        # read by hicache.BackendSettings; without secrets
        "pdserve": {
            "pool": msgspec.to_builtins(replace(config.pool, token="")),
            "namespace": namespace,
            "geometry": geometry,
        },
    }
