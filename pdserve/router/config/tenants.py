"""Configuration of tenants, of admission, and of who may reach what."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from pdserve.security.tls import TlsConfig
from pdserve.security.tokens import Secret

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
SHARED = "shared"
"""The cache namespace that asks for no separation; also the name that no tenant may have."""
OTHERS = "*"
"""The name of the table of all tenants that have none of their own."""


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a tenant may use of a router, all its processes together."""

    requests_s: Annotated[float, Meta(ge=0)] = 0.0
    """Requests per second; a burst may be those of one second. 0: no limit."""
    tokens_min: Annotated[int, Meta(ge=0)] = 0
    """Prompt and output tokens per minute; a burst may be those of one minute. 0: no limit."""
    concurrency: Annotated[int, Meta(ge=0)] = 0
    """Most requests that are answered at the same time; further ones wait. 0: no limit."""
    weight: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    """Share of a full router, relative to the weights of other tenants."""
    cache: Annotated[str, Meta(pattern=r"^$|" + NAME_PATTERN[1:])] = ""
    """Cache namespace: requests of one namespace share cached pages. Empty: the tenant's own; `shared`:
    common to all tenants with this value.
    """
    retain_tokens: Annotated[int, Meta(ge=0)] = 0
    """Tokens of conversations that it may have kept in the pool for a while, or brought up (docs/pool.md);
    wishes beyond are passed over. 0: none.
    """
    max_priority: Annotated[int, Meta(ge=0, le=100)] = 0
    """The most urgent `priority` that its requests may have. It may always be less urgent than 0, the
    priority of requests that say nothing.
    """
    controls_engine: bool = False
    """May set the fields of a request that control the engine, like `session_params` or
    `custom_logit_processor`, and any `priority` (docs/tenants.md).
    """
    media_domains: tuple[str, ...] = ()
    """Hosts from which workers may fetch its images, videos and sound: names, `*.example.com`, or `*` for all
    names. `data:` URLs are always taken.
    """


class Tenant(TenantLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant with limits of its own, or all others."""

    name: Annotated[str, Meta(pattern=NAME_PATTERN + r"|^\*$")]
    """Name of the tenant, as in its keys; `*`: all that have no table of their own."""


class Access(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who is let in."""

    keys_file: Path | None = None
    """File of API keys with lines `TENANT sha256:DIGEST`, written by `pdserve key`. If there are keys here or
    in PDSERVE_API_KEYS (`TENANT=KEY,...`), every request needs one.
    """
    cluster_token: Secret = Secret("")
    """Token sent to the workers; also from PDSERVE_CLUSTER_TOKEN. Empty: none."""
    tls_cert_file: Path | None = None
    """Certificate chain (PEM). If set, the public port uses TLS."""
    tls_key_file: Path | None = None
    """Private key of the certificate (PEM)."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may ask this router from a browser, like `https://app.example.com`; `*`: all.
    Empty: none.
    """
    proxies: tuple[str, ...] = ()
    """Addresses of proxies before the router. Wrong keys that come from them have no bound, because one
    address stands for many clients there. From other addresses 64 are looked at, and then one a second.
    """
    show_load: bool = False
    """Show figures of load in `x-pdserve-plan`, and the workers' addresses, even if there are API keys. They
    reveal how much other tenants send.
    """


class Admin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The administrators' port."""

    host: str = "127.0.0.1"
    """Address that the admin API listens on."""
    port: Annotated[int, Meta(ge=0, le=65535)] | None = None
    """Port of the admin API; 0: a free one; none: no API."""
    key: Secret = Secret("")
    """Key of the admin API, required if it has a port; also from PDSERVE_ADMIN_KEY."""
    tls: TlsConfig = TlsConfig()
    """Certificate of the admin port; with it `https` only. With `client_ca` clients must show one too."""


PRIORITY_STEP_S: Final = 1.0
"""A request of a priority counts as if it had waited so much longer for each step above 0."""


class Admission(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many requests are answered at a time, and how many may wait."""

    running_per_worker: Annotated[int, Meta(ge=0)] = 0
    """Most running requests per ready decode worker, for all workers of a model together; each router process
    has its equal part. Further requests wait. 0: twice as many as the worker says that it computes at a time.
    """
    queue_length: Annotated[int, Meta(ge=0)] = 1024
    """Most waiting requests for one model in one router process; further requests are answered with 429."""
    queue_s: Annotated[float, Meta(ge=0)] = 30.0
    """Longest wait of a request; after it, the answer is 429."""

    def head_start_s(self, urgency: int) -> float:
        """What the urgency of a request counts for in the queue. All of them lie within half of `queue_s`, so
        nobody's urgent requests keep back another one until its end.
        """
        bound_s = self.queue_s / 4
        return max(-bound_s, min(bound_s, urgency * PRIORITY_STEP_S))
