"""Configuration of the router. `launch/router.toml` shows every option with its default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from pdserve.discovery.config import WorkerEtcdConfig
from pdserve.discovery.dns import is_dns_name, parse_dns_name
from pdserve.errors import ConfigError
from pdserve.router.api.endpoints import PREFILLABLE, PrefillPath
from pdserve.router.config.addresses import is_https, parse_base_url
from pdserve.router.config.limits import Deadlines, Limits, Probe, RedisSettings, ServiceLevel, Trace
from pdserve.router.config.placement import PlacementSettings, Session
from pdserve.router.config.tenants import OTHERS, SHARED, Access, Admin, Admission, Tenant, TenantLimits
from pdserve.security.tls import TlsConfig
from pdserve.tracing import Tracing

MAX_ALIAS_CHARS: Final = 256


def base_of(model: str) -> str:
    """The model that workers serve under a name, without its adapter."""
    return model.partition(":")[0]


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The router. With decode or elastic workers its mode is `disagg`, with aggregated ones alone `agg`."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """Port to listen on; 0 takes a free one and prints it."""
    prefill: tuple[str, ...] = ()
    """Base URLs of the prefill workers, `http://HOST:PORT`. In all lists, `dns+http://NAME:PORT` stands for
    all addresses of the name, looked up every 5 s.
    """
    decode: tuple[str, ...] = ()
    """Base URLs of the decode workers."""
    agg: tuple[str, ...] = ()
    """Base URLs of aggregated workers; beside decode workers they are the fallback."""
    elastic: tuple[str, ...] = ()
    """Base URLs of elastic workers: for each request the router decides which of them prefills and which
    decodes.
    """
    models: tuple[str, ...] = ()
    """Names of the expected models; a worker of another model is refused. Empty: all models of the workers.
    """
    default_model: str = ""
    """Model of requests that name none. Empty: the only served model; if there are several, the answer is
    400.
    """
    prefill_policy: str = "least_loaded"
    """Picks the prefill worker: affinity, cache_aware, load_aware, power_of_two, least_loaded, round_robin,
    or one added by entry point.
    """
    decode_policy: str = "affinity"
    """Picks the decode or aggregated worker; same choices as prefill_policy."""
    handoff: Literal["auto", "pool", "direct"] = "auto"
    """How a prompt's KV gets to a decode worker, where there are workers of both ways. auto: by request, see
    placement.pool_from_tokens; direct, pool: so wherever it is possible.
    """
    prefill_endpoints: tuple[PrefillPath, ...] = PREFILLABLE
    """Endpoints whose requests go through the prefill stage."""
    min_prefill_tokens: Annotated[int, Meta(ge=0)] = 256
    """A prompt with fewer uncached tokens (estimated) skips the prefill stage; 0: none skips it. It adapts to
    the workers' queues.
    """
    pull_ahead_tokens: Annotated[int, Meta(ge=0)] = 4096
    """From this number of uncached tokens (estimated) on, the decode worker pulls a prompt's pages while
    prefill still computes; 0: never.
    """
    continue_streams: Literal["deterministic", "always", "never"] = "deterministic"
    """Which streams another decode worker continues if theirs is lost. deterministic: greedy without grammar,
    and seeded if the workers run with --enable-deterministic-inference; always: sampled streams too.
    """
    keep_nonces: bool = False
    """Pass on the line that Claude Code begins its system prompt with and that changes with each request, so
    that no request finds a page of the one before.
    """
    processes: Annotated[int, Meta(ge=1, le=64)] = 1
    """Number of router processes that share the port. Metrics are added up and tenants' limits are shared;
    each process has its own queue.
    """
    insecure: bool = False
    """Serve other hosts without API keys: all who reach the port use the models."""
    client_keepalive_s: Annotated[float, Meta(gt=0)] = 75.0
    """An idle client connection is closed after this long."""
    stop_notice_s: Annotated[float, Meta(ge=0)] = 1.0
    """On SIGTERM, `/ready` says 503 for this long before new connections are refused: the interval of a load
    balancer's checks.
    """
    stop_grace_s: Annotated[float, Meta(ge=0)] = 30.0
    """Time that running requests have to finish after SIGTERM."""
    access_log: bool = False
    """Log a line for each request: tenant, model, workers, status, times and tokens. It holds no prompt,
    answer or key.
    """
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""
    log_format: Literal["text", "json"] = "text"
    """text: lines for people; json: one object per line with the same facts."""
    deadlines: Deadlines = Deadlines()
    session: Session = Session()
    placement: PlacementSettings = PlacementSettings()
    slo: ServiceLevel = ServiceLevel()
    limits: Limits = Limits()
    probe: Probe = Probe()
    access: Access = Access()
    tls: TlsConfig = TlsConfig()
    """Certificates for workers. With `ca` their URLs are `https`."""
    admission: Admission = Admission()
    tenants: tuple[Tenant, ...] = ()
    redis: RedisSettings = RedisSettings()
    aliases: dict[str, str] = {}
    """Names for clients, each with the model, or BASE:ADAPTER, that it stands for."""
    admin: Admin = Admin()
    etcd: WorkerEtcdConfig = WorkerEtcdConfig()
    tracing: Tracing = Tracing()
    trace: Trace = Trace()

    def __post_init__(self) -> None:
        """Raises ValueError for what no field alone can tell; the loader adds the file's name."""
        listed = self.listed
        seen = [
            parse_dns_name(url, "http")[1:] if is_dns_name(url) else parse_base_url(url) for url in listed
        ]
        for url, host_and_port in zip(listed, seen, strict=True):
            if seen.count(host_and_port) > 1:
                raise ValueError(f"worker {url} is listed twice")
        self._check_tls(listed)
        if any(tenant.name == SHARED for tenant in self.tenants):
            raise ValueError(f"no tenant can be called {SHARED!r}: it names the shared cache namespace")
        self._check_aliases()
        known = (*self.models, *self.aliases)
        if self.models and self.default_model and self.default_model not in known:
            raise ValueError(f"default_model {self.default_model!r} is none of 'models', and no alias")
        if (self.access.tls_cert_file is None) != (self.access.tls_key_file is None):
            raise ValueError("access.tls_cert_file and access.tls_key_file go together: set both, or none")
        if self.etcd.endpoints and self._has_dns_names:
            raise ValueError("etcd.endpoints and dns+http:// both name workers: keep one")
        if self.prefill and not (self.decode or self.elastic) and not self.has_discovery:
            raise ValueError(
                "'prefill' lists workers but 'decode' is empty; list a decode worker, or use 'agg'"
            )

    @property
    def listed(self) -> tuple[str, ...]:
        """Base URLs, and names for DNS, of workers of all roles."""
        return (*self.prefill, *self.decode, *self.agg, *self.elastic)

    @property
    def tenant_defaults(self) -> TenantLimits:
        """Of tenants that have no table of their own."""
        return next((tenant for tenant in self.tenants if tenant.name == OTHERS), TenantLimits())

    def check_workers(self) -> None:
        """Raises ConfigError where no way leads to a worker: a file is empty while it is written anew."""
        if not (self.decode or self.agg or self.elastic or self.has_discovery) and self.admin.port is None:
            raise ConfigError(
                "no workers: list 'decode' (and 'prefill') workers, or 'agg' or 'elastic' ones, or set "
                "etcd.endpoints"
            )

    def _check_aliases(self) -> None:
        for alias, model in self.aliases.items():
            if not 0 < len(alias) <= MAX_ALIAS_CHARS:
                raise ValueError(f"alias {alias[:40]!r}: a name has from 1 to {MAX_ALIAS_CHARS} characters")
            if model in self.aliases:
                raise ValueError(f"alias {alias} stands for {model}, which is an alias itself")
            if not model or (self.models and not {model, base_of(model)} & set(self.models)):
                raise ValueError(f"alias {alias} stands for {model!r}, which is none of 'models'")

    def _check_tls(self, urls: Sequence[str]) -> None:
        if self.tls.certificate is not None and self.tls.ca is None:
            raise ValueError(
                "tls.certificate is shown to workers, which needs tls.ca; that of the public port is "
                "access.tls_cert_file"
            )
        for url in urls:
            if is_dns_name(url) and self.tls.ca is not None:
                raise ValueError(
                    f"worker {url}: DNS gives addresses, and certificates name hosts: with tls.ca list the "
                    "workers by their names, as https://HOST:PORT, or use etcd"
                )
            if is_https(url) and self.tls.ca is None:
                raise ValueError(f"worker {url} needs tls.ca: who signed the certificates of workers")
            if not is_https(url) and self.tls.ca is not None:
                raise ValueError(f"worker {url} has no TLS, and tls.ca asks for it: write https://")

    @property
    def has_discovery(self) -> bool:
        """Whether workers are found in etcd or by DNS."""
        return bool(self.etcd.endpoints) or self._has_dns_names

    @property
    def _has_dns_names(self) -> bool:
        return any(map(is_dns_name, self.listed))
