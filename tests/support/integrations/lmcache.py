"""LMCache's side of the L2 adapter: its own classes where LMCache is installed, else stand-ins for what we
use.

LMCache has an environment of its own (docs/other-engines.md), where the same tests run over the real classes.
"""

from __future__ import annotations

import importlib.util
import os
import select
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

SOON_MS = 20_000
IS_REAL = importlib.util.find_spec("lmcache") is not None


@dataclass(frozen=True)
class StandInKey:
    """As `lmcache.v1.distributed.api.ObjectKey`."""

    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""


@dataclass(frozen=True)
class StandInDesc:
    """As `lmcache.v1.distributed.api.MemoryLayoutDesc`."""

    shapes: list[Any]
    dtypes: list[Any]


class StandInObject:
    """As a `TensorMemoryObj`, over the given memory."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data
        self.meta = types.SimpleNamespace(dtype=data.dtype, shape=data.shape, dtypes=None, shapes=None)

    @property
    def byte_array(self) -> memoryview:
        return memoryview(self._data.view(torch.uint8).numpy().reshape(-1))

    def get_size(self) -> int:
        return self._data.numel() * self._data.element_size()


class StandInBitmap:
    """As `lmcache.lmcache_native.Bitmap`."""

    def __init__(self, size: int) -> None:
        self._bits = [False] * size

    def set(self, place: int) -> None:
        self._bits[place] = True

    def test(self, place: int) -> bool:
        return self._bits[place]


class StandInResult(int):
    """As `L2StoreResult`."""

    def __new__(cls, success: bool, bytes_transferred: int) -> StandInResult:
        return super().__new__(cls, bytes_transferred if success else -1)

    def is_successful(self) -> bool:
        return self >= 0

    def bytes_transferred(self) -> int:
        return max(0, self)


@dataclass(frozen=True)
class StandInUsage:
    """As `AdapterUsage`."""

    total_bytes_used: int
    total_capacity_bytes: int
    bytes_by_cache_salt: Mapping[str, int] = field(default_factory=dict)


class StandInAdapter:
    """What `L2AdapterInterface` does for its subclasses."""

    def __init__(self, max_capacity_bytes: int = 0) -> None:
        self._bytes: dict[str, int] = {}

    def _notify_keys_stored(self, keys: Sequence[StandInKey], sizes: Sequence[int]) -> None:
        for key, size in zip(keys, sizes, strict=True):
            self._bytes[key.cache_salt] = self._bytes.get(key.cache_salt, 0) + size

    def _notify_keys_accessed(self, keys: Sequence[StandInKey]) -> None:
        assert keys

    def _notify_keys_deleted(self, keys: Sequence[StandInKey], sizes: Sequence[int]) -> None:
        for key, size in zip(keys, sizes, strict=True):
            self._bytes[key.cache_salt] = self._bytes.get(key.cache_salt, 0) - size

    def get_usage(self) -> StandInUsage:
        return StandInUsage(sum(self._bytes.values()), 0, dict(self._bytes))


@contextmanager
def importable() -> Iterator[None]:
    """LMCache's modules can be imported: the real ones, or the stand-ins for as long as the block lasts."""
    if IS_REAL:
        yield
        return
    base = "lmcache.v1.distributed"
    contents: dict[str, dict[str, Any]] = {
        "lmcache.lmcache_native": {"Bitmap": StandInBitmap},
        f"{base}.internal_api": {"L2StoreResult": StandInResult},
        f"{base}.l2_adapters.base": {"L2AdapterInterface": StandInAdapter},
    }
    packages = ("lmcache", "lmcache.v1", base, f"{base}.l2_adapters")
    made = {name: types.ModuleType(name) for name in (*packages, *contents)}
    for name in packages:
        made[name].__path__ = []
    for name, members in contents.items():
        vars(made[name]).update(members)
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in (*made, "pdserve.integrations.lmcache.adapter"):
            sys.modules.pop(name, None)


def key(
    number: int, *, model: str = "org/a-model", rank: int = 0, ranks: int = 1, group: int = 0, salt: str = ""
) -> Any:
    """The key of an object: its chunk, of these ranks' one, in LMCache's packing."""
    packed = ranks << 24 | rank << 16 | ranks << 8 | rank
    chunk = number.to_bytes(32, "big")
    if IS_REAL:
        from lmcache.v1.distributed.api import ObjectKey

        return ObjectKey(chunk, model, packed, group, salt)
    return StandInKey(chunk, model, packed, group, salt)


SHAPE = (2, 3, 16, 64)


def memory_object(
    fill: int | None = None, *, dtype: torch.dtype = torch.float16, shape: Sequence[int] = SHAPE
) -> Any:
    """An object with bytes that belong to the number; without one, zeros."""
    data = torch.zeros(tuple(shape), dtype=dtype)
    if fill is not None:
        generator = torch.Generator().manual_seed(fill)
        flat = data.view(torch.uint8).view(-1)
        flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=generator))
    if not IS_REAL:
        return StandInObject(data)
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    flat = data.view(torch.uint8).view(-1)
    metadata = MemoryObjMetadata(
        shape=torch.Size(shape),
        dtype=dtype,
        address=flat.data_ptr(),
        phy_size=flat.numel(),
        fmt=MemoryFormat.KV_2LTD,
        ref_count=1,
    )
    return TensorMemoryObj(flat, metadata, parent_allocator=None)


def layout(dtype: torch.dtype = torch.float16, shape: Sequence[int] = SHAPE) -> Any:
    """What LMCache says of objects when it looks them up."""
    if IS_REAL:
        from lmcache.v1.distributed.api import MemoryLayoutDesc

        return MemoryLayoutDesc([torch.Size(shape)], [dtype])
    return StandInDesc([torch.Size(shape)], [dtype])


def contents(obj: Any) -> bytes:
    """The object's bytes."""
    return bytes(obj.byte_array)


class Controller:
    """Drives an adapter as LMCache's controllers do: submit, poll the descriptor, ask for the result."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter

    def store(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
        task = self.adapter.submit_store_task(list(keys), list(objects))
        fd = self.adapter.get_store_event_fd()
        done: dict[int, Any] = {}
        while task not in done:
            self.wait(fd)
            done |= self.adapter.pop_completed_store_tasks()
        return done[task]

    def look_up(self, keys: Sequence[Any], descs: Mapping[int, Any] | None = None) -> list[bool]:
        given = {0: layout()} if descs is None else descs
        task = self.adapter.submit_lookup_and_lock_task(list(keys), given)
        query = self.adapter.query_lookup_and_lock_result
        return self._bits(self.adapter.get_lookup_and_lock_event_fd(), task, query, len(keys))

    def load(self, keys: Sequence[Any], objects: Sequence[Any]) -> list[bool]:
        task = self.adapter.submit_load_task(list(keys), list(objects))
        return self._bits(self.adapter.get_load_event_fd(), task, self.adapter.query_load_result, len(keys))

    def wait(self, fd: int) -> None:
        """Until the descriptor is readable."""
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        assert poll.poll(SOON_MS), "no event came"
        os.eventfd_read(fd)

    def _bits(self, fd: int, task: int, query: Any, count: int) -> list[bool]:
        while (bitmap := query(task)) is None:
            self.wait(fd)
        assert query(task) is None, "a result is given once"
        return [bitmap.test(place) for place in range(count)]


Open = Callable[..., Controller]
