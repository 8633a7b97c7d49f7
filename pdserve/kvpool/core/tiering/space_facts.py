"""What tiers are told of a namespace. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Final

import msgspec

from pdserve.kvpool.namespaces.catalog import Namespace
from pdserve.kvpool.tiers.base import SpaceFacts

SHARED_BYTES: Final = 16
_FLOAT: Final = re.compile(r"(?:bfloat|float|uint|int)(\d+)")


def facts_of(namespace: Namespace) -> SpaceFacts:
    """Its pages have the same bytes on all nodes that have its name, geometry and generation. A dropped
    namespace that comes back has another generation.
    """
    identity = msgspec.json.encode([namespace.name, sorted(namespace.geometry.items()), namespace.generation])
    shared = hashlib.blake2b(identity, digest_size=SHARED_BYTES).hexdigest()
    return SpaceFacts(namespace.name, shared, item_bytes(namespace.geometry))


def item_bytes(geometry: Mapping[str, str]) -> int:
    """Bytes of one number of the KV; 1 if the geometry does not say."""
    name = geometry.get("kv_dtype", "")
    found = _FLOAT.match(geometry.get("dtype", "") if name in ("", "auto") else name)
    return max(1, int(found[1]) // 8) if found else 1
