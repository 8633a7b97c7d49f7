"""New weights for all workers of a model, by the admin API.

    drain      no new requests go to these workers
    update     each ends or aborts what runs, reads the new weights, and empties its caches
    undrain

For workers with `storage = "none"`: those with the pool refuse, since its pages are of their first weights.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from pdserve.errors import RequestError
from pdserve.router.api.request_body import UNREADABLE
from pdserve.router.app.router import Router
from pdserve.router.fleet.worker import Worker
from pdserve.router.http.tls import UpstreamError

FROM_DISK: Final = "/update_weights_from_disk"
SLACK_S: Final = 120.0
"""Beyond the time that was asked for: SGLang empties its caches."""
MAX_ANSWER_BYTES: Final = 1 << 20
_HEADERS: Final = b"content-type: application/json\r\n"


class UpdateBody(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of the body of `update_weights_from_disk`; workers get all of it."""

    model_path: str
    update_timeout_s: Annotated[float, Meta(gt=0, le=7200)] = 1800.0
    """For a worker to read the weights."""


class Weights:
    """Of all models behind this router."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._lock = asyncio.Lock()

    async def update_from_disk(self, model: str, body: bytes) -> dict[str, Any]:
        """What each worker said. Raises RequestError: 404, 409 where it cannot begin, 502 where a worker
        did not take the weights.
        """
        asked = _decoded(body, UpdateBody)
        async with self._alone(), self._drained(model) as workers:
            said = await self._all(workers, FROM_DISK, _without_ours(body), asked.update_timeout_s)
            if wrong := _wrong(said):
                told = f"Workers did not take the new weights: {_listed(wrong)}."
                raise RequestError(502, told, type_="server_error", code="not_updated")
            return {"updated": [worker.id for worker in workers], "workers": said}

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

    async def _all(
        self, workers: Sequence[Worker], target: str, body: bytes, limit_s: float
    ) -> dict[str, dict[str, Any]]:
        """By worker, at the same time: the answer, or `{"error": ...}`."""
        answers = await asyncio.gather(*(self._post(one, target, body, limit_s + SLACK_S) for one in workers))
        return {worker.id: answer for worker, answer in zip(workers, answers, strict=True)}

    async def _post(self, worker: Worker, target: str, body: bytes, limit_s: float) -> dict[str, Any]:
        connect_s = self._router.config.deadlines.connect_s
        try:
            said = await self._router.upstream.fetch(
                worker,
                target,
                _HEADERS,
                body,
                connect_s=connect_s,
                limit_s=limit_s,
                limit_bytes=MAX_ANSWER_BYTES,
            )
            answer = msgspec.json.decode(said.body, type=dict[str, Any])
        except (UpstreamError, *UNREADABLE) as error:
            return {"error": f"{worker.id}: {error}"}
        if said.status != 200:
            inner = answer.get("error")
            message = inner.get("message") if isinstance(inner, dict) else answer.get("message")
            return {"error": f"{worker.id}: status {said.status}: {message or 'it does not say why'}"}
        return answer


def _decoded(body: bytes, type_: Any) -> Any:
    try:
        return msgspec.json.decode(body or b"{}", type=type_)
    except UNREADABLE as error:
        raise RequestError(400, str(error)) from None


def _without_ours(body: bytes) -> bytes:
    """SGLang's fields."""
    fields = {name: value for name, value in json.loads(body).items() if name not in _OURS}
    return msgspec.json.encode(fields)


_OURS: Final = frozenset(("update_timeout_s",))


def _wrong(said: dict[str, dict[str, Any]]) -> dict[str, str]:
    """By worker that did not do it: why."""
    return {worker: str(answer["error"]) for worker, answer in said.items() if answer.get("error")}


def _listed(wrong: dict[str, str]) -> str:
    return "; ".join(wrong.values())
