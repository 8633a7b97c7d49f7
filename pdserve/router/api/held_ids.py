"""Ids of responses that a worker stores in its own memory.

Only the worker that made one can go on with it. So the router chooses the id, and any router can
read the worker from it:

    resp_ WORKER TENANT RANDOM         12, 8 and 24 hexadecimal digits

WORKER and TENANT are digests of the worker's id and of the tenant's name. RANDOM cannot be guessed. An id is
not found by another tenant, nor when its worker has left.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable
from typing import Final

_PREFIX: Final = "resp_"
_WORKER_DIGITS: Final = 12
_TENANT_DIGITS: Final = 8
_RANDOM_DIGITS: Final = 24
_DIGITS: Final = re.compile(f"[0-9a-f]{{{_WORKER_DIGITS + _TENANT_DIGITS + _RANDOM_DIGITS}}}")


def new_id(worker_id: str, tenant: str) -> str:
    """An id of a response that the worker will store for the tenant."""
    random = secrets.token_hex(_RANDOM_DIGITS // 2)
    return _PREFIX + _digits(worker_id, _WORKER_DIGITS) + _digits(tenant, _TENANT_DIGITS) + random


def find_holder(id_: str, worker_ids: Iterable[str], tenant: str) -> str | None:
    """The id of the worker that holds it. None: it is no such id, another tenant's, or its worker left."""
    digits = id_.removeprefix(_PREFIX)
    if digits == id_ or not _DIGITS.fullmatch(digits):
        return None
    if digits[_WORKER_DIGITS:][:_TENANT_DIGITS] != _digits(tenant, _TENANT_DIGITS):
        return None
    worker = digits[:_WORKER_DIGITS]
    return next((one for one in worker_ids if _digits(one, _WORKER_DIGITS) == worker), None)


def _digits(name: str, count: int) -> str:
    return hashlib.blake2b(name.encode(), digest_size=count // 2).hexdigest()
