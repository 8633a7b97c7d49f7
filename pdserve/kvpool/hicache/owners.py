"""Whose pages SGLang moves to and from its storage.

SGLang's storage threads know pages by hashes, which do not say whose they are. All that it hands from a
request to a backend's call are the hashes of the pages before (`HiCacheStorageExtraInfo.prefix_keys`). So a
mark with the tenant stands before those, put there by the scheduler process
(`engine/sglang/children/scheduler.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pdserve.kvpool.namespaces.tenants import is_tenant_name

_MARK: Final = "pdserve-tenant:"  # no hash begins so


def marked(prefix_keys: Sequence[str] | None, tenant: str) -> list[str] | None:
    """The hashes of the pages before those of a call, with the tenant; without one as they are."""
    if not tenant:
        return None if prefix_keys is None else list(prefix_keys)
    return [_MARK + tenant, *(prefix_keys or ())]


def tenant_of_call(extra_info: Any) -> str:
    """Whose pages a call of SGLang is about; empty: nobody's."""
    keys = getattr(extra_info, "prefix_keys", None)
    first = keys[0] if keys else ""
    tenant = first.removeprefix(_MARK)
    return tenant if first.startswith(_MARK) and is_tenant_name(tenant) else ""
