"""From LMCache's names of objects to namespaces and keys of the pool. Pure.

LMCache names an object by the hash chain of its tokens, the model, the rank, the object group and the salt.
It does not say what the bytes are: two servers with one name of a model may hold other weights, types or
chunks. So these decide the namespace (`Space`), and the rest decides the key in it (`pool_key`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

from pdserve.integrations.settings import model_label

VERSION: Final = "1"  # raise it when the meaning of an object's bytes or of its key changes in our own code


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


class Space(NamedTuple):
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


def geometry(space: Space, identity: str, revision: str) -> dict[str, str]:
    """Everything but rank, salt and tokens that decides the bytes of an object."""
    return {
        "engine": "lmcache",
        "model": identity,
        "revision": revision,
        "world_size": str(space.owner.world_size),
        "group": str(space.owner.group),
        "layout": space.layout.text,
        "version": VERSION,
    }


def namespace(space: Space, given: str, geometry: dict[str, str]) -> str:
    """Its name in the pool. `given`: the operator's, who then says what may share it; further groups of a
    model have one each. Empty: a readable label and the geometry's hash.
    """
    if given:
        return f"{given}.g{space.owner.group}" if space.owner.group else given
    text = json.dumps(geometry, sort_keys=True).encode()
    return f"lmcache-{model_label(space.owner.model)}@{hashlib.sha256(text).hexdigest()[:12]}"
