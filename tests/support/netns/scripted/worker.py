"""A scripted worker: it computes nothing, and has real pages in a real pool.

`python -m tests.support.netns.scripted.worker ROLE --config FILE`, with the configuration of a real one. What
it would compute takes time; what the pool has does not. Every byte of a page that it reads is checked; a
wrong one is a line of its log. When it is asked to end, it drains as a real one does.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pdserve.engine.drain import Client, Drain
from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.settings.config_file import build_config, read_toml
from tests.support.kvpool.made_pages import content
from tests.support.netns.scripted.script import (
    PAGE_BYTES,
    PAGE_WORDS,
    answer_tokens,
    page_keys,
    text_of,
    words_of,
)

MODEL: Final = "scripted"
WORD_S: Final = 200e-6
"""Time to compute a word of a prompt: 5,000 a second."""
STEP_S: Final = 10e-3
"""Between two words of an answer."""
WRONG: Final = "wrong page"
NOTICE_S: Final = 3.0
POLL_S: Final = 0.05


class ScriptedWorker:
    """Serves `app`."""

    def __init__(self, role: str, config: dict[str, Any], name: str) -> None:
        pool = build_config(PoolClientConfig, config["pool"], source="pool")
        geometry = {"page": f"{PAGE_WORDS} words"}
        self._role = role
        self._pool = PoolClient(pool, "scripted", geometry, name=name, page_bytes=PAGE_BYTES)
        self._routers: set[Client] = set()
        """All that ever asked whether it is ready."""
        self.drain = Drain(config["stop_grace_s"], NOTICE_S, lambda: self._routers)
        routes = [
            ("/pd/info", self._info, "GET"),
            ("/pd/ready", self._ready, "GET"),
            ("/pd/prefill", self._prefill, "POST"),
            ("/pd/settled", self._settled, "POST"),
            ("/pd/continue", self._continue, "POST"),
            ("/v1/completions", self._complete, "POST"),
        ]
        self.asked_to_end = asyncio.Event()
        self.app = Starlette(
            routes=[Route(path, call, methods=[way]) for path, call, way in routes],
            lifespan=self._take_signals,
        )

    @asynccontextmanager
    async def _take_signals(self, _: Starlette) -> AsyncIterator[None]:
        """In place of uvicorn, which would serve nobody any more."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.asked_to_end.set)
        yield

    async def _info(self, _: Request) -> Response:
        return JSONResponse(
            {
                "role": self._role,
                "model": MODEL,
                "context_length": 32768,
                "page_size": PAGE_WORDS,
                "namespace": "scripted",
                "kv_geometry": {},
                "lacks": ["pull", "load"],
            }
        )

    async def _ready(self, request: Request) -> Response:
        if request.client is not None:
            router = (request.client.host, request.client.port)
            self._routers.add(router)
            self.drain.asked(router, time.monotonic())
        stops = self.drain.is_draining
        return JSONResponse({"ready": not stops, "draining": stops, "pool": "up"}, 503 if stops else 200)

    async def _settled(self, _: Request) -> Response:
        return JSONResponse({"known": True, "settled": True})  # pages are there when the answer ends

    async def _prefill(self, request: Request) -> Response:
        words = words_of(await request.json())
        with self._run():
            found = await self._computed(words)
        pages = len(words) // PAGE_WORDS
        cached = {"device": 0, "host": 0, "pool": found * PAGE_WORDS}
        return JSONResponse(
            {"prompt_tokens": len(words), "published_pages": pages, "missing_pages": 0, "cached": cached}
        )

    async def _complete(self, request: Request) -> Response:
        return await self._answer(await request.json(), [])

    async def _continue(self, request: Request) -> Response:
        so_far, _, body = (await request.body()).partition(b"\n")
        return await self._answer(json.loads(body), json.loads(so_far)["token_ids"])

    async def _answer(self, body: dict[str, Any], before: list[int]) -> Response:
        """The stream from after the tokens `before`."""
        words = words_of(body)
        tokens = answer_tokens(words, body["max_tokens"])[len(before) :]
        with self._run():
            cached = await self._computed(words) * PAGE_WORDS
        said = f"device=0, host=0, pool={cached}, computed={len(words) - cached}"
        return StreamingResponse(
            self._stream(words, before, tokens, cached),
            media_type="text/event-stream",
            headers={"x-pdserve-cached": said},
        )

    async def _stream(
        self, words: list[str], before: list[int], tokens: list[int], cached: int
    ) -> AsyncIterator[bytes]:
        characters = sum(len(text_of(token)) for token in before)
        with self._run():
            for number, token in enumerate(tokens, len(before)):
                await asyncio.sleep(STEP_S)
                characters += len(text_of(token))
                event = self._event({"text": text_of(token)})
                yield event + b": pd %d %d %d\n\n" % (characters, number, token)
            answer = " ".join(text_of(token).strip() for token in (*before, *tokens))
            await asyncio.to_thread(self._write, page_keys([*words, *answer.split()]))
            last = self._event({"text": "", "finish_reason": "length"})
            usage = {
                "prompt_tokens": len(words),
                "completion_tokens": len(before) + len(tokens),
                "prompt_tokens_details": {"cached_tokens": cached},
            }
            yield last + self._event(None, usage) + b"data: [DONE]\n\n"

    @staticmethod
    def _event(choice: dict[str, Any] | None, usage: dict[str, Any] | None = None) -> bytes:
        event = {
            "id": "cmpl-0",
            "object": "text_completion",
            "created": 0,
            "model": MODEL,
            "choices": [] if choice is None else [{"index": 0, "finish_reason": None, **choice}],
            "usage": usage,
        }
        return b"data: " + json.dumps(event).encode() + b"\n\n"

    async def _computed(self, words: Sequence[str]) -> int:
        """Have all pages of a prompt: from the pool, or computed and stored. Gives how many it had."""
        keys = page_keys(words)
        found = await asyncio.to_thread(self._read, keys)
        await asyncio.sleep((len(words) - found * PAGE_WORDS) * WORD_S)
        await asyncio.to_thread(self._write, keys[found:])
        return found

    def _read(self, keys: Sequence[bytes]) -> int:
        """How many of them, from the first on, the pool has."""
        there = self._pool.exists(keys)
        wanted = keys[: there.index(False)] if False in there else keys
        pages = [np.zeros(PAGE_BYTES, np.uint8) for _ in wanted]
        got = self._pool.get(wanted, [[page] for page in pages])
        pairs = zip(wanted, pages, got, strict=True)
        for key, page, ok in pairs:
            if ok and not np.array_equal(page, content(key, PAGE_BYTES)):
                print(WRONG, key.hex(), flush=True)
        return got.index(False) if False in got else len(got)

    def _write(self, keys: Sequence[bytes]) -> None:
        there = self._pool.exists(keys)
        missing = [key for key, is_there in zip(keys, there, strict=True) if not is_there]
        self._pool.put(missing, [[content(key, PAGE_BYTES)] for key in missing])

    def _run(self) -> _Running:
        return _Running(self.drain)


class _Running:
    """A request that a drain waits for."""

    def __init__(self, drain: Drain) -> None:
        self._drain = drain

    def __enter__(self) -> None:
        self._drain.running += 1

    def __exit__(self, *_: object) -> None:
        self._drain.running -= 1


async def serve(role: str, path: Path) -> None:
    """Until SIGTERM, and the drain after it."""
    config = read_toml(path)
    worker = ScriptedWorker(role, config, path.stem)
    home = config["engine"]
    server = uvicorn.Server(
        uvicorn.Config(worker.app, home["host"], home["port"], log_level="warning", backlog=1024)
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve())
        await worker.asked_to_end.wait()
        worker.drain.begin(time.monotonic())
        while not worker.drain.is_over(time.monotonic()):  # noqa: ASYNC110 (the time itself may end it)
            await asyncio.sleep(POLL_S)
        server.should_exit = True


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], Path(sys.argv[sys.argv.index("--config") + 1])))
