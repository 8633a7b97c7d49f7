"""Configuration of the router. `launch/router.toml` shows every option with its default."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

import httpx
import msgspec
from msgspec import Meta

from pdserve.discovery.workers import WorkerEtcdConfig
from pdserve.errors import ConfigError
from pdserve.kvpool.protocol.address import parse_address
from pdserve.router.api.endpoints import PREFILLABLE, PrefillPath
from pdserve.router.config.placement import PlacementSettings, Session
from pdserve.router.config.tenants import SHARED, Access, Admin, Admission, Tenant, TenantLimits
from pdserve.tracing import Tracing

Mode = Literal["disagg", "agg"]


class Deadlines(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long each phase of a request may take, in seconds. A phase that ends late has a defined outcome."""

    head_s: Annotated[
        float, Meta(gt=0, description="A client's request line and headers; later, it gets a 408.")
    ] = 20.0
    body_s: Annotated[
        float,
        Meta(
            gt=0,
            description="A client's body, and a second more for every 4 KiB of it; later, it gets a 408.",
        ),
    ] = 30.0
    connect_s: Annotated[
        float, Meta(gt=0, description="TCP connect to a worker; later, the next worker is tried.")
    ] = 2.0
    settle_s: Annotated[
        float,
        Meta(
            ge=0, description="Wait for the previous turn's pages before a session's next turn; 0: no wait."
        ),
    ] = 2.0
    prefill_s: Annotated[
        float,
        Meta(gt=0, description="The prefill worker's computing; later, the decode worker does it alone."),
    ] = 120.0
    publish_s: Annotated[
        float,
        Meta(ge=0, description="Added to prefill_s for the prefill worker to publish the prompt's pages."),
    ] = 5.0
    hedge_prefill_s: Annotated[
        float,
        Meta(
            ge=0,
            description="A prefill not done by then is asked of a second worker too, the faster one wins; "
            "0: never.",
        ),
    ] = 0.0
    first_byte_s: Annotated[
        float, Meta(gt=0, description="Decode worker's first byte; later, the client gets a 504.")
    ] = 300.0
    between_chunks_s: Annotated[
        float, Meta(gt=0, description="Gap between two chunks of a stream; longer ends it in an error event.")
    ] = 120.0
    total_s: Annotated[
        float, Meta(gt=0, description="The whole request, reading by the client included.")
    ] = 3600.0


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds on what one router holds."""

    body_bytes: Annotated[int, Meta(ge=1024, description="Largest request body; larger is answered 413.")] = (
        32 * 1024 * 1024
    )
    worker_connections: Annotated[
        int, Meta(ge=1, description="Connections to one worker; at the bound, another worker or 503.")
    ] = 4096
    idle_connections: Annotated[
        int, Meta(ge=0, description="Idle keep-alive connections kept to one worker.")
    ] = 256
    decode_attempts: Annotated[
        int,
        Meta(ge=1, description="Decode workers tried for one request, for the rest of a stream included."),
    ] = 2
    retry_ratio: Annotated[
        float,
        Meta(ge=0, le=1, description="Second tries (and hedges) for each request, beside retries_per_s."),
    ] = 0.2
    retries_per_s: Annotated[
        float, Meta(ge=0, description="Second tries allowed in each second, however few the requests.")
    ] = 10.0


class Probe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Active health checks, and the circuit breaker fed by the outcome of requests."""

    interval_s: Annotated[float, Meta(gt=0, description="Time between two probes of a worker.")] = 1.0
    timeout_s: Annotated[float, Meta(gt=0, description="A probe unanswered for this long has failed.")] = 2.0
    failures_to_down: Annotated[
        int, Meta(ge=1, description="Unanswered probes in a row that make a worker unhealthy.")
    ] = 2
    circuit_failures: Annotated[
        int, Meta(ge=1, description="Failed requests in a row that open a worker's circuit.")
    ] = 3
    circuit_open_s: Annotated[
        float, Meta(gt=0, description="An open circuit lets one request try the worker after this long.")
    ] = 5.0


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The router. With decode workers its mode is `disagg`, with aggregated ones alone `agg`."""

    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65535, description="Port to listen on; 0 takes a free one and prints it.")
    ] = 8000
    prefill: Annotated[
        tuple[str, ...], Meta(description="Base URLs of the prefill workers, `http://HOST:PORT`.")
    ] = ()
    decode: Annotated[tuple[str, ...], Meta(description="Base URLs of the decode workers.")] = ()
    agg: Annotated[
        tuple[str, ...],
        Meta(description="Base URLs of aggregated workers; beside decode workers they are the fallback."),
    ] = ()
    models: Annotated[
        tuple[str, ...],
        Meta(
            description="Models that there are to be; a worker that serves another is refused. Empty: "
            "whatever the workers serve, several too."
        ),
    ] = ()
    default_model: Annotated[
        str, Meta(description="Model of requests that name none; empty: the only one there is, else 400.")
    ] = ""
    prefill_policy: Annotated[
        str,
        Meta(
            description="Picks the prefill worker: affinity, cache_aware, load_aware, power_of_two, "
            "least_loaded, round_robin, or one added by entry point."
        ),
    ] = "least_loaded"
    decode_policy: Annotated[
        str, Meta(description="Picks the decode or aggregated worker; the same policies.")
    ] = "affinity"
    prefill_endpoints: Annotated[
        tuple[PrefillPath, ...],
        Meta(description="Endpoints whose requests go through the prefill stage."),
    ] = PREFILLABLE
    min_prefill_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="Prompts whose uncached part is estimated shorter skip the prefill stage; 0 sends "
            "every one through it. Adapts to queues, see placement.queue_share.",
        ),
    ] = 0
    pull_ahead_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="Prompts whose uncached part is estimated at so many tokens are pulled by the decode "
            "worker while prefill still computes; 0: none is.",
        ),
    ] = 4096
    continue_streams: Annotated[
        Literal["deterministic", "always", "never"],
        Meta(
            description="Streams that another decode worker continues when theirs is lost; deterministic: "
            "greedy ones without grammar, and seeded ones where workers run with "
            "--enable-deterministic-inference; always: sampled ones too."
        ),
    ] = "deterministic"
    processes: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Router processes that share the port; metrics are added up, tenants' limits are "
            "shared, the queue is each one's own.",
        ),
    ] = 1
    watch_config_s: Annotated[
        float,
        Meta(ge=0, description="How often the configuration file is looked at for a change; 0: SIGHUP only."),
    ] = 0.0
    client_keepalive_s: Annotated[
        float, Meta(gt=0, description="An idle client connection is closed after this long.")
    ] = 75.0
    stop_grace_s: Annotated[
        float, Meta(ge=0, description="On SIGTERM running requests may go on for this long.")
    ] = 30.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least level that is logged.")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], Meta(description="Lines for people, or JSON objects with the same facts.")
    ] = "text"
    deadlines: Deadlines = Deadlines()
    session: Session = Session()
    placement: PlacementSettings = PlacementSettings()
    limits: Limits = Limits()
    probe: Probe = Probe()
    access: Access = Access()
    admission: Admission = Admission()
    tenant_defaults: TenantLimits = TenantLimits()
    tenants: tuple[Tenant, ...] = ()
    admin: Admin = Admin()
    etcd: WorkerEtcdConfig = WorkerEtcdConfig()
    tracing: Tracing = Tracing()

    def __post_init__(self) -> None:
        """Raises ValueError for what no field alone can tell; the loader adds the file's name."""
        urls = [*self.prefill, *self.decode, *self.agg]
        for url in urls:
            parse_base_url(url)
        seen = [parse_base_url(url) for url in urls]
        for url, place in zip(urls, seen, strict=True):
            if seen.count(place) > 1:
                raise ValueError(f"worker {url} is listed twice")
        if any(tenant.name == SHARED for tenant in self.tenants):
            raise ValueError(f"no tenant can be called {SHARED!r}: it names the shared cache namespace")
        for address in self.admin.pool:
            check_pool_address(address)
        if self.models and self.default_model and self.default_model not in self.models:
            raise ValueError(f"default_model {self.default_model!r} is none of 'models'")
        if (self.access.tls_cert_file is None) != (self.access.tls_key_file is None):
            raise ValueError("access.tls_cert_file and access.tls_key_file go together: set both, or none")
        if self.prefill and not self.decode and not self.etcd.endpoints:
            raise ValueError(
                "'prefill' lists workers but 'decode' is empty; list a decode worker, or use 'agg'"
            )

    @property
    def mode(self) -> Mode:
        """`disagg` if there are decode workers."""
        return "disagg" if self.decode else "agg"


def parse_base_url(url: str) -> tuple[str, int]:
    """(host, port) of a worker's base URL. Raises ValueError that says what is wrong with it."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        httpx.URL(url)  # 10.0.0.256 is no address
        (host or "").encode("idna")  # a..b is no name
    except (ValueError, httpx.InvalidURL) as error:
        raise ValueError(f"worker URL {url!r}: {error}") from None
    if parts.scheme != "http" or not host or parts.path not in ("", "/") or parts.query or parts.username:
        raise ValueError(f"worker URL {url!r} is not of the form http://HOST:PORT")
    return host, port or 80


def check_pool_address(address: str) -> None:
    """Raises ValueError for what is no control address of a pool node."""
    try:
        parse_address(address)
    except ConfigError as error:
        raise ValueError(f"admin.pool: {error}") from None
