"""`POST /pd/settled`: whether a finished request's pages are in the pool, after a bounded wait. Follows each
request from its start to the commit of its last page.

SGLang stores prompt and output pages after it has answered, and does not report the end of it. The next turn
of the conversation may arrive at once at another worker. So the worker that answered follows the pages: it
names them (the hash chain over prompt and output tokens) and lets the pool report their commit. `/pd/settled`
asks here.

Bounds: at most `limit` requests are remembered, and the oldest is forgotten first. Each is followed for at
most `timeout_s` after its answer (`commits.Commits`).
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from msgspec import Meta

from pdserve.decode.keeping import Keeping
from pdserve.decode.session_pages import SessionPages, are_named
from pdserve.engine.commits import Commits
from pdserve.engine.contract.endpoints import PREFILL
from pdserve.engine.http.request import HttpRequest
from pdserve.engine.page_names import PageNames, RequestPages
from pdserve.errors import RequestError
from pdserve.prefill.missed_pages import MissedPages

MAX_WAIT_S: Final = 60.0
MAX_FOLLOWED: Final = 4096


class SettledQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `/pd/settled`. `request_id` is the x-request-id of the earlier request."""

    request_id: str
    timeout_s: Annotated[float, Meta(ge=0, le=MAX_WAIT_S)] = 0.0


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `/pd/settled`. `known` is false for a request this worker never saw or has forgotten. Pages
    are counted once the request is answered.
    """

    request_id: str
    known: bool
    settled: bool = False
    committed_pages: int = 0
    missing_pages: int = 0
    waited_ms: float = 0.0


@dataclass(frozen=True)
class _Pages:
    """How many of a request's full pages are in the pool."""

    committed: int
    total: int


class _Followed:
    """One request. At first it holds SGLang's record, then the names of its pages, in the end two numbers.
    Thousands are remembered, and a record with its texts, tokens and images can have megabytes.
    """

    def __init__(self, request: HttpRequest) -> None:
        self.request = request
        self.pages: RequestPages | None = None  # None until it is answered
        self.task: asyncio.Task[_Pages]


class WriteBack:
    """Lives in the worker's event loop."""

    def __init__(
        self,
        commits: Commits,
        missed: MissedPages,
        *,
        names: PageNames,
        timeout_s: float,
        limit: int = MAX_FOLLOWED,
        keeping: Keeping | None = None,
        sessions: SessionPages | None = None,
    ) -> None:
        self._keeping = keeping
        self._sessions = sessions or SessionPages(names)
        self._commits = commits
        self._missed = missed
        self._names = names
        self._timeout_s = timeout_s
        self._limit = limit
        self._followed: OrderedDict[str, _Followed] = OrderedDict()
        self._prefills: set[asyncio.Task[None]] = set()

    def router(self) -> APIRouter:
        """The FastAPI router with the route."""
        router = APIRouter()
        router.add_api_route("/pd/settled", self.answer, methods=["POST"], response_model=None)
        return router

    async def answer(self, request: Request) -> Response:
        """Answer a `SettledQuestion` with a `Settlement`."""
        try:
            question = msgspec.json.decode(await request.body(), type=SettledQuestion)
        except msgspec.MsgspecError as error:
            refusal = RequestError(400, str(error))
            return JSONResponse(refusal.body(), status_code=refusal.status)
        settlement = await self.settled(question.request_id, question.timeout_s)
        return Response(msgspec.json.encode(settlement), media_type="application/json")

    def follow(self, request: HttpRequest) -> None:
        """Start to follow a request. Called before SGLang sees it, so its next turn always finds it.

        A prefill is not followed: `/pd/prefill` waits for its pages and counts missed tokens itself.
        """
        self._sessions.begin(request)
        if request.path == PREFILL:
            if request.session:
                task = asyncio.create_task(self._prefilled(request))
                self._prefills.add(task)
                task.add_done_callback(self._prefills.discard)
            return
        earlier = self._followed.pop(request.request_id, None)
        if earlier is not None:
            earlier.task.cancel()
        while len(self._followed) >= self._limit:
            _, oldest = self._followed.popitem(last=False)
            oldest.task.cancel()
        followed = self._followed[request.request_id] = _Followed(request)
        followed.task = asyncio.create_task(self._followed_to_its_end(followed))

    async def settled(self, request_id: str, timeout_s: float) -> Settlement:
        """Wait, at most `timeout_s`, until every full page of the request is committed."""
        timeout_s = self._commits.limit_s(timeout_s)
        followed = self._followed.get(request_id)
        if followed is None:
            return Settlement(request_id=request_id, known=False)
        started_s = time.monotonic()
        done, _ = await asyncio.wait({followed.task}, timeout=timeout_s)
        waited_ms = (time.monotonic() - started_s) * 1e3
        if not done:
            if followed.pages is None:
                return Settlement(request_id=request_id, known=True, waited_ms=round(waited_ms, 3))
            return _settlement(request_id, await self._count(followed.pages), waited_ms)
        if followed.task.cancelled():
            return Settlement(request_id=request_id, known=False, waited_ms=waited_ms)
        return _settlement(request_id, followed.task.result(), waited_ms)

    def unsettled(self) -> int:
        """The number of requests whose pages may still come."""
        return sum(not followed.task.done() for followed in self._followed.values())

    async def close(self) -> None:
        """Stop following; the pages are written all the same."""
        tasks = [*self._prefills, *(followed.task for followed in self._followed.values())]
        self._followed.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _prefilled(self, request: HttpRequest) -> None:
        """Whatever becomes of a prefill, its pages may be stored."""
        made = None
        try:
            await request.answered.wait()
            if await are_named(request):
                made = request.pages or await self._names.of_prompts(request)
        finally:
            self._sessions.end(request, made)

    async def _followed_to_its_end(self, followed: _Followed) -> _Pages:
        request, made = followed.request, None
        try:
            await request.answered.wait()
            if request.side_writes:
                await asyncio.wait(request.side_writes, timeout=self._timeout_s)
            is_named = bool(request.session) and await are_named(request)
            pages = await self._names.of_conversations(request)
            made = pages if is_named else None
            request.requests.clear()
            return await self._committed(followed, pages) if pages else _Pages(0, 0)
        finally:
            self._sessions.end(request, made)

    async def _committed(self, followed: _Followed, pages: RequestPages) -> _Pages:
        followed.pages = pages
        missed = asyncio.create_task(self._missed.count(followed.request, pages))
        try:
            # Of a request cut short SGLang keeps what was computed; how much of it is not known, so there is
            # nothing to wait for.
            if not followed.request.is_cut_short:
                await self._commits.wait(pages)
            # A page before the end may be missing all the same: found by SGLang in its own cache, and lost by
            # the pool since it was stored. Nobody stores it again now, so it is not waited for.
            settled = await self._count(pages)
            await missed
            if self._keeping is not None:
                self._keeping.after(followed.request, pages)
            return settled
        finally:
            missed.cancel()
            followed.pages = None

    async def _count(self, pages: RequestPages) -> _Pages:
        return _Pages(await self._commits.count(pages), len(pages))


def _settlement(request_id: str, pages: _Pages, waited_ms: float) -> Settlement:
    return Settlement(
        request_id=request_id,
        known=True,
        settled=pages.committed == pages.total,
        committed_pages=pages.committed,
        missing_pages=pages.total - pages.committed,
        waited_ms=round(waited_ms, 3),
    )
