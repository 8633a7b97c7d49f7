"""`POST /v1/kv/lookup`: how much of a prompt the pool has, and where.

For routers of other stacks and for people. The body is that of a generation: `messages`, `prompt`, `text` or
`input_ids`. The worker makes the prompt's tokens as it would for the generation, names their pages with the
request's salt, and asks the pool. So who asks with his own salt hears of his own pages only. `hashes` ask
for pages by name, whosever they are: a router lets no tenant ask so.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from pdserve.engine.contract.endpoints import CHAT, COMPLETIONS, GENERATE
from pdserve.engine.http.request_context import salt_of_request
from pdserve.engine.page_names import PageNames, RequestPages
from pdserve.engine.sglang.prompt import named_tokens, prefill_request
from pdserve.errors import RequestError
from pdserve.kvpool.client.async_client import MEMORY, AsyncPoolClient
from pdserve.kvpool.namespaces.tenants import tenant_of
from pdserve.pages import namespace_seed, page_hashes, pool_key

T = TypeVar("T")
LOOKUP: Final = "/v1/kv/lookup"
MAX_PAGES: Final = 65_536
"""Of one prompt. 64 of a million tokens each, at pages of 64."""
HASH_BYTES: Final = 32
_EMPTY: Final = msgspec.Raw(b"")
_NOTHING: Final = (b"", b"null")
_UNNAMED: Final = (
    "pages of several prompts, of prompts with images, audio or video, and of adapters cannot be looked up"
)


class Asked(msgspec.Struct):
    """The body, as far as it says what to do with it."""

    messages: msgspec.Raw = _EMPTY
    prompt: msgspec.Raw = _EMPTY
    text: msgspec.Raw = _EMPTY
    input_ids: msgspec.Raw = _EMPTY
    hashes: list[str] | None = None
    cache_salt: object = None

    def endpoint(self) -> str:
        """Whose body it is. Raises RequestError."""
        given = ((CHAT, self.messages), (COMPLETIONS, self.prompt), (GENERATE, self.text))
        said = [
            path for path, prompt in (*given, (GENERATE, self.input_ids)) if bytes(prompt) not in _NOTHING
        ]
        if len(said) + (self.hashes is not None) != 1:
            raise RequestError(400, "name the prompt by one of messages, prompt, text, input_ids, hashes")
        return said[0] if said else ""


class Found(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The answer. Pages are counted at one rank, and of the longest prefix that a worker can restore."""

    page_tokens: int
    prompt_tokens: int
    """0 where pages were asked for by name."""
    prompt_pages: int
    tokens: int
    """Of the longest prefix that the pool has."""
    memory_tokens: int
    """Of the longest prefix that it has in memory."""
    tiers: dict[str, int]
    """Pages of the prefix by tier."""


class Prompt(NamedTuple):
    """What a body asks about."""

    request: Any
    """SGLang's own request for it; None where pages were asked for by name."""
    tokens: list[int]
    pages: RequestPages

    def prefix(self, pages: int) -> RequestPages:
        """Its first pages."""
        return RequestPages(self.pages.names, {"": self.pages.chains[""][:pages]}, self.pages.tenant)

    def restorable(self, there: Collection[bytes]) -> int:
        """The pages of the longest prefix that can be restored where the pool has these keys."""
        return self.pages.restorable(there) // len(self.pages.names.rank_suffixes)


class Lookup:
    """The route. `engine` gives SGLang's app state and tokenizer manager at request time."""

    def __init__(self, engine: Any, pool: AsyncPoolClient, *, names: PageNames) -> None:
        self._engine = engine
        self._pool = pool
        self._names = names

    def router(self) -> APIRouter:
        """The FastAPI router with the route."""
        router = APIRouter()
        router.add_api_route(LOOKUP, self.lookup, methods=["POST"], response_model=None)
        return router

    async def lookup(self, request: Request) -> Response:
        """Answer with a `Found`."""
        try:
            found = await self._found(request)
        except RequestError as error:
            return JSONResponse(error.body(), status_code=error.status)
        return Response(msgspec.json.encode(found), media_type="application/json")

    async def _found(self, request: Request) -> Found:
        body = await request.body()
        asked = decoded(body, Asked)
        prompt = await self.prompt(request, asked, body)
        there = await self.there(prompt.pages)
        return await asyncio.to_thread(self._answer, prompt, there)

    async def prompt(self, request: Request, asked: Asked, body: bytes) -> Prompt:
        """The prompt of a body, and the names of its pages. Raises RequestError."""
        if endpoint := asked.endpoint():
            made, tokens, chain = await self._chain(request, endpoint, body)
            tenant = tenant_of(made.cache_salt)
        else:
            made, tokens, chain = None, [], _digests(asked.hashes or ())
            said = asked.cache_salt if isinstance(asked.cache_salt, str) else None
            tenant = tenant_of(salt_of_request() or said)
        if len(chain) > MAX_PAGES:
            raise RequestError(400, f"{len(chain)} pages are asked for, at most {MAX_PAGES}")
        return Prompt(made, tokens, RequestPages(self._names, {"": chain}, tenant))

    async def there(self, pages: RequestPages) -> dict[bytes, str]:
        """In which tier the pool has the pages, by key."""
        keys = await asyncio.to_thread(pages.all_keys)
        found = zip(keys, await self._pool.places(keys, tenant=pages.tenant), strict=True)
        return {key: place for key, place in found if place is not None}

    async def _chain(
        self, request: Request, endpoint: str, body: bytes
    ) -> tuple[Any, list[int], list[bytes]]:
        """(SGLang's request, the prompt's tokens, digests of its pages)."""
        made = await prefill_request(self._engine.app_state, endpoint, body, request)
        try:
            tokens = await named_tokens(self._engine.tokenizer_manager, made, self._engine.turns)
        except ValueError as error:  # too long a text
            raise RequestError(400, str(error)) from None
        if not tokens:
            raise RequestError(400, _UNNAMED)
        seed = namespace_seed(made.extra_key, made.cache_salt or None)
        names = self._names
        chain = await asyncio.to_thread(page_hashes, tokens, names.page_size, seed, pairs=names.pairs)
        return made, tokens, chain

    def _answer(self, prompt: Prompt, there: dict[bytes, str]) -> Found:
        names, chain = self._names, prompt.pages.chains[""]
        in_memory = {key for key, place in there.items() if place == MEMORY}
        restorable = [prompt.restorable(known) for known in (there.keys(), in_memory)]
        prefix = [pool_key(digest, names.rank_suffixes[0]) for digest in chain[: restorable[0]]]
        return Found(
            page_tokens=names.page_size,
            prompt_tokens=len(prompt.tokens),
            prompt_pages=len(chain),
            tokens=restorable[0] * names.page_size,
            memory_tokens=restorable[1] * names.page_size,
            tiers=dict(Counter(there[key] for key in prefix)),
        )


def decoded(body: bytes, type_: type[T]) -> T:
    """Raises RequestError."""
    try:
        return msgspec.json.decode(body, type=type_)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, f"the body is not as it should be: {error}") from None


def _digests(hashes: Sequence[str]) -> list[bytes]:
    """Raises RequestError."""
    try:
        digests = [bytes.fromhex(one) for one in hashes]
    except ValueError:
        digests = [b""]
    if any(len(one) != HASH_BYTES for one in digests):
        raise RequestError(400, f"hashes are {HASH_BYTES} bytes in hexadecimal each, from the first page on")
    return digests
