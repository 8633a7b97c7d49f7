"""The names of LMCache's objects in the pool, and one pool client for each kind of objects.

LMCache names an object by the hash chain of its tokens, the model, the rank, the object group and the salt.
It does not say what the bytes are: two servers that use one model name may hold other weights, types or
chunk sizes. So model, revision, number of ranks, group and layout decide the `Namespace`, and the
rest decides the key in it (`pool_key`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import threading
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

from pdserve.errors import PoolRefused, PoolUnavailable
from pdserve.integrations.lmcache.settings import IntegrationSettings, model_identity, model_label
from pdserve.kvpool.client.client import PoolClient

logger = logging.getLogger(__name__)

VERSION: Final = "1"  # raise it when the meaning of an object's bytes or of its key changes in our own code
MAX_NAMESPACES: Final = 64
"""A server has a few models, of a few groups each. Each namespace has threads and connections of its own."""


class ObjectKey(Protocol):
    """LMCache's, as far as it is read here."""

    @property
    def chunk_hash(self) -> bytes: ...
    @property
    def model_name(self) -> str: ...
    @property
    def kv_rank(self) -> int: ...
    @property
    def object_group_id(self) -> int: ...
    @property
    def cache_salt(self) -> str: ...


class Owner(NamedTuple):
    """Whose objects: of one model, number of ranks and object group."""

    model: str
    world_size: int
    group: int


class Layout(NamedTuple):
    """What an object's bytes are."""

    text: str
    """The parts, as in `float16[2,4,64,128]`."""
    size_bytes: int


class Namespace(NamedTuple):
    """Objects whose bytes mean the same. Each is a page of the pool."""

    owner: Owner
    layout: Layout


def owner_of(key: ObjectKey) -> Owner:
    """LMCache packs the number of ranks into `kv_rank` (`ObjectKey.ComputeKVRank`)."""
    return Owner(key.model_name, key.kv_rank >> 24 & 0xFF, key.object_group_id)


def layout_of(dtypes: Sequence[Any], shapes: Sequence[Sequence[int]]) -> Layout:
    """The layout of objects with these parts. `dtypes`: torch's."""
    parts = list(zip(dtypes, shapes, strict=True))
    words = [f"{str(dtype).removeprefix('torch.')}[{','.join(map(str, shape))}]" for dtype, shape in parts]
    return Layout(" ".join(words), sum(dtype.itemsize * math.prod(shape) for dtype, shape in parts))


def pool_key(key: ObjectKey) -> bytes:
    """The 32-byte key of an object in its namespace."""
    salt = key.cache_salt.encode()
    rank = (key.kv_rank & (1 << 64) - 1).to_bytes(8, "little")
    digest = hashlib.sha256(b"pdserve-lmcache-v1" + rank + len(salt).to_bytes(8, "little") + salt)
    digest.update(key.chunk_hash)
    return digest.digest()


def geometry(namespace: Namespace, identity: str, revision: str) -> dict[str, str]:
    """Everything but rank, salt and tokens that decides the bytes of an object."""
    return {
        "engine": "lmcache",
        "model": identity,
        "revision": revision,
        "world_size": str(namespace.owner.world_size),
        "group": str(namespace.owner.group),
        "layout": namespace.layout.text,
        "version": VERSION,
    }


def pool_name(namespace: Namespace, given: str, geometry: dict[str, str]) -> str:
    """Its name in the pool. `given`: the operator's, who then says what may share it; further groups of a
    model have one each. Empty: a readable label and the geometry's hash.
    """
    if given:
        return f"{given}.g{namespace.owner.group}" if namespace.owner.group else given
    text = json.dumps(geometry, sort_keys=True).encode()
    return f"lmcache-{model_label(namespace.owner.model)}@{hashlib.sha256(text).hexdigest()[:12]}"


class Namespaces:
    """The pool clients of one LMCache server: one for each `Namespace`, made when one of its objects is first
    met. Thread-safe.
    """

    def __init__(self, settings: IntegrationSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._clients: dict[Namespace, PoolClient] = {}
        self._identities: dict[str, str] = {}
        self._closed = False

    def client(self, namespace: Namespace) -> PoolClient:
        """The client for objects of this namespace. The first call for a model whose files are on this
        machine reads them to take a fingerprint. Raises PoolUnavailable: there are too many namespaces, or
        we are closed; StartupError: the files cannot be read.
        """
        found = self._clients.get(namespace)
        if found is not None:
            return found
        with self._lock:
            if namespace not in self._clients:
                self._clients = {**self._clients, namespace: self._make(namespace)}
            return self._clients[namespace]

    def known(self, owner: Owner) -> list[Namespace]:
        """The namespaces of an owner's objects that were met so far."""
        return [namespace for namespace in self._clients if namespace.owner == owner]

    @property
    def clients(self) -> list[PoolClient]:
        """The clients of all namespaces."""
        return list(self._clients.values())

    @property
    def is_up(self) -> bool:
        """Whether a node of the pool can be asked, as far as is known."""
        return any(client.is_up for client in self.clients)

    def close(self) -> None:
        """Operations in progress end with misses. Idempotent."""
        with self._lock:
            self._closed = True
        for client in self.clients:
            client.close()

    def _make(self, namespace: Namespace) -> PoolClient:
        if self._closed:
            raise PoolUnavailable("the adapter is closed")
        if len(self._clients) >= MAX_NAMESPACES:
            raise PoolUnavailable(
                f"objects of more than {MAX_NAMESPACES} models, groups or layouts in one server"
            )
        pool, model = self._settings.pool, namespace.owner.model
        if model not in self._identities:
            self._identities[model] = model_identity(model)
        fields = geometry(namespace, self._identities[model], self._settings.revision)
        name = pool_name(namespace, pool.namespace, fields)
        client = PoolClient(pool, name, fields, name="lmcache", page_bytes=namespace.layout.size_bytes)
        logger.info("objects of %s (%s) are in namespace %s of the pool", model, namespace.layout.text, name)
        for node, error in client.check().items():
            if isinstance(error, PoolRefused):
                logger.error("pool node %s refuses us, its pages are missed: %s", node, error)
            elif error is not None:
                logger.warning("pool node %s cannot be reached, its pages are missed: %s", node, error)
        return client
