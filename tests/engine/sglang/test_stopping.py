"""What a client sees of its answer when the worker's end aborts it, around a scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import HTTPException
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pdserve.engine.http.resume import Continuing
from pdserve.engine.sglang.tokenizer_manager import TrackedRequests
from tests.support.engine.manager import Client, Scripted, scope_of, serve

MARKS = (b"x-pdserve-marks", b"1")


class Aborted(Scripted):
    """A tokenizer manager whose requests are aborted after so many steps, as `abort_all` does it: without a
    status, or, of those that wait for their grammar, with one that is `raised` where nothing streams.
    """

    def __init__(
        self, steps: int = 0, choices: int = 1, stops: bool = True, raised: Exception | None = None
    ) -> None:
        super().__init__()
        self.stops = stops
        self._steps = steps
        self._choices = choices
        self._raised = raised

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        text = "abcdefgh"
        if self._raised is not None:
            raise self._raised
        for step in range(self._steps if obj.stream else 0):
            yield self._content(text[: step + 1], None)
        last = self._content(
            text[: self._steps], {"type": "abort", "message": "Aborted", "status_code": None}
        )
        if obj.stream or self._choices == 1:
            yield last
        else:
            yield [self._content(text, {"type": "stop"}), last]

    def _content(self, text: str, finish: Any) -> dict[str, Any]:
        counts = {"prompt_tokens": 3, "completion_tokens": len(text)}
        content = {
            "text": text,
            "output_ids": list(text.encode()),
            "meta_info": {"finish_reason": finish} | counts,
        }
        return content | ({"index": 0} if self._choices > 1 else {})


class Manager(TrackedRequests, Aborted):
    pass


class Asked:
    """What SGLang's routes make of a body."""

    rid = None
    return_prompt_token_ids = return_logprob = False

    def __init__(self, stream: bool) -> None:
        self.stream = stream


def serving(manager: Manager) -> Any:
    """SGLang's completions route, in small: it turns what goes wrong in a stream into an event of it."""

    async def events(request: Request) -> AsyncIterator[str]:
        try:
            async for content in manager.generate_request(Asked(True), request):
                yield f"data: {json.dumps(content)}\n\n"
        except Exception as error:
            yield f"data: {error}\n\n"
        yield "data: [DONE]\n\n"

    async def complete(request: Request) -> Response:
        if (await request.json()).get("stream"):
            return StreamingResponse(events(request), media_type="text/event-stream")
        try:
            return JSONResponse(await anext(aiter(manager.generate_request(Asked(False), request))))
        except ValueError as error:
            return JSONResponse({"error": str(error)}, status_code=400)

    manager.track(is_stopping=lambda: manager.stops)
    return Continuing(Starlette(routes=[Route("/v1/completions", complete, methods=["POST"])]))


def ask(manager: Manager, stream: bool, *headers: tuple[bytes, bytes]) -> tuple[int, str, bool]:
    """(status, body, whether it is whole: uvicorn closes the connection of one that is not)."""
    client = Client(json.dumps({"stream": stream}).encode())
    scope = scope_of("/v1/completions", *headers) | {"method": "POST", "root_path": ""}
    asyncio.run(serve(serving(manager), scope, client))
    start, *pieces = client.sent
    body = b"".join(piece["body"] for piece in pieces)
    return start["status"], body.decode(), not pieces[-1].get("more_body", False)


@pytest.mark.parametrize("choices", [1, 2])
def test_an_answer_that_is_no_stream_is_a_503(choices: int) -> None:
    status, body, is_whole = ask(Manager(steps=3, choices=choices), stream=False)
    assert (status, is_whole) == (503, True)
    assert json.loads(body)["error"]["code"] == "worker_stopping"


@pytest.mark.parametrize("raised", [ValueError("Aborted by AbortReq."), HTTPException(500)], ids=repr)
def test_an_answer_that_waited_for_its_grammar_is_a_503(raised: Exception) -> None:
    status, body, is_whole = ask(Manager(raised=raised), stream=False)
    assert (status, is_whole) == (503, True)
    assert json.loads(body)["error"]["code"] == "worker_stopping"
    assert ask(Manager(raised=ValueError("a bad request"), stops=False), stream=False)[0] == 400


@pytest.mark.parametrize("headers", [(), (MARKS,)], ids=["unmarked", "marked"])
def test_a_stream_that_has_not_begun_is_a_503(headers: Any) -> None:
    status, body, is_whole = ask(Manager(steps=0), True, *headers)
    assert (status, is_whole) == (503, True)
    assert json.loads(body)["error"]["code"] == "worker_stopping"


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("headers", [(), (MARKS,)], ids=["unmarked", "marked"])
def test_a_stream_is_broken_off_after_what_was_said(headers: Any, choices: int) -> None:
    status, body, is_whole = ask(Manager(steps=3, choices=choices), True, *headers)
    assert (status, is_whole) == (200, False)
    assert body.count("data: ") == 3
    assert "abort" not in body
    assert "[DONE]" not in body
    if headers and choices == 1:
        assert body.endswith(": pd 3 2 99\n\n")


def test_what_the_client_itself_aborts_ends_as_sglang_ends_it() -> None:
    assert ask(Manager(steps=3, stops=False), stream=False)[0] == 200
    _, body, is_whole = ask(Manager(steps=3, stops=False), stream=True)
    assert is_whole
    assert body.endswith("[DONE]\n\n")
