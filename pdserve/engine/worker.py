"""A worker process: SGLang's own HTTP server with our routes, its pages in the pool.

config -> SGLang's arguments -> identity of its pages -> namespace, checked against the pool
       -> SGLang's server in this process, with `/pd/info`, `/pd/ready`, request tracking and the
       routes of both roles
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from msgspec import Meta

from pdserve import __version__
from pdserve.discovery.config import WorkerEtcdConfig
from pdserve.engine.config import EngineConfig, ExactTurnsConfig, Role
from pdserve.engine.drain import Drain
from pdserve.engine.handoff import DirectConfig
from pdserve.engine.http.guard import Guard, close_cors
from pdserve.engine.http.judged import Judged, validation_error
from pdserve.engine.http.request import HttpRequest, RequestTracking
from pdserve.engine.http.resume import Continuing
from pdserve.engine.http.timing import WorkerMetrics
from pdserve.engine.page_names import PageNames
from pdserve.engine.sglang.engine import Engine
from pdserve.errors import PoolRefused, StartupError
from pdserve.kvpool.client.async_client import AsyncPoolClient
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.security.tls import TlsConfig
from pdserve.security.tokens import Secret
from pdserve.tracing import Tracer, Tracing

if TYPE_CHECKING:
    from pdserve.engine.sglang.geometry import (
        KvIdentity,  # imports SGLang, which must wait for prepare.choose()
    )

logger = logging.getLogger(__name__)


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prefill, decode or aggregated worker."""

    engine: EngineConfig
    """SGLang."""
    storage: Literal["pool", "file", "mooncake", "none"] = "pool"
    """Storage of pages outside this worker. file, mooncake: SGLang's own backends, configured by their
    environment variables; none: plain SGLang.
    """
    pool: PoolClientConfig = PoolClientConfig()
    """The KV page pool."""
    handoff: Literal["pool", "direct"] = "pool"
    """How a prompt's KV gets from prefill to decode workers. pool: its pages go through the pool; direct:
    SGLang sends it itself, and the pool is for reuse.
    """
    direct: DirectConfig = DirectConfig()
    exact_turns: ExactTurnsConfig = ExactTurnsConfig()
    """Earlier answers in a chat's prompt."""
    commit_timeout_s: Annotated[float, Meta(gt=0)] = 10.0
    """Longest wait until a request's pages are committed in the pool."""
    pull_step_tokens: Annotated[int, Meta(ge=1)] = 2048
    """The pages of a long prompt are pulled in steps of this many tokens while it is prefilled; see the
    router's pull_ahead_tokens.
    """
    etcd: WorkerEtcdConfig = WorkerEtcdConfig()
    """Where the worker registers, for routers to find it."""
    advertise: str = ""
    """URL of this worker for routers; empty: engine's host and port."""
    stop_grace_s: Annotated[float, Meta(ge=0)] = 30.0
    """Time to finish running requests and to publish pages after SIGTERM. A second signal ends the worker at
    once.
    """
    stop_notice_s: Annotated[float, Meta(ge=0)] = 3.0
    """Part of stop_grace_s in which routers learn that the worker stops; set it longer than their
    probe.interval_s.
    """
    cluster_token: Secret = Secret("")
    """Token required on every route except health and metrics; also from PDSERVE_CLUSTER_TOKEN. Without one
    the worker starts only with `insecure`.
    """
    metrics_token: Secret = Secret("")
    """Token that `/metrics` asks for; also from PDSERVE_METRICS_TOKEN. cluster_token does too. Empty: none is
    needed.
    """
    insecure: bool = False
    """Start without cluster_token: everyone who reaches the port may generate, and every user of this host
    may control SGLang.
    """
    tls: TlsConfig = TlsConfig()
    """Certificates of the HTTP port. With `certificate` it speaks TLS; with `client_ca` only to routers with
    a certificate. `ca` is of no use here, see `pool.tls`.
    """
    tracing: Tracing = Tracing()
    """Traces for an OpenTelemetry collector."""


@dataclass(frozen=True)
class Worker:
    """What a role's routes are built from."""

    role: Role
    config: WorkerConfig
    identity: KvIdentity
    engine: Engine
    pool: AsyncPoolClient
    drain: Drain
    metrics: WorkerMetrics
    tracer: Tracer | None = None

    @property
    def bootstrap_port(self) -> int | None:
        """Where decode workers find this prefill worker's ranks; None: it hands over by the pool alone."""
        return self.config.direct.bootstrap_port if self.is_prefill_sender else None

    @property
    def is_prefill_sender(self) -> bool:
        """Its SGLang is in the prefill mode of a direct hand-off."""
        return self.config.handoff == "direct" and self.role == "prefill"

    @property
    def names(self) -> PageNames:
        """Names this worker's pages."""
        identity = self.identity
        page_size = int(identity.geometry.page_size)
        return PageNames(page_size, identity.rank_suffixes, identity.parts, identity.pairs)


@dataclass(frozen=True)
class WorkerRoutes:
    """The routes of a worker, who is told of each generating request before SGLang is, and how many requests
    have pages that are on their way to the pool.
    """

    routers: list[APIRouter]
    on_start: Callable[[HttpRequest], None] | None = None
    unpublished: Callable[[], int] = lambda: 0


def check_namespace(pool: PoolClientConfig, namespace: str, identity: KvIdentity) -> None:
    """Open the namespace on every node that answers.

    Raises StartupError where a node knows the namespace with another geometry: workers that differ in model,
    dtype, page size or layout would exchange pages that fit none of them.
    """

    async def check() -> None:
        client = AsyncPoolClient(pool, namespace, identity.geometry.as_dict())
        try:
            outcome = await client.check()
        finally:
            client.close()
        for node, error in outcome.items():
            if isinstance(error, PoolRefused):
                raise StartupError(f"this worker cannot share namespace {namespace}: {error}")
            if error is not None:
                logger.warning("pool node %s cannot be reached, starting without it: %s", node, error)

    asyncio.run(check())


def install(app: Any, worker: Worker, routes: WorkerRoutes, token: str, metrics_token: str) -> None:
    """Add middleware and routes to SGLang's FastAPI app, before it serves. `token`: the cluster's; empty:
    none.
    """
    app.exception_handlers[RequestValidationError] = _invalid
    app.add_middleware(Judged, contract=lambda: worker.engine.contract)
    app.add_middleware(Continuing)
    app.add_middleware(RequestTracking, on_start=routes.on_start, tracer=worker.tracer, role=worker.role)
    worker.drain.add(routes.unpublished)
    close_cors(app)
    app.add_middleware(
        Guard,
        token=token,
        has_started=lambda: worker.engine.has_started,
        drain=worker.drain,
        metrics_token=metrics_token,
        has_fixed_weights=worker.config.storage != "none",
    )
    app.include_router(_info_router(worker))
    for router in routes.routers:
        app.include_router(router)


def _invalid(_request: Request, error: Exception) -> JSONResponse:
    """For bodies that the contract lets pass and SGLang's own models refuse."""
    told = validation_error(error.errors() if isinstance(error, RequestValidationError) else [])
    return JSONResponse(told.body(), status_code=told.status)


def _info_router(worker: Worker) -> APIRouter:
    router = APIRouter()
    info_tag = secrets.token_hex(16)  # of this process: a router that sees another one asks /pd/info again

    async def info() -> Response:
        return JSONResponse(
            {
                "role": worker.role,
                "handoff": worker.config.handoff,
                "bootstrap_port": worker.bootstrap_port,
                **worker.engine.facts(),
                "model_path": str(worker.config.engine.model_path),
                "page_size": worker.names.page_size,
                "info_tag": info_tag,
                "namespace": worker.pool.namespace,
                "kv_geometry": worker.pool.geometry,
                "takes_salt_header": True,
                "pdserve_version": __version__,
                "sglang_version": version("sglang"),
            }
        )

    async def ready(request: Request) -> Response:
        try:
            said = await _readiness(worker) | {"info_tag": info_tag}
        # boundary: a prober is told the reason, whatever SGLang or the pool raises
        except Exception as error:
            logger.exception("readiness cannot be told")
            said = {"ready": False, "draining": worker.drain.is_draining, "pool": "down", "load": None}
            said["reason"] = f"{type(error).__name__}: {error}"
        if request.client is not None:
            worker.drain.asked((request.client.host, request.client.port), time.monotonic())
        return JSONResponse(said, status_code=200 if said["ready"] else 503)

    router.add_api_route("/pd/info", info, methods=["GET"], response_model=None)
    router.add_api_route("/pd/ready", ready, methods=["GET"], response_model=None)
    return router


async def _readiness(worker: Worker) -> dict[str, Any]:
    reachable = [error is None for error in (await worker.pool.check()).values()]
    is_up = worker.engine.is_up
    load = worker.engine.load() if is_up else None
    # no wait from here until the answer: who hears it has been told
    stops = worker.drain.is_draining
    pool = "up" if reachable and all(reachable) else "down"
    return {
        "ready": is_up and not stops,
        "draining": stops,
        "pool": pool,
        "load": load,
    }
