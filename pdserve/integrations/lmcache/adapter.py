"""LMCache's L2 adapter on the pool: `L2AdapterInterface` of LMCache 0.5.6.

LMCache calls it from two threads, its store controller and its prefetch controller. Each submits a task and
polls three descriptors for the end of it:

    store             objects in LMCache's memory -> pages of the pool
    lookup-and-lock   which objects the pool has
    load              pages of the pool -> given objects

Objects are addresses in LMCache's own memory (L1). So pages go between it and the node's memory, mapped or by
the network, with no copy of ours.

The pool never makes a request wait for long or fail: a node that is away, late or wrong costs misses.
Checksums are the pool's (`PoolClient.get`). Nothing is locked in the pool: an object that was found and is
evicted before its load is a miss, which LMCache computes.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from pdserve.errors import PdserveError
from pdserve.integrations.lmcache.namespaces import (
    Namespace,
    Namespaces,
    ObjectKey,
    layout_of,
    owner_of,
    pool_key,
)
from pdserve.integrations.lmcache.settings import log_to_stderr, read_settings
from pdserve.integrations.lmcache.task_queue import TaskQueue
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.protocol.page_bytes import Bytes1D, PageBuffers
from pdserve.logs import ThrottledLog

logger = logging.getLogger(__name__)
Move: TypeAlias = Callable[[PoolClient, list[bytes], list[PageBuffers]], list[bool]]
"""`PoolClient.put` or `get`."""

CLOSE_SLACK_S: Final = 2.0


class PdserveL2(L2AdapterInterface):  # type: ignore[misc]  # LMCache's types are not checked here
    """Built by LMCache's server from `--l2-adapter '{"type": "plugin", ...}'`."""

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        """`params`: as `IntegrationSettings`. `l1_memory_desc`: where LMCache's memory lies. It needs no
        preparation: all data paths take addresses. Raises ConfigError, StartupError.
        """
        super().__init__(max_capacity_bytes=0)  # the pool evicts by itself
        log_to_stderr()
        settings = read_settings(params, os.environ, source="adapter_params")
        pool = settings.pool
        self._slowest_s = max(pool.get_timeout_s, pool.put_timeout_s) + pool.restart_wait_s
        self._namespaces = Namespaces(settings)
        self._log = ThrottledLog(logger)
        self._stores: TaskQueue[Any] = TaskQueue("store", pool.put_timeout_s)
        self._lookups: TaskQueue[Any] = TaskQueue("lookup", pool.exists_timeout_s)
        self._loads: TaskQueue[Any] = TaskQueue("load", pool.get_timeout_s)

    # -- descriptors: readable when a task of the kind is done

    def get_store_event_fd(self) -> int:
        return self._stores.event_fd

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.event_fd

    def get_load_event_fd(self) -> int:
        return self._loads.event_fd

    # -- store

    def submit_store_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        return self._stores.submit(partial(self._store, keys, objects), lambda: L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        return self._stores.pop_all()

    # -- look up, and lock

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: Mapping[int, Any]
    ) -> int:
        return self._lookups.submit(
            partial(self._look_up, keys, group_layout_descs), partial(_bitmap, len(keys), ())
        )

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._lookups.pop(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Nothing to do: a look-up locks nothing."""

    # -- load

    def submit_load_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        return self._loads.submit(partial(self._load, keys, objects), partial(_bitmap, len(keys), ()))

    def query_load_result(self, task_id: int) -> Any:
        return self._loads.pop(task_id)

    # -- management

    def delete(self, keys: list[ObjectKey]) -> None:
        """Drop the objects, of every layout that was met in this server. Raises PdserveError."""
        namespaces = self._by_namespace(keys, lambda index: self._namespaces.known(owner_of(keys[index])))
        for namespace, indices in namespaces.items():
            client = self._namespaces.client(namespace)
            names = [pool_key(keys[index]) for index in indices]
            there = client.exists(names)
            client.remove([name for name, is_there in zip(names, there, strict=True) if is_there])
            gone = [keys[index] for index, was_there in zip(indices, there, strict=True) if was_there]
            self._notify_keys_deleted(gone, [namespace.layout.size_bytes] * len(gone))

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> Any:
        """Raises NotImplementedError: the pool keeps digests of LMCache's names."""
        raise NotImplementedError("the pool keeps digests of names: `pdserve pool ls` lists its pages")

    def report_status(self) -> dict[str, Any]:
        clients = self._namespaces.clients
        return {
            "is_healthy": not clients or self._namespaces.is_up,
            "type": "pdserve",
            "namespaces": {client.namespace: asdict(client.counters) for client in clients},
            "refused": {
                "store": self._stores.refused,
                "lookup": self._lookups.refused,
                "load": self._loads.refused,
            },
        }

    def close(self) -> None:
        """End all tasks; those that are not done are misses. Afterwards nothing touches LMCache's memory."""
        self._namespaces.close()
        for queue in (self._lookups, self._loads, self._stores):
            queue.close(self._slowest_s + CLOSE_SLACK_S)

    # -- the tasks, each on the thread of its queue

    def _store(self, keys: Sequence[ObjectKey], objects: Sequence[Any]) -> Any:
        stored = self._moved(PoolClient.put, keys, objects)
        sizes = [objects[index].get_size() for index in stored]
        if stored:
            self._notify_keys_stored([keys[index] for index in stored], sizes)
        return L2StoreResult(len(stored) == len(keys), sum(sizes))

    def _load(self, keys: Sequence[ObjectKey], objects: Sequence[Any]) -> Any:
        return _bitmap(len(keys), self._moved(PoolClient.get, keys, objects))

    def _look_up(self, keys: Sequence[ObjectKey], descs: Mapping[int, Any]) -> Any:
        layouts = {group: layout_of(desc.dtypes, desc.shapes) for group, desc in descs.items()}

        def namespaces_of(index: int) -> list[Namespace]:
            owner = owner_of(keys[index])
            layout = layouts.get(owner.group)
            return self._namespaces.known(owner) if layout is None else [Namespace(owner, layout)]

        found: set[int] = set()
        for namespace, indices in self._by_namespace(keys, namespaces_of).items():
            with self._missed():
                there = self._namespaces.client(namespace).exists(
                    [pool_key(keys[index]) for index in indices]
                )
                found.update(index for index, is_there in zip(indices, there, strict=True) if is_there)
        if found:
            self._notify_keys_accessed([keys[index] for index in sorted(found)])
        return _bitmap(len(keys), found)

    def _moved(self, move: Move, keys: Sequence[ObjectKey], objects: Sequence[Any]) -> list[int]:
        """The indices of the objects that were moved."""
        moved: list[int] = []
        for namespace, indices in self._by_namespace(
            keys, lambda index: [_namespace_of(keys[index], objects[index])]
        ).items():
            names = [pool_key(keys[index]) for index in indices]
            memory: list[PageBuffers] = [[_view(objects[index])] for index in indices]
            with self._missed():
                done = move(self._namespaces.client(namespace), names, memory)
                moved += [index for index, is_done in zip(indices, done, strict=True) if is_done]
        return moved

    def _by_namespace(
        self, keys: Sequence[ObjectKey], namespaces_of: Callable[[int], Iterable[Namespace]]
    ) -> dict[Namespace, list[int]]:
        """The indices in `keys` by namespace: nearly always one."""
        indices: dict[Namespace, list[int]] = defaultdict(list)
        for index in range(len(keys)):
            for namespace in namespaces_of(index):
                indices[namespace].append(index)
        return indices

    @contextmanager
    def _missed(self) -> Iterator[None]:
        """What the block does not find out is a miss. Errors are of the pool, or of the model's files."""
        try:
            yield
        except PdserveError as error:
            self._log.warning(type(error).__name__, "objects are missed: %s", error)


def _namespace_of(key: ObjectKey, obj: Any) -> Namespace:
    # an object of one part may say it in the singular only
    dtypes, shapes = obj.meta.dtypes or [obj.meta.dtype], obj.meta.shapes or [obj.meta.shape]
    return Namespace(owner_of(key), layout_of(dtypes, shapes))


def _view(obj: Any) -> Bytes1D:
    """The object's memory, uint8 [its size]."""
    return np.frombuffer(memoryview(obj.byte_array).cast("B"), np.uint8)


def _bitmap(length: int, indices: Iterable[int]) -> Any:
    bitmap = Bitmap(length)
    for index in indices:
        bitmap.set(index)
    return bitmap
