"""`POST /pd/pull`: fetch a long prompt's pages while a prefill worker still computes the rest of them.

A prefill worker publishes each chunk of a prompt as it is computed. Without this route a decode worker begins
to pull when the last page is there; with it, only the last chunk is left to pull by then. The router asks at
the moment it asks the prefill worker, with the client's body, and hangs up when the prefill is over.

The worker names the pages at every `step_tokens` of the prompt, lets the pool report their commit, and has
SGLang fetch what is new up to the last one that is there (see `engine/pulls`). Nothing depends on it: what is
not pulled ahead is pulled by the request itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from sglang.srt.managers.io_struct import GenerateReqInput

from pdserve.engine.http.endpoints import CHAT
from pdserve.engine.sglang.prompt import prefill_request
from pdserve.engine.sglang.pulls import PULL_ID
from pdserve.engine.sglang.request_tracking import PageNames
from pdserve.errors import RequestError
from pdserve.kvpool.client.async_client import AsyncPoolClient
from pdserve.pages import namespace_seed, page_hashes, pool_key

LIMIT_S: Final = 600.0
"""For one prompt, should the router neither hang up nor die."""


@dataclass(frozen=True)
class Step:
    """The first `tokens` tokens of a prompt, and the pool keys of the last page among them."""

    tokens: int
    keys: tuple[bytes, ...]


class PullAhead:
    """The route and what it needs. `engine` gives SGLang's app state and tokenizer manager at request time;
    `step_tokens` is rounded down to whole pages, one at least.
    """

    def __init__(self, engine: Any, pool: AsyncPoolClient, *, names: PageNames, step_tokens: int) -> None:
        self._engine = engine
        self._pool = pool
        self._names = names
        self._pages_per_step = max(1, step_tokens // names.page_size)
        self._step_tokens = self._pages_per_step * names.page_size
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

    async def _pull(self, asked: GenerateReqInput) -> int:
        tokens = await self._tokens(asked)
        steps = self._steps(tokens, asked)
        done = 0  # steps
        while done < len(steps):
            if not all(await self._pool.wait(steps[done].keys, LIMIT_S)):
                break
            done += await self._committed(steps[done:])
            fetch = asyncio.create_task(self._fetch(tokens[: steps[done - 1].tokens + 1], asked))
            self._fetches.add(fetch)
            fetch.add_done_callback(self._fetches.discard)
            await asyncio.shield(fetch)  # whoever hangs up: the pages are wanted all the same
        return steps[done - 1].tokens if done else 0

    async def _tokens(self, asked: GenerateReqInput) -> list[int]:
        """The prompt as SGLang will tokenise it; empty where its pages cannot be named from that alone, or
        where it is not known which of several host memories the request will look into.
        """
        manager = self._engine.tokenizer_manager
        if manager.server_args.dp_size > 1:
            return []
        if asked.contains_mm_input() or asked.lora_path or asked.input_embeds is not None:
            return []
        if asked.input_ids is not None:
            ids = asked.input_ids
        elif isinstance(asked.text, str):
            ids, _ = await manager._tokenize_texts(asked.text)
        else:
            return []  # several prompts
        return list(ids) if ids and isinstance(ids[0], int) else []

    def _steps(self, tokens: Sequence[int], asked: GenerateReqInput) -> list[Step]:
        """Every `step_tokens`, but for what follows the last of them: that is the request's own to pull."""
        ends = range(self._step_tokens, len(tokens), self._step_tokens)
        if not ends:
            return []
        seed = namespace_seed(asked.extra_key, asked.cache_salt or None)
        pages = page_hashes(tokens[: ends[-1]], self._names.page_size, seed)
        last_pages = pages[self._pages_per_step - 1 :: self._pages_per_step]
        return [
            Step(end, tuple(pool_key(page, suffix) for suffix in self._names.rank_suffixes))
            for end, page in zip(ends, last_pages, strict=True)
        ]

    async def _committed(self, steps: Sequence[Step]) -> int:
        """How many of the steps, the first of which is there, are there without a gap."""
        there = await self._pool.exists([key for step in steps[1:] for key in step.keys])
        ranks = len(steps[0].keys)
        count = 1
        while count < len(steps) and all(there[(count - 1) * ranks : count * ranks]):
            count += 1
        return count

    async def _fetch(self, tokens: list[int], asked: GenerateReqInput) -> None:
        """Pages of all but the last token, which SGLang never looks up."""
        pull = GenerateReqInput(
            input_ids=tokens,
            sampling_params={"max_new_tokens": 1},
            rid=PULL_ID + uuid.uuid4().hex,
            extra_key=asked.extra_key,
            cache_salt=asked.cache_salt,
        )
        with contextlib.suppress(ValueError, HTTPException):  # how SGLang tells of an end like this one's
            async for _ in self._engine.tokenizer_manager.generate_request(pull, None):
                pass


async def _left(request: Request) -> None:
    """Until the client hangs up; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
