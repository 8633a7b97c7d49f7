"""`POST /pd/settled`: whether a request's pages are in the pool, after a bounded wait."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from msgspec import Meta

from pdserve.decode.writeback import WriteBack
from pdserve.errors import RequestError

MAX_WAIT_S = 60.0


class SettledQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `/pd/settled`. `request_id` is the x-request-id of the earlier request."""

    request_id: str
    timeout_s: Annotated[float, Meta(ge=0, le=MAX_WAIT_S)] = 0.0


class Settled:
    """The route."""

    def __init__(self, write_back: WriteBack) -> None:
        self._write_back = write_back

    def router(self) -> APIRouter:
        """The FastAPI router with the route."""
        router = APIRouter()
        router.add_api_route("/pd/settled", self.settled, methods=["POST"], response_model=None)
        return router

    async def settled(self, request: Request) -> Response:
        """Answer a `SettledQuestion` with a `Settlement`."""
        try:
            question = msgspec.json.decode(await request.body(), type=SettledQuestion)
        except msgspec.MsgspecError as error:
            refusal = RequestError(400, str(error))
            return JSONResponse(refusal.body(), status_code=refusal.status)
        settlement = await self._write_back.settled(question.request_id, question.timeout_s)
        return Response(msgspec.json.encode(settlement), media_type="application/json")
