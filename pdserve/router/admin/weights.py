"""New weights for all workers of a model, by the admin API.

    drain      no new requests go to these workers
    hold       each lets what runs come to its end, and detaches the pool
    update     each reads the new weights
    release    each empties its caches, and serves again under a new namespace of the pool
    drop       pages of the old weights leave the pool
    undrain

All workers are held before the first one is updated, and released after the last. So no request is prefilled
with old weights and answered with new ones. Where one cannot be held, nothing is changed.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from pdserve.errors import RequestError
from pdserve.router.api.request_body import UNREADABLE
from pdserve.router.app.router import Router
from pdserve.router.fleet.worker import Worker
from pdserve.router.upstream.connection import UpstreamError

T = TypeVar("T")
FROM_DISK: Final = "/update_weights_from_disk"
SLACK_S: Final = 120.0
"""Beyond the time that was asked for: SGLang empties its caches, attaches storage, drops pages."""
MAX_ANSWER_BYTES: Final = 1 << 20
_HEADERS: Final = b"content-type: application/json\r\n"


class UpdateBody(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of the body of `update_weights_from_disk`; workers get all of it."""

    model_path: str
    abort_all_requests: bool = False
    timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 120.0
    """For running requests to end."""
    update_timeout_s: Annotated[float, Meta(gt=0, le=7200)] = 1800.0
    """For a worker to read the weights."""
    drop_old: bool = True
    """Drop the pages of the old weights."""


class _Released(msgspec.Struct):
    """A worker's answer to `/weights/release`."""

    earlier_namespaces: Annotated[list[str], Meta(max_length=64)]


class _Dropped(msgspec.Struct):
    """A worker's answer to `/weights/drop`."""

    dropped_pages: Annotated[int, Meta(ge=0, le=1 << 53)] = 0


class Weights:
    """Of all models behind this router."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._lock = asyncio.Lock()

    async def update_from_disk(self, model: str, body: bytes) -> dict[str, Any]:
        """What each worker said. Raises RequestError: 404, 409 where nothing was changed, 502 where a worker
        did not take the weights.
        """
        asked = _decoded(body, UpdateBody)
        async with self._alone(), self._drained(model) as workers:
            await self._hold_all(workers, asked)
            said = await self._all(workers, FROM_DISK, _without_ours(body), asked.update_timeout_s)
            return await self._release_all(workers, said, asked.drop_old)

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        if self._lock.locked():
            raise RequestError(409, "Weights are being replaced already; ask again.", code="weights_updating")
        async with self._lock:
            yield

    def _workers(self, model: str) -> list[Worker]:
        """All that serve the model, ready or not: one that is left out would keep its old weights."""
        found = [one for one in self._router.fleet.workers if one.info and one.info.model == model]
        if not found:
            raise RequestError(404, f"No worker of {model!r} is known.", code="model_not_found")
        if without := next((one for one in found if one.lacks("weights")), None):
            raise RequestError(409, f"Worker {without.id} cannot take new weights.", code="weights_absent")
        return found

    @asynccontextmanager
    async def _drained(self, model: str) -> AsyncIterator[list[Worker]]:
        workers = self._workers(model)
        drained = self._drain(workers)
        try:
            yield workers
        finally:
            self._undrain(drained)

    def _drain(self, workers: Sequence[Worker]) -> list[Worker]:
        drained = [worker for worker in workers if not worker.drained]
        for worker in drained:
            self._router.fleet.members.drain(worker.id, True)
        return drained

    def _undrain(self, drained: Sequence[Worker]) -> None:
        for worker in drained:
            if self._router.fleet.by_id.get(worker.id) is worker:
                self._router.fleet.members.drain(worker.id, False)

    async def _hold_all(self, workers: Sequence[Worker], asked: UpdateBody) -> None:
        body = msgspec.json.encode({"abort": asked.abort_all_requests, "timeout_s": asked.timeout_s})
        said = await self._all(workers, "/weights/hold", body, asked.timeout_s)
        if wrong := _wrong(said):
            held = [worker for worker in workers if worker.id not in wrong]
            await self._all(held, "/weights/release", b"{}", 0.0)
            raise RequestError(409, f"Nothing was changed: {_listed(wrong)}", code="not_held")

    async def _release_all(
        self, workers: Sequence[Worker], said: dict[str, dict[str, Any]], drop_old: bool
    ) -> dict[str, Any]:
        """`said`: by worker, what it said of the update."""
        body = msgspec.json.encode({"id": uuid.uuid4().hex})
        released = await self._all(workers, "/weights/release", body, 0.0)
        for worker in workers:  # its namespace is another one, and its memory is empty: a probe asks it anew
            self._router.fleet.on_probe_not_ready(worker)
        wrong = _wrong(said) | _wrong(released)
        answers = {one: _taken(answer, _Released) for one, answer in released.items() if one not in wrong}
        wrong |= {
            one: f"{one}: it answers as no worker does" for one, answer in answers.items() if not answer
        }
        dropped = 0
        for worker in workers if not wrong and drop_old else ():
            released_by = answers[worker.id]
            for name in released_by.earlier_namespaces if released_by else ():
                body = msgspec.json.encode({"namespace": name})
                answer = (await self._all([worker], "/weights/drop", body, 0.0))[worker.id]
                dropped += (_taken(answer, _Dropped) or _Dropped()).dropped_pages
        if wrong:
            told = (
                f"Workers did not take the new weights: {_listed(wrong)}. Start them again, or update again."
            )
            raise RequestError(502, told, type_="server_error", code="not_updated")
        return {"updated": [worker.id for worker in workers], "workers": said, "dropped_pages": dropped}

    async def _all(
        self, workers: Sequence[Worker], target: str, body: bytes, limit_s: float
    ) -> dict[str, dict[str, Any]]:
        """By worker, at the same time: the answer, or `{"error": ...}`."""
        answers = await asyncio.gather(*(self._post(one, target, body, limit_s + SLACK_S) for one in workers))
        return {worker.id: answer for worker, answer in zip(workers, answers, strict=True)}

    async def _post(self, worker: Worker, target: str, body: bytes, limit_s: float) -> dict[str, Any]:
        connect_s = self._router.config.deadlines.connect_s
        try:
            response = await self._router.upstream.ask(
                worker, target, _HEADERS, body, connect_s=connect_s, head_s=limit_s
            )
            try:
                text = await response.read_all(limit_s, MAX_ANSWER_BYTES)
            finally:
                response.release()
            answer = msgspec.json.decode(text, type=dict[str, Any])
        except (UpstreamError, *UNREADABLE) as error:
            return {"error": f"{worker.id}: {error}"}
        if response.status != 200:
            said = answer.get("error")
            message = said.get("message") if isinstance(said, dict) else answer.get("message")
            return {"error": f"{worker.id}: status {response.status}: {message or 'it does not say why'}"}
        return answer


def _decoded(body: bytes, type_: Any) -> Any:
    try:
        return msgspec.json.decode(body or b"{}", type=type_)
    except UNREADABLE as error:
        raise RequestError(400, str(error)) from None


def _taken(said: dict[str, Any], type_: type[T]) -> T | None:
    """None: it has another form."""
    try:
        return msgspec.convert(said, type_)
    except msgspec.ValidationError:
        return None


def _without_ours(body: bytes) -> bytes:
    """SGLang's fields. Requests were ended, if so asked, before the workers were held."""
    fields = {name: value for name, value in json.loads(body).items() if name not in _OURS}
    return msgspec.json.encode(fields)


_OURS: Final = frozenset(("timeout_s", "update_timeout_s", "drop_old", "abort_all_requests"))


def _wrong(said: dict[str, dict[str, Any]]) -> dict[str, str]:
    """By worker that did not do it: why."""
    return {worker: str(answer["error"]) for worker, answer in said.items() if answer.get("error")}


def _listed(wrong: dict[str, str]) -> str:
    return "; ".join(wrong.values())
