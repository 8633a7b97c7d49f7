"""What tiers are told of a namespace. Pure."""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from pdserve.kvpool.namespaces.catalog import Namespace, item_bytes
from pdserve.kvpool.tiers.base import SpaceFacts

SHARED_BYTES: Final = 16


def facts_of(namespace: Namespace) -> SpaceFacts:
    """Its pages have the same bytes on all nodes that have its name, geometry and generation. A dropped
    namespace that comes back has another generation.
    """
    identity = msgspec.json.encode([namespace.name, sorted(namespace.geometry.items()), namespace.generation])
    shared = hashlib.blake2b(identity, digest_size=SHARED_BYTES).hexdigest()
    return SpaceFacts(namespace.name, shared, item_bytes(namespace.geometry))
