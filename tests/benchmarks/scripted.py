"""A scripted server of OpenAI's API, which streams as SGLang does, and records of requests made by hand."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.lib.load import Record, Run
from tests.support.router.mock_worker import DONE, MockWorker, Received, Wire


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def answer_events(body: dict[str, Any], cached: int = 0) -> list[bytes]:
    """A whole answer of `max_tokens` tokens, with usage; chat or completion as the body is."""
    count = body["max_tokens"]
    chat = "messages" in body
    words = " ".join(message["content"] for message in body["messages"]).split() if chat else body["prompt"]
    found = [event(choices=[{"delta": {"role": "assistant", "content": ""}}])] if chat else []
    for number in range(count):
        if chat:
            found.append(event(choices=[{"delta": {"content": f"w{number} "}}]))
        else:
            found.append(event(choices=[{"text": f"w{number} ", "token_ids": [10 + number]}]))
    places = {"device": 0, "host": cached // 2, "storage": cached - cached // 2}
    found.append(event(choices=[{"finish_reason": "length", **({"delta": {}} if chat else {"text": ""})}]))
    found.append(event(choices=[], sglext={"cached_tokens_details": places}))
    usage = {"prompt_tokens": len(words), "completion_tokens": count}
    usage["prompt_tokens_details"] = {"cached_tokens": cached}  # type: ignore[assignment]
    return [*found, event(choices=[], usage=usage), DONE]


class ScriptedServer(MockWorker):
    """Lists a model and answers in streams; keeps how many it had at a time, and the order of things."""

    def __init__(self, context: int | None = 100_000, pause_s: float = 0.0) -> None:
        super().__init__("agg")
        self.context = context
        self.pause_s = pause_s
        self.pause_grows = False  # with the session's number
        self.one_at_a_time = False
        self._turn = asyncio.Lock()
        self.busy = 0
        self.most_busy = 0
        self.order: list[tuple[str, str]] = []
        """("asked" or "answered", session)"""

    def bodies(self) -> list[dict[str, Any]]:
        return [request.json() for request in self.requests if request.method == "POST"]

    async def _default(self, wire: Wire, request: Received) -> None:
        if request.path == "/v1/models":
            await wire.json(200, {"data": [{"id": "demo", "max_model_len": self.context}]})
            return
        session = request.headers.get("x-session-id", "")
        self.busy += 1
        self.most_busy = max(self.most_busy, self.busy)
        self.order.append(("asked", session))
        try:
            if self.one_at_a_time:
                async with self._turn:
                    await asyncio.sleep(self.pause_s)
            body = request.json()
            cached = len(body.get("prompt", ())) // 2
            await wire.head(200, "text/event-stream")
            await asyncio.sleep(self.pause_s * (1 + int(session[-1:] or 0) if self.pause_grows else 1))
            for data in answer_events(body, cached=cached):
                await wire.chunk(data)
            self.order.append(("answered", session))
            await wire.end()
        finally:
            self.busy -= 1


@contextmanager
def serving(server: ScriptedServer) -> Iterator[ScriptedServer]:
    """The server in a thread of its own: the client has an event loop to itself."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(30)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


def record(turn: int, first_s: float | None, **more: Any) -> Record:
    """One ask of 100 tokens, answered with 10 within 2 s."""
    given = {"session": 0, "planned_s": 0.0, "due_s": 0.0, "sent_s": 0.0, "done_s": 2.0}
    tokens = {"prompt_tokens": 100, "output_tokens": 10}
    return Record(turn=turn, first_s=first_s, **{**given, **tokens, **more})


def run(*records: Record, **more: Any) -> Run:
    """These asks as a run of 2 s."""
    given = {"model": "m", "wall_s": 2.0, "client_cpu": 0.1, "lags_s": [0.0]}
    return Run(records=list(records), **{**given, **more})
