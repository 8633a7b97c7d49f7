"""Whether settings of a namespace are valid. Errors are messages for the person who set them. Pure."""

from __future__ import annotations

import math

import msgspec

from pdserve.errors import ConfigError
from pdserve.kvpool.namespaces.access import TOKENS
from pdserve.kvpool.namespaces.registry import MAX_NAME_CHARS, NamespaceError, check_geometry, check_name
from pdserve.kvpool.namespaces.tenants import OWN
from pdserve.kvpool.policies import check_policy
from pdserve.kvpool.protocol.cluster_messages import NamespaceRecord, NamespaceSettings
from pdserve.security.tokens import is_digest

MAX_WEIGHT = 1e6
MIN_WEIGHT = 1e-3
MAX_COPIES = 16
MIN_RATE = 1e-3  # per second; below it a request would wait for ever
MAX_POLICY_CHARS = 64
QUOTAS = ("quota_bytes", "tier_quota_bytes", "tenant_quota_bytes", "tenant_tier_quota_bytes")
MAX_COUNT = 1 << 62  # above all versions and generations


def check_record(record: NamespaceRecord) -> None:
    """Whether a node can have made this record, whatever its capacity and policies. Raises NamespaceError."""
    check_name(record.name)
    check_geometry(record.name, record.geometry, record.geometry)
    counts = (record.version, record.generation)
    if not all(0 <= count < MAX_COUNT for count in counts) or len(record.replaced_by) > MAX_NAME_CHARS:
        raise NamespaceError("bad_namespace", f"an impossible record of namespace '{record.name}'")
    check_bounds(record.settings)


def check_bounds(settings: NamespaceSettings) -> None:
    """Whether the settings are possible on a node of any capacity. Raises NamespaceError."""
    for name in (*QUOTAS, "operations_s", "bytes_s", "ttl_s"):
        value = getattr(settings, name)
        if not (value >= 0 and math.isfinite(value)):
            raise _bad(f"{name} is {value}: it must be 0 (no limit) or above")
    if not 1 <= settings.copies <= MAX_COPIES:
        raise _bad(f"copies is {settings.copies}: it must be 1 (each page on its node alone) to {MAX_COPIES}")
    for name in ("operations_s", "bytes_s"):
        if 0 < getattr(settings, name) < MIN_RATE:
            raise _bad(
                f"{name} is {getattr(settings, name)}: it must be 0 (no limit) or at least {MIN_RATE:g}"
            )
    if not MIN_WEIGHT <= settings.weight <= MAX_WEIGHT:
        raise _bad(f"weight is {settings.weight}: it must be from {MIN_WEIGHT:g} to {MAX_WEIGHT:,.0f}")
    if len(settings.policy) > MAX_POLICY_CHARS:
        raise _bad(f"policy: a name has at most {MAX_POLICY_CHARS} characters")
    for name in TOKENS:
        token = getattr(settings, name)
        if token and not is_digest(token):
            raise _bad(f"{name} must be the SHA-256 digest of the token, 64 hexadecimal digits")


def check_settings(settings: NamespaceSettings, capacity_bytes: int, *, tokens_allowed: bool) -> None:
    """Whether the settings are possible on a node of this capacity. Raises NamespaceError."""
    for name in ("quota_bytes", "tenant_quota_bytes"):
        if (quota_bytes := getattr(settings, name)) > capacity_bytes:
            raise _bad(
                f"{name} is {quota_bytes:,}, and this node has {capacity_bytes:,}: a quota is per "
                "node, and cannot be larger than one (0: no limit)"
            )
    check_bounds(settings)
    _check_policy(settings)
    for name in TOKENS:
        if getattr(settings, name) and not tokens_allowed:
            raise _bad(
                f"{name} is of no use while the node has no admin_token: set that in the node's "
                "configuration first"
            )


def check_tenant_settings(name: str, settings: NamespaceSettings) -> None:
    """Whether a tenant's namespace may have these settings of its own. Raises NamespaceError."""
    rest = msgspec.structs.replace(settings, **dict.fromkeys(OWN, 0))
    if rest != NamespaceSettings():
        raise _bad(f"'{name}' is of a tenant, which has {' and '.join(OWN)} of its own, and nothing else")


def _check_policy(settings: NamespaceSettings) -> None:
    try:
        check_policy(settings.policy, settings.ttl_s or None)
    except ConfigError as error:
        raise _bad(str(error)) from None


def _bad(message: str) -> NamespaceError:
    return NamespaceError("bad_settings", message)
