"""Namespaces of tenants. Pure.

The pages of a tenant are in a namespace of their own beside that of the model: `MODEL#TENANT`, with the
model's geometry. So all that holds for a namespace holds for a tenant: its pages are counted apart, and at
its quota its own pages go first; to drop it voids its pages on all nodes and in all tiers, and nodes that
were away learn of that.

Nothing need be set up for one. A worker that may write to the model's namespace opens it, and it has the
model's settings but for its quotas, which are its own, or else the model's `tenant_quota_bytes` and
`tenant_tier_quota_bytes`. Quotas, rates and weight of the model hold for it with all of its tenants. A model
that is dropped or cleared takes its tenants along.
"""

from __future__ import annotations

import re
from typing import Final

from msgspec.structs import replace

from pdserve.kvpool.protocol.cluster_messages import NamespaceSettings

MARK: Final = "#"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
OWN: Final = ("quota_bytes", "tier_quota_bytes")
"""The settings that a tenant's record may have."""


def is_tenant_name(name: str) -> bool:
    """Whether a tenant may be called so."""
    return _NAME.fullmatch(name) is not None


def tenant_of(cache_salt: str | None) -> str:
    """Whose pages those of a request with this salt are, as the router writes it: `tenant/NAME` or
    `tenant/NAME/SALT`. Empty: nobody's.
    """
    kind, _, rest = (cache_salt or "").partition("/")
    name = rest.partition("/")[0]
    return name if kind == "tenant" and is_tenant_name(name) else ""


def name_of(model: str, tenant: str) -> str:
    """The namespace of a tenant's pages of a model; without a tenant the model's own."""
    return f"{model}{MARK}{tenant}" if tenant else model


def split(name: str) -> tuple[str, str]:
    """(the model's namespace, the tenant) of a namespace; the tenant is empty where it is of nobody."""
    model, mark, tenant = name.rpartition(MARK)
    return (model, tenant) if mark and model and is_tenant_name(tenant) else (name, "")


def settings_of(model: NamespaceSettings, own: NamespaceSettings) -> NamespaceSettings:
    """What a tenant's namespace may do. `own`: of its record."""
    return replace(
        model,
        quota_bytes=own.quota_bytes or model.tenant_quota_bytes,
        tier_quota_bytes=own.tier_quota_bytes or model.tenant_tier_quota_bytes,
    )
