"""`POST /pd/prefill`: compute a prompt's pages and answer once they are committed in the pool.

SGLang answers a prefill before it has even queued the copy of its pages. A decode worker that looked for them
at once would find nothing. So the worker names the prompt's pages from SGLang's own token ids, and lets the
pool report their commit. The wait is at most `commit_timeout_s`. Pages that are not committed by then are
reported as missing, and the decode worker computes them. Of a few models the pages of images can be named by
the scheduler only: they are not waited for, and are reported as missing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from pdserve.engine.commits import Commits
from pdserve.engine.contract.endpoints import CHAT
from pdserve.engine.http.cache_report import Found
from pdserve.engine.http.request import HttpRequest, current_request
from pdserve.engine.http.request_context import bootstrap_of_request, set_bootstrap
from pdserve.engine.http.timing import WorkerMetrics
from pdserve.engine.page_names import PageNames, RequestPages
from pdserve.engine.sglang.prompt import FOR_THE_POOL, Prefilled, prefill_request, run_prefill
from pdserve.errors import RequestError
from pdserve.prefill.missed_pages import MissedPages, header_of
from pdserve.tracing import timed

logger = logging.getLogger(__name__)


class Prefill:
    """The route and what it needs. `engine` gives SGLang's app state and tokenizer manager at
    request time.
    """

    def __init__(
        self,
        engine: Any,
        *,
        names: PageNames,
        commits: Commits,
        missed: MissedPages,
        metrics: WorkerMetrics,
        hands_over: bool = False,
    ) -> None:
        """`hands_over`: SGLang is in its prefill mode, where each request must have a room."""
        self._engine = engine
        self._names = names
        self._commits = commits
        self._missed = missed
        self._metrics = metrics
        self._hands_over = hands_over

    def router(self) -> APIRouter:
        """The FastAPI router with the route."""
        router = APIRouter()
        router.add_api_route("/pd/prefill", self.prefill, methods=["POST"], response_model=None)
        return router

    async def prefill(self, request: Request, endpoint: str = CHAT) -> Response:
        """Body: the client's body for `endpoint`, byte for byte. With the header of a room it is a direct
        hand-off.
        """
        is_direct = bootstrap_of_request() is not None
        if self._hands_over and not is_direct:
            set_bootstrap(FOR_THE_POOL)
        try:
            return JSONResponse(await self._run(request, endpoint, is_direct=is_direct))
        except RequestError as error:
            return JSONResponse(error.body(), status_code=error.status)

    async def _run(self, request: Request, endpoint: str, *, is_direct: bool) -> dict[str, Any]:
        body = await request.body()
        started_s = time.monotonic()
        converted = await prefill_request(
            self._engine.app_state, endpoint, body, request, is_direct=is_direct
        )
        with timed("prefill"):
            outcome = await run_prefill(self._engine.tokenizer_manager, converted)
        computed_s = time.monotonic()
        record = current_request()
        assert record is not None, "this route is tracked"
        # the decode worker has the KV of a direct hand-off by now, and waits for no page
        pages = record.pages = self._names.none() if is_direct else await self._names.of_prompts(record)
        prompt_tokens = {made.rid: len(made.input_ids or ()) for made in record.requests.values()}
        found = pages.ends_found(prompt_tokens, outcome.cached_tokens)
        is_new = not any(outcome.cached_tokens.values())
        with timed("publish", pages=len(pages)):
            published, misses = await asyncio.gather(
                self._unless_left(record, self._published(pages, found, is_new=is_new)),
                self._missed.why(pages, prompt_tokens, outcome.cached_tokens, started_s),
            )
        publish_s = time.monotonic() - computed_s
        self._metrics.observe("publish", publish_s)
        if published < len(pages) and not record.left.is_set():
            logger.warning(
                "request %s: %d of %d pages were not in the pool after %.1f s",
                record.request_id,
                len(pages) - published,
                len(pages),
                publish_s,
            )
        return {
            "prompt_tokens": outcome.prompt_tokens,
            "cached": Found(*map(sum, zip(*outcome.found, strict=True)))._asdict(),
            "cached_by_prompt": outcome.found,
            "missed": header_of(misses),
            "published_pages": published,
            "missing_pages": len(pages) - published + self._names.unnamed(record, outcome.prompt_tokens),
            "prefill_ms": round((computed_s - started_s) * 1e3, 3),
            "publish_ms": round(publish_s * 1e3, 3),
            "turns": f"{record.turns_taken:x}",
            "first": first_of(record, outcome),
        }

    async def _published(self, pages: RequestPages, found: list[bytes], *, is_new: bool = False) -> int:
        """Wait for the commit of the prompts' last pages; how many pages are committed then. `is_new`: none
        was cached here. Then the pool has them all where it has the last ones, which were stored last.
        """
        has_all = await self._commits.wait(pages, found, is_cut=True)
        return len(pages) if has_all and is_new else await self._commits.count(pages)

    async def _unless_left(self, record: HttpRequest, published: Coroutine[None, None, int]) -> int:
        """The outcome, or 0 as soon as the client has left."""
        waiting = asyncio.create_task(published)
        leaving = asyncio.create_task(record.left.wait())
        try:
            await asyncio.wait({waiting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return waiting.result() if waiting.done() else 0
        finally:
            waiting.cancel()
            leaving.cancel()


def first_of(record: HttpRequest, outcome: Prefilled) -> str:
    """The token that was sampled behind the request's one prompt, and a digest of what it follows from
    (`engine/sglang/first_tokens.py`). Empty where that cannot be said.
    """
    digests = [made.first_digest for made in record.requests.values()]
    return f"{outcome.token}x{digests[0]}" if outcome.token is not None and any(digests) else ""
