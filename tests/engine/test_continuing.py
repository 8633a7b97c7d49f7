"""A stream cut anywhere and gone on with elsewhere is, byte for byte, the stream that was not cut."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.continuing import Continuing
from pdserve.router.trail import Trail

PROMPT = [72, 105, 33]


class Tokenizer:
    """Tokens are one byte of UTF-8 or two: characters begin and end within them."""

    def decode(self, ids: Any, **_: Any) -> str:
        return b"".join(i.to_bytes(1 + (i > 255), "big") for i in ids).decode("utf-8", "replace")


def tokens(text: str, is_wide: bool = False) -> list[int]:
    data = text.encode()
    if not is_wide:
        return list(data)
    return [int.from_bytes(data[i : i + 2], "big") for i in range(0, len(data), 2)]


@dataclass
class Sampling:
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True


@dataclass
class Tokenized:
    rid: str
    input_ids: Any
    sampling_params: Sampling
    mm_inputs: Any = None


@dataclass
class Obj:
    rid: str
    max_new_tokens: int | None
    stream: bool = True


@dataclass
class Engine:
    """SGLang's tokenizer manager, a model that says `answer`, and a detokenizer as SGLang's. `step` tokens
    come at a time, as when the caller is slow.
    """

    answer: list[int]
    step: int = 1
    rid: str = "first"
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    incremental_streaming_output: bool = False
    sent: list[Tokenized] = field(default_factory=list)
    aborts_after: int | None = None

    async def _send_one_request(self, tokenized: Tokenized) -> None:
        self.sent.append(tokenized)

    async def generate_request(self, obj: Obj, request: Any = None) -> AsyncGenerator[dict[str, Any], None]:
        asked = Tokenized(obj.rid, array("q", PROMPT), Sampling(obj.max_new_tokens))
        await self._send_one_request(asked)
        prompt = list(asked.input_ids)
        limit = asked.sampling_params.max_new_tokens
        rest = self.answer[len(prompt) - len(PROMPT) :][:limit]
        finish = {"type": "length" if limit is not None and limit <= len(rest) else "stop"}
        ids: list[int] = []
        text, pending, surrounded, read = "", "", max(0, len(prompt) - 5), len(prompt)
        for i, token in enumerate(rest):
            ids.append(token)
            done = i + 1 == len(rest)
            whole = prompt + ids
            new = self.tokenizer.decode(whole[surrounded:])[
                len(self.tokenizer.decode(whole[surrounded:read])) :
            ]
            if done or not new.endswith("\ufffd"):
                text, pending, surrounded, read = text + new, "", read, len(whole)
            else:
                pending = new.rstrip("\ufffd")
            aborted = self.aborts_after is not None and len(ids) >= self.aborts_after
            if done or aborted or len(ids) % self.step == 0:
                yield {
                    "text": text + pending,
                    "output_ids": ids,
                    "meta_info": {
                        "id": obj.rid,
                        "finish_reason": {"type": "abort"} if aborted else finish if done else None,
                        "prompt_tokens": len(prompt),
                        "completion_tokens": len(ids),
                        "cached_tokens": len(prompt) - 1,
                    },
                }
            if aborted:
                return

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        """SGLang's chat route, in small."""
        body = json.loads((await receive())["body"])
        assert scope["path"] == "/v1/chat/completions"
        events = self._events(body)
        first = await anext(events)  # to refuse before the status is sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        async for event in events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self, body: Any) -> AsyncIterator[bytes]:
        def event(**fields: Any) -> bytes:
            text = json.dumps(
                {"id": self.rid, "created": len(self.rid), **fields},
                ensure_ascii=False,
                separators=(",", ":"),
            )
            return f"data: {text}\n\n".encode()

        offset, content = -1, {}
        async for content in self.generate_request(Obj(self.rid, body.get("max_tokens"))):
            if offset < 0:
                yield event(role="assistant")
                offset = 0
            if delta := content["text"][offset:]:
                yield event(delta=delta)
            offset = len(content["text"])
        yield event(finish=content["meta_info"]["finish_reason"])
        meta = content["meta_info"]
        yield event(usage=[meta["prompt_tokens"], meta["completion_tokens"]])
        yield b"data: [DONE]\n\n"


async def post(engine: Engine, path: str, body: bytes, marks: bool = True) -> tuple[int, list[bytes]]:
    """(status, what was sent piece by piece; the last is b"" when the answer is whole)."""
    target, _, query = path.partition("?")
    headers = [(b"content-length", b"%d" % len(body))] + [(b"x-pdserve-marks", b"1")] * marks
    scope = {"type": "http", "path": target, "query_string": query.encode(), "headers": headers}
    status, pieces = 0, []

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        if message["type"] == "http.response.body":
            assert status, "a server takes no body before the head"
            pieces.append(message["body"])
            if not message["more_body"]:
                pieces.append(b"")

    await Continuing(engine.app, lambda: engine)(scope, receive, send)
    return status, pieces


def chat(engine: Engine, body: bytes, marks: bool = True) -> bytes:
    status, pieces = asyncio.run(post(engine, "/v1/chat/completions", body, marks))
    assert status == 200
    return b"".join(pieces)


def cut_and_continue(stream: bytes, cuts: list[int], other: Engine, body: bytes, trail: Trail) -> bytes:
    """What a client sees of `stream`, read in pieces that end at `cuts`, lost at the last, and continued."""
    got = held = b""
    trail.begin(True)
    begin = 0
    for cut in cuts:
        ready, held = trail.take(held + stream[begin:cut], at_end=False)
        got += ready
        begin = cut
    path, data = "/v1/chat/completions", body
    if got:  # else the router simply asks again
        path, data = "/pd/continue?endpoint=/v1/chat/completions", trail.continue_body(body)
    status, pieces = asyncio.run(post(other, path, data))
    assert status == 200
    trail.begin(True)
    ready, held = trail.take(b"".join(pieces), at_end=True)
    assert held == b""
    return got + ready


TEXT = st.text(st.sampled_from("ab \"'\\é漢🙂\n:"), min_size=1, max_size=12)


@given(
    TEXT,
    st.integers(1, 4),
    st.integers(1, 4),
    st.none() | st.integers(1, 30),
    st.lists(st.integers(0, 4000), min_size=1),
    st.booleans(),
)
def test_the_client_cannot_tell(
    text: str, step: int, other_step: int, limit: int | None, cuts: list[int], is_wide: bool
) -> None:
    answer = tokens(text, is_wide)
    body = json.dumps({"max_tokens": limit}).encode()
    whole = chat(Engine(answer, step), body, marks=False)
    marked = chat(Engine(answer, step), body)
    ends = sorted(cut % (len(marked) + 1) for cut in cuts)
    trail = Trail()
    other = Engine(answer, other_step, rid="the other")
    seen = cut_and_continue(marked, ends, other, body, trail)
    assert facts(seen) == facts(whole)
    first = seen.split(b",")[0]
    assert all(event.startswith(first) for event in seen.split(b"\n\n")[:-2])  # one id
    assert b": pd" not in seen


def facts(stream: bytes) -> list[Any]:
    """What a client makes of a stream: the joined text, and everything else in order."""
    *events, done, empty = stream.split(b"\n\n")
    assert (done, empty) == (b"data: [DONE]", b"")
    said = [json.loads(event.removeprefix(b"data: ")) for event in events]
    text = "".join(one.get("delta", "") for one in said)
    others = [(key, one[key]) for one in said for key in ("role", "finish", "usage") if key in one]
    return [text, *others]


def test_what_was_sent_is_computed_as_prompt_and_not_again() -> None:
    answer = list(b"hello there, all of you")
    marked = chat(Engine(answer), b"{}")
    cut = marked.index(b": pd 12 ")
    other = Engine(answer, rid="o")
    cut_and_continue(marked, [marked.index(b"\n\n", cut) + 2], other, b'{"max_tokens":23}', Trail())
    [asked] = other.sent
    assert bytes(asked.input_ids.tolist()) == bytes(PROMPT) + b"hello there,"
    assert asked.sampling_params.max_new_tokens == 11


def test_a_continued_stream_can_be_continued() -> None:
    answer, trail = list("ein schöner Satz".encode()), Trail()
    whole = chat(Engine(answer), b"{}", marks=False)
    first = chat(Engine(answer), b"{}")
    trail.begin(True)
    seen, _ = trail.take(first[: len(first) // 3], at_end=False)
    _, pieces = asyncio.run(
        post(Engine(answer), "/pd/continue?endpoint=/v1/chat/completions", trail.continue_body(b"{}"))
    )
    second = b"".join(pieces)
    assert facts(seen + cut_and_continue(second, [len(second) // 2], Engine(answer), b"{}", trail)) == facts(
        whole
    )


def test_several_choices_are_passed_on_as_they_come() -> None:
    class Choices(Engine):
        async def generate_request(self, obj: Obj, request: Any = None) -> AsyncGenerator[Any, None]:
            async for content in super().generate_request(obj):
                yield {**content, "index": 0}

    _, pieces = asyncio.run(post(Choices(list(b"abc")), "/v1/chat/completions", b"{}"))
    assert pieces[0].startswith(b": pd off\n\ndata: ")
    assert len(pieces) > 5
    trail = Trail()
    trail.begin(True)
    ready, held = trail.take(pieces[0] + pieces[1], at_end=False)
    assert (ready, held) == (pieces[0].removeprefix(b": pd off\n\n") + pieces[1], b"")
    assert not trail.is_marked


def test_a_stream_that_the_servers_end_aborts_is_broken_off() -> None:
    engine = Engine(list(b"hello"), aborts_after=3)
    engine.pdserve_stopping = True  # type: ignore[attr-defined]
    _, pieces = asyncio.run(post(engine, "/v1/chat/completions", b"{}"))
    assert pieces[-1] != b""
    assert b"abort" not in b"".join(pieces)
    said_by_client = Engine(list(b"hello"), aborts_after=3)
    assert b"abort" in chat(said_by_client, b"{}")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/pd/continue?endpoint=/v1/embeddings", b"{}\n{}", 404),
        ("/pd/continue?endpoint=/v1/chat/completions", b"{}\n{}", 400),
        ("/pd/continue?endpoint=/v1/chat/completions", b"", 400),
    ],
)
def test_what_is_no_continuation_is_refused(path: str, body: bytes, status: int) -> None:
    answered, pieces = asyncio.run(post(Engine([65]), path, body))
    assert answered == status
    assert json.loads(pieces[0])["error"]["message"]


def test_tokens_that_do_not_make_the_text_are_refused() -> None:
    body = b'{"characters":5,"token_ids":[65]}\n{}'
    with pytest.raises(ValueError, match="do not make the text"):
        asyncio.run(post(Engine([65, 66]), "/pd/continue?endpoint=/v1/chat/completions", body))
