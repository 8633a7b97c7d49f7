"""What a client changed stands in the answers that it gets, and other answers stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from pdserve.engine.contract.endpoints import MESSAGES, Contract
from pdserve.engine.http.judged import Judged

ANSWER = b'{"id":"msg_1","type":"message","content":[{"text":"\\"message\\":{"}]}'
EVENTS = (
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_1","content":[]}}\n\n',
    b'event: content_block_delta\ndata: {"type":"x","delta":{"message":{"id":1}}}\n\n',
)
BODY = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
SAID = {"cache_miss_reason": {"type": "tools_changed", "cache_missed_input_tokens": 12}}


def asked(changed: str | None, *pieces: bytes, status: int = 200) -> Response:
    async def pass_on(_: Any) -> Response:
        if len(pieces) == 1:
            return Response(pieces[0], status, media_type="application/json")
        return StreamingResponse(iter(pieces), status)

    app = Starlette(routes=[Route(MESSAGES, pass_on, methods=["POST"])])
    app.add_middleware(Judged, contract=Contract)
    headers = {} if changed is None else {"x-pdserve-changed": changed}
    return TestClient(app).post(MESSAGES, json=BODY, headers=headers)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("tools_changed=12", SAID),
        ("previous_message_not_found", {"cache_miss_reason": {"type": "previous_message_not_found"}}),
        ("none", None),
    ],
)
def test_a_whole_answer_and_a_streams_first_event_say_it(changed: str, expected: object) -> None:
    whole = asked(changed, ANSWER)
    assert whole.json() == {"diagnostics": expected, **msgspec.json.decode(ANSWER)}
    assert whole.headers["content-length"] == str(len(whole.content))
    first, second = _events(asked(changed, *EVENTS).content)
    assert first["message"] == {"diagnostics": expected, "id": "msg_1", "content": []}
    assert second == {"type": "x", "delta": {"message": {"id": 1}}}


@pytest.mark.parametrize("changed", [None, "", "tools changed", 'x="y"', "a=b"])
def test_other_answers_stay_as_they_are(changed: str | None) -> None:
    assert asked(changed, ANSWER).content == ANSWER
    assert asked(changed, *EVENTS).content == b"".join(EVENTS)


def test_an_error_says_nothing_of_it() -> None:
    assert asked("none", ANSWER, status=400).json()["type"] == "error"


def _events(data: bytes) -> Sequence[Any]:
    return [msgspec.json.decode(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: ")]
