"""New weights for all workers of a model, by the admin API.

    drain      no new requests go to these workers
    update     each ends or aborts what runs, reads the new weights, and empties its caches
    undrain

For workers with `storage = "none"`: those with the pool refuse, since its pages are of their first weights.
"""

from __future__ import annotations

import asyncio
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
    """What is read of the body of `update_weights_from_disk`; workers get all of it but our own field."""

    model_path: str
    update_timeout_s: Annotated[float, Meta(gt=0, le=7200)] = 1800.0
    """For a worker to read the weights. Ours."""


class Weights:
    """Of all models behind this router."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._lock = asyncio.Lock()

    async def update_from_disk(self, model: str, body: bytes) -> dict[str, Any]:
        """What each worker said. Raises RequestError: 404, 409 where it cannot begin, 502 where a worker
        did not take the weights.
        """
        try:
            asked = msgspec.json.decode(body or b"{}", type=UpdateBody)
            fields = msgspec.json.decode(body or b"{}", type=dict[str, msgspec.Raw])
        except UNREADABLE as error:
            raise RequestError(400, str(error)) from None
        fields.pop("update_timeout_s", None)
        if self._lock.locked():
            raise RequestError(409, "Weights are being replaced already; ask again.", code="weights_updating")
        async with self._lock:
            workers, members = self._workers(model), self._router.fleet.members
            drained = [worker for worker in workers if not worker.drained]
            for worker in drained:
                members.drain(worker.id, True)
            try:
                limit_s, sent = asked.update_timeout_s + SLACK_S, msgspec.json.encode(fields)
                answers = await asyncio.gather(*(self._post(one, sent, limit_s) for one in workers))
            finally:
                for worker in drained:
                    if members.by_id.get(worker.id) is worker:
                        members.drain(worker.id, False)
        if wrong := [str(answer["error"]) for answer in answers if answer.get("error")]:
            told = f"Workers did not take the new weights: {'; '.join(wrong)}."
            raise RequestError(502, told, type_="server_error", code="not_updated")
        ids = [worker.id for worker in workers]
        return {"updated": ids, "workers": dict(zip(ids, answers, strict=True))}

    def _workers(self, model: str) -> list[Worker]:
        """All that serve the model, ready or not: one that is left out would keep its old weights."""
        found = [one for one in self._router.fleet.workers if one.info and one.info.model == model]
        if not found:
            raise RequestError(404, f"No worker of {model!r} is known.", code="model_not_found")
        if without := next((one for one in found if one.lacks("weights")), None):
            raise RequestError(409, f"Worker {without.id} cannot take new weights.", code="weights_absent")
        return found

    async def _post(self, worker: Worker, body: bytes, limit_s: float) -> dict[str, Any]:
        """The worker's answer, or `{"error": ...}`."""
        try:
            said = await self._router.upstream.fetch(
                worker,
                FROM_DISK,
                _HEADERS,
                body,
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
