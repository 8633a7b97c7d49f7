"""vLLM's chunks in the pool: `SecondaryTierManager` of vLLM 0.32.0, which calls this interface experimental.

vLLM calls all of it on its scheduler's thread, so nothing here waits for the pool but `drain_jobs` and
`shutdown`. vLLM moves chunks between the device and its own host memory. This tier moves them between that
memory and the pool.

A chunk is a row of that memory, of all ranks together. Its name is vLLM's block hash, which a request's salt
is part of, with the number of its cache group.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from pdserve.integrations.settings import log_to_stderr, model_identity, model_label, read_settings
from pdserve.integrations.task_lane import TaskLane
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.protocol.page_bytes import PageBuffers

CLOSE_SLACK_S = 2.0


class _LookUps(AsyncLookupManager):  # type: ignore[misc]  # vLLM's types are not checked here
    """vLLM's own bookkeeping of look-ups, which asks in a thread of its own."""

    def __init__(self, client: PoolClient, tier_type: str) -> None:
        self._client = client
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: list[bytes], req_context: Any) -> Iterable[bool]:
        return self._client.exists([pool_key(key) for key in keys])


class PdserveTier(SecondaryTierManager):  # type: ignore[misc]  # as above
    """Built by vLLM from an entry of `secondary_tiers`; its other members are `IntegrationSettings`."""

    medium: ClassVar[Any] = Medium.CPU

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **params: Any,
    ) -> None:
        """Raises ConfigError, StartupError."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        log_to_stderr()
        settings = read_settings(params, os.environ, source=f"secondary_tiers: {tier_type}")
        pool, model = settings.pool, offloading_spec.config.model.name
        fields = geometry(offloading_spec, self.block_size_bytes, model_identity(model), settings.revision)
        name = pool.namespace or _namespace(model, fields)
        self._rows = np.frombuffer(primary_kv_view, np.uint8).reshape(-1, self.block_size_bytes)
        self._client = PoolClient(pool, name, fields, name="vllm", page_bytes=self.block_size_bytes)
        self._slowest_s = max(pool.get_timeout_s, pool.put_timeout_s) + pool.restart_wait_s
        self._lookups = _LookUps(self._client, tier_type)
        self._lanes: dict[bool, TaskLane[Any]] = {
            True: TaskLane("load", pool.get_timeout_s),
            False: TaskLane("store", pool.put_timeout_s),
        }
        self._pending = 0  # jobs submitted and not yet given back

    def lookup(self, key: bytes, req_context: Any) -> Any:
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        self._submit(job_metadata, is_load=False)

    def submit_load(self, job_metadata: Any) -> None:
        self._submit(job_metadata, is_load=True)

    def get_finished_jobs(self) -> list[Any]:
        finished = [job for lane in self._lanes.values() for job in lane.pop_all().values()]
        self._pending -= len(finished)
        results = []
        for result, failed in finished:
            self._lookups.mark_miss(failed)  # else vLLM would ask for them again and again
            results.append(result)
        return results

    def has_pending_work(self) -> bool:
        return self._pending > 0

    def on_new_request(self, req_context: Any) -> Any:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()

    def drain_jobs(self) -> None:
        """Wait until no job touches vLLM's memory. Each ends by its time-out."""
        for lane in self._lanes.values():
            lane.wait_idle()

    def shutdown(self) -> None:
        self._client.close()
        for lane in self._lanes.values():
            lane.close(self._slowest_s + CLOSE_SLACK_S)
        self._lookups.shutdown()

    def _submit(self, job: Any, *, is_load: bool) -> None:
        keys = list(job.keys)
        self._pending += 1
        move = partial(self._move, job.job_id, keys, [int(one) for one in job.chunk_ids], is_load=is_load)
        self._lanes[is_load].submit(move, partial(_result, job.job_id, keys, [], 0.0, is_load=is_load))

    def _move(
        self, job_id: int, keys: Sequence[bytes], rows: Sequence[int], *, is_load: bool
    ) -> tuple[Any, list[bytes]]:
        begun_s = time.monotonic()
        names = [pool_key(key) for key in keys]
        pages: list[PageBuffers] = [[self._rows[row]] for row in rows]
        done = self._client.get(names, pages) if is_load else self._client.put(names, pages)
        moved = [key for key, is_done in zip(keys, done, strict=True) if is_done]
        return _result(
            job_id, keys, moved, time.monotonic() - begun_s, is_load=is_load, page_bytes=self.block_size_bytes
        )


def _result(
    job_id: int,
    keys: Sequence[bytes],
    moved: Sequence[bytes],
    took_s: float,
    *,
    is_load: bool,
    page_bytes: int = 0,
) -> tuple[Any, list[bytes]]:
    """(the job's result, keys of a load that failed)"""
    is_whole = len(moved) == len(keys)
    result = JobResult(
        job_id=job_id,
        success=is_whole,
        successful_keys=tuple(moved) if is_load and moved and not is_whole else None,
        transfer_time=took_s,
        transfer_bytes=len(moved) * page_bytes,
    )
    there = set(moved)
    return result, [key for key in keys if key not in there] if is_load else []


def pool_key(key: bytes) -> bytes:
    """The 32-byte key of a chunk in its namespace."""
    return hashlib.sha256(b"pdserve-vllm-v1" + key).digest()


def geometry(spec: Any, chunk_bytes: int, identity: str, revision: str) -> dict[str, str]:
    """Everything but the tokens and the salt that decides a chunk's bytes: what vLLM's own file tier says of
    them, and the layout.
    """
    mapper = FileMapper.from_offloading_spec(
        root_dir="", offloading_spec=spec, blocks_per_file=spec.blocks_per_chunk, parallel_agnostic=True
    )
    fields = {name: json.dumps(value, sort_keys=True) for name, value in mapper.fields.items()}
    return fields | {
        "engine": "vllm",
        "model_name": identity,
        "revision": revision,
        "chunk_bytes": str(chunk_bytes),
        "layout": str(spec.config.kv_cache_layout),
    }


def _namespace(model: str, fields: dict[str, str]) -> str:
    text = json.dumps(fields, sort_keys=True).encode()
    return f"vllm-{model_label(model)}@{hashlib.sha256(text).hexdigest()[:12]}"
