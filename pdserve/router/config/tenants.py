"""Configuration of tenants, of admission, and of who may reach what."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
SHARED = "shared"
"""The cache namespace that asks for no separation; also the name that no tenant may have."""


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a tenant may use of a router, all its processes together."""

    requests_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Requests per second, a second's worth at once; 0: no limit.",
        ),
    ] = 0.0
    tokens_min: Annotated[
        int,
        Meta(
            ge=0,
            description="Prompt and output tokens per minute, a minute's worth at once; 0: no limit.",
        ),
    ] = 0
    concurrency: Annotated[
        int,
        Meta(
            ge=0,
            description="Requests that are answered at the same time, more wait; 0: no limit.",
        ),
    ] = 0
    weight: Annotated[
        float, Meta(ge=0.01, le=100, description="Share of a full router, relative to the others' weights.")
    ] = 1.0
    cache: Annotated[
        str,
        Meta(
            pattern=r"^$|" + NAME_PATTERN[1:],
            description="Cache namespace: what one request left there, another of the same namespace finds. "
            "Empty: the tenant's own; `shared`: that of all who say so.",
        ),
    ] = ""

    @property
    def is_limited(self) -> bool:
        """It has limits that the processes of a router share."""
        return bool(self.requests_s or self.tokens_min or self.concurrency)


class Tenant(TenantLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant with limits of its own."""

    name: Annotated[str, Meta(pattern=NAME_PATTERN, description="Name, as the keys have it.")]


class Access(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who is let in."""

    keys_file: Annotated[
        Path | None,
        Meta(
            description="File of API keys, lines `TENANT sha256:DIGEST` (`pdserve key` writes them). With "
            "keys here or in PDSERVE_API_KEYS (`TENANT=KEY`, by commas) every request needs one."
        ),
    ] = None
    cluster_token: Annotated[
        str, Meta(description="Token shown to the workers; also from PDSERVE_CLUSTER_TOKEN. Empty: none.")
    ] = ""
    cluster_token_file: Annotated[Path | None, Meta(description="File that holds it instead.")] = None
    tls_cert_file: Annotated[
        Path | None, Meta(description="Certificate chain (PEM): the public port then speaks TLS.")
    ] = None
    tls_key_file: Annotated[Path | None, Meta(description="Its private key (PEM).")] = None
    show_load: Annotated[
        bool,
        Meta(
            description="`x-pdserve-plan` holds figures where there are keys, too: how much the workers have "
            "to do, so what other tenants send."
        ),
    ] = False


class Admin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The administrators' port."""

    host: Annotated[str, Meta(description="Address that the admin API listens on.")] = "127.0.0.1"
    port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        Meta(description="Port of the admin API; 0: a free one; none: no API."),
    ] = None
    key: Annotated[
        str, Meta(description="Key of the admin API, which is needed; also from PDSERVE_ADMIN_KEY.")
    ] = ""
    key_file: Annotated[Path | None, Meta(description="File that holds it instead.")] = None
    pool: Annotated[
        tuple[str, ...],
        Meta(
            description="Control addresses of pool nodes, for the live page; the others are learnt from "
            "them. `pdserve up` fills it in."
        ),
    ] = ()


class Admission(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many requests are answered at a time, and how many may wait."""

    running_per_worker: Annotated[
        int,
        Meta(
            ge=1,
            description="Requests of a router process at a time for each decode worker that is ready, all of "
            "a model's taken together: one of them may have more. What comes then waits.",
        ),
    ] = 4096
    queue_length: Annotated[
        int,
        Meta(
            ge=0,
            description="Requests that may wait for a model in a router process; what comes then is "
            "answered 429.",
        ),
    ] = 1024
    queue_s: Annotated[
        float, Meta(ge=0, description="A request waits this long, then it is answered 429.")
    ] = 30.0
