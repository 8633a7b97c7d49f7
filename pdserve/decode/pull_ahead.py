"""`POST /pd/pull`: fetch a long prompt's pages while a prefill worker still computes the rest of them.

A prefill worker publishes each chunk of a prompt as it is computed. Without this route a decode worker begins
to pull when the last page is there; with it, only the last chunk is left to pull by then. The router asks at
the moment it asks the prefill worker, with the client's body, and hangs up when the prefill is over.

The worker names the pages at every `step_tokens` of the prompt and lets the pool report their commit. It has
SGLang fetch the new ones, up to the last page that is committed (`pulls_ended`). Where
pages have parts beside KV, it fetches up to the last step that can be restored; of most models these are the
ends of the prefill worker's chunks. Nothing depends on it: pages that are not pulled ahead are pulled by the
request itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, compress, takewhile
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from pdserve.engine.contract.endpoints import CHAT
from pdserve.engine.page_names import PageNames, Prefix
from pdserve.engine.sglang.prompt import fetch_pages, prefill_request, prompt_tokens
from pdserve.errors import RequestError
from pdserve.kvpool.client.async_client import AsyncPoolClient
from pdserve.kvpool.namespaces.tenants import tenant_of

LIMIT_S: Final = 600.0
"""For one prompt, where the router neither hangs up nor ends."""


@dataclass(frozen=True)
class Step:
    """The first `tokens` tokens of a prompt."""

    tokens: int
    prefix: Prefix


class PullAhead:
    """The route and what it needs. `engine` gives SGLang's app state and tokenizer manager at request time;
    `step_tokens` is rounded down to whole pages, one at least.
    """

    def __init__(self, engine: Any, pool: AsyncPoolClient, *, names: PageNames, step_tokens: int) -> None:
        self._engine = engine
        self._pool = pool
        self._names = names
        self._step_tokens = max(1, step_tokens // names.page_size) * names.page_size
        self._fetches: set[asyncio.Task[None]] = set()

    def router(self) -> APIRouter:
        """The FastAPI router with the route."""
        router = APIRouter()
        router.add_api_route("/pd/pull", self.pull, methods=["POST"], response_model=None)
        return router

    async def pull(self, request: Request, endpoint: str = CHAT) -> Response:
        """Body: the client's body for `endpoint`, byte for byte. Answers with the tokens whose pages were
        asked for.
        """
        body = await request.body()
        try:
            asked = await prefill_request(self._engine.app_state, endpoint, body, request)
        except RequestError as error:
            return JSONResponse(error.body(), status_code=error.status)
        pulling = asyncio.create_task(self._pull(asked))
        leaving = asyncio.create_task(_left(request))
        try:
            await asyncio.wait({pulling, leaving}, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
            return JSONResponse({"pulled_tokens": pulling.result() if pulling.done() else None})
        finally:
            for task in (pulling, leaving):
                task.cancel()
            await asyncio.gather(pulling, leaving, return_exceptions=True)

    async def _pull(self, asked: Any) -> int:
        tokens = await prompt_tokens(self._engine.tokenizer_manager, asked, self._engine.turns)
        steps, tenant = self._steps(tokens, asked), tenant_of(asked.cache_salt)
        done = pulled = 0  # steps, tokens
        while done < len(steps):
            if not all(await self._pool.wait(steps[done].prefix.last_page, LIMIT_S, tenant)):
                break
            committed, restorable = await self._committed(steps[done:], tenant)
            done += committed
            if restorable is None:
                continue
            pulled = restorable.tokens
            up_to = tokens[: pulled + self._names.tokens_after]
            fetch = asyncio.create_task(fetch_pages(self._engine.tokenizer_manager, up_to, asked))
            self._fetches.add(fetch)
            fetch.add_done_callback(self._fetches.discard)
            await asyncio.shield(fetch)  # the pages are wanted also when the caller hangs up
        return pulled

    def _steps(self, tokens: Sequence[int], asked: Any) -> list[Step]:
        """A step at every `step_tokens`. The request itself pulls the pages behind the last of them."""
        ends = range(self._step_tokens, len(tokens) - self._names.tokens_after + 1, self._step_tokens)
        if not ends:
            return []
        prefixes = self._names.of_prefixes(tokens, ends, asked.extra_key, asked.cache_salt or None)
        return [Step(end, prefix) for end, prefix in zip(ends, prefixes, strict=True)]

    async def _committed(self, steps: Sequence[Step], tenant: str) -> tuple[int, Step | None]:
        """The number of steps whose pages are committed without a gap, where those of the first are; and the
        last of these that can be restored.
        """
        asked = [step.prefix.last_page for step in steps[1:]] + [step.prefix.windows for step in steps]
        keys = list(chain.from_iterable(asked))
        there = set(compress(keys, await self._pool.exists(keys, tenant)))
        there.update(steps[0].prefix.last_page)
        committed = list(takewhile(lambda step: there.issuperset(step.prefix.last_page), steps))
        restorable = [step for step in committed if there.issuperset(step.prefix.windows)]
        return len(committed), restorable[-1] if restorable else None


async def _left(request: Request) -> None:
    """Until the client hangs up; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
