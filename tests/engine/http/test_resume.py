"""A stream cut anywhere and gone on with elsewhere is, byte for byte, the stream that was not cut."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.sampling.sampling_params import SamplingParams

from pdserve.engine.http.request import RequestTracking
from pdserve.engine.http.resume import Continuing
from pdserve.engine.sglang.tokenizer_manager import TrackedRequests
from pdserve.router.request.stream_marks import StreamMarks
from tests.support.engine.manager import Tokenized

VOCABULARY = 1 << 20
PROMPT = [72, 105, 33]


class Tokenizer:
    """Tokens are one byte of UTF-8 or two: characters begin and end within them."""

    def decode(self, ids: Any, **_: Any) -> str:
        return b"".join(i.to_bytes(1 + (i > 255), "big") for i in ids).decode("utf-8", "replace")

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())


def tokens(text: str, is_wide: bool = False) -> list[int]:
    data = text.encode()
    if not is_wide:
        return list(data)
    return [int.from_bytes(data[i : i + 2], "big") for i in range(0, len(data), 2)]


@dataclass
class Obj:
    rid: str
    max_new_tokens: int | None
    return_prompt_token_ids: bool = False
    stream: bool = True


@dataclass
class Scripted:
    """SGLang's tokenizer manager, a model that says `answer`, and a detokenizer as SGLang's. `step` tokens
    come at a time, as when the caller is slow.
    """

    answer: list[int]
    step: int = 1
    rid: str = "first"
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    incremental_streaming_output: bool = False
    mm_processor: Any = None
    elastic_worker_count: int = 1
    sampling: dict[str, Any] = field(default_factory=dict)
    """Set by the model or the server, whatever the client says."""
    return_logprob: bool = False
    think_end: int | None = None
    """The token that ends the reasoning that the answer begins with, if it does."""
    sent: list[Tokenized] = field(default_factory=list)

    @property
    def model_config(self) -> Any:
        ends = None if self.think_end is None else [self.think_end]
        return SimpleNamespace(think_end_ids=ends, vocab_size=VOCABULARY)

    rid_to_state: dict[str, Any] = field(default_factory=dict)

    def _init_req_state(self, obj: Obj, request: Any = None) -> None:
        self.rid_to_state[obj.rid] = None

    def _create_tokenized_object(self, obj: Any) -> Any: ...

    async def _send_one_request(self, tokenized: Tokenized) -> None:
        self.sent.append(tokenized)

    async def _send_batch_request(self, tokenized: Any) -> None: ...

    async def _handle_batch_output(self, output: Any) -> None: ...

    def generate_request(self, obj: Obj, request: Any = None) -> AsyncGenerator[dict[str, Any], None]:
        return self.generated(obj)

    async def generated(self, obj: Obj) -> AsyncGenerator[dict[str, Any], None]:
        obj.rid = self.rid
        self._init_req_state(obj)
        sampling = self._sampling(obj.max_new_tokens)
        asked = self._tokenized(obj, sampling)
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
            if done or len(ids) % self.step == 0:
                yield {
                    "text": text + pending,
                    "output_ids": ids,
                    "meta_info": {
                        "id": obj.rid,
                        "finish_reason": finish if done else None,
                        "prompt_tokens": len(prompt),
                        "completion_tokens": len(ids),
                        "cached_tokens": len(prompt) - 1,
                        "cached_tokens_details": {"device": 1, "host": 1, "storage": len(prompt) - 3},
                        "reasoning_tokens": self._thought(ids),
                    },
                }

    def _tokenized(self, obj: Obj, sampling: SamplingParams) -> Tokenized:
        return Tokenized(
            obj.rid,
            array("q", PROMPT),
            sampling_params=sampling,
            return_logprob=self.return_logprob,
            require_reasoning=self.think_end is not None,
        )

    def _thought(self, ids: list[int]) -> int:
        if self.think_end is None:
            return 0
        return ids.index(self.think_end) + 1 if self.think_end in ids else len(ids)

    def _sampling(self, max_new_tokens: int | None) -> SamplingParams:
        params = SamplingParams(max_new_tokens=max_new_tokens, **self.sampling)
        params.normalize(self.tokenizer)
        return params

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        """SGLang's chat route, in small, and its `/generate`, as far as it refuses."""
        body = json.loads((await receive())["body"])
        if scope["path"] == "/generate":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            try:
                await anext(self._events(body))
            except ValueError as error:
                refusal = f"data: {error}\n\ndata: [DONE]\n\n".encode()
                await send({"type": "http.response.body", "body": refusal, "more_body": False})
            return
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
        async for content in self.generate_request(
            Obj(self.rid, body.get("max_tokens"), body.get("return_token_ids", False))
        ):
            if offset < 0:
                yield event(role="assistant")
                offset = 0
            if delta := content["text"][offset:]:
                yield event(delta=delta)
            offset = len(content["text"])
        yield event(finish=content["meta_info"]["finish_reason"])
        meta = content["meta_info"]
        thought = meta.get("reasoning_tokens", 0)
        cached = sum(meta["cached_tokens_details"].values())
        assert cached == meta["cached_tokens"] < meta["prompt_tokens"]
        yield event(usage=[meta["prompt_tokens"], meta["completion_tokens"], thought])
        yield b"data: [DONE]\n\n"


@dataclass
class Engine(TrackedRequests, Scripted):
    def __post_init__(self) -> None:
        self.track()


async def post(engine: Engine, path: str, body: bytes, marks: bool = True) -> tuple[int, list[bytes]]:
    """(status, what was sent piece by piece; the last is b"" when the answer is whole)."""
    target, _, query = path.partition("?")
    headers = [(b"content-length", b"%d" % len(body))] + [(b"x-pdserve-marks", b"1")] * marks
    scope = {"type": "http", "path": target, "query_string": query.encode(), "headers": headers}
    status, pieces = 0, []

    async def receive() -> Any:
        if unread:
            return unread.pop()
        return await asyncio.Future()

    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        if message["type"] == "http.response.body":
            assert status, "a server takes no body before the head"
            pieces.append(message["body"])
            if not message["more_body"]:
                pieces.append(b"")

    await RequestTracking(Continuing(engine.app))(scope, receive, send)
    return status, pieces


def chat(engine: Engine, body: bytes, marks: bool = True) -> bytes:
    status, pieces = asyncio.run(post(engine, "/v1/chat/completions", body, marks))
    assert status == 200
    return b"".join(pieces)


def cut_and_continue(stream: bytes, cuts: list[int], other: Engine, body: bytes, marks: StreamMarks) -> bytes:
    """What a client sees of `stream`, read in pieces that end at `cuts`, lost at the last, and continued."""
    got = b""
    marks.begin(True)
    begin = 0
    for cut in cuts:
        got += marks.take(stream[begin:cut])
        begin = cut
    path, data = "/v1/chat/completions", body
    if got:  # else the router simply asks again
        path, data = "/pd/continue?endpoint=/v1/chat/completions", marks.continue_body(body)
    status, pieces = asyncio.run(post(other, path, data))
    assert status == 200
    marks.begin(True)
    return got + marks.take_last(b"".join(pieces))


TEXT = st.text(st.sampled_from("ab \"'\\é漢🙂\n:"), min_size=1, max_size=12)


@given(
    TEXT,
    st.integers(1, 4),
    st.integers(1, 4),
    st.none() | st.integers(1, 30),
    st.lists(st.integers(0, 4000), min_size=1),
    st.booleans(),
    st.none() | st.integers(0, 40),
)
def test_the_client_cannot_tell(
    text: str,
    step: int,
    other_step: int,
    limit: int | None,
    cuts: list[int],
    is_wide: bool,
    thought: int | None,
) -> None:
    answer = tokens(text, is_wide)
    end = None if thought is None else answer[thought] if thought < len(answer) else 0
    body = json.dumps({"max_tokens": limit}).encode()
    whole = chat(Engine(answer, step, think_end=end), body, marks=False)
    marked = chat(Engine(answer, step, think_end=end), body)
    ends = sorted(cut % (len(marked) + 1) for cut in cuts)
    marks = StreamMarks()
    other = Engine(answer, other_step, rid="the other", think_end=end)
    seen = cut_and_continue(marked, ends, other, body, marks)
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
    cut_and_continue(marked, [marked.index(b"\n\n", cut) + 2], other, b'{"max_tokens":23}', StreamMarks())
    [asked] = other.sent
    assert bytes(asked.input_ids.tolist()) == bytes(PROMPT) + b"hello there,"
    assert asked.sampling_params.max_new_tokens == 11


def test_a_continued_stream_can_be_continued() -> None:
    answer, marks = list("ein schöner Satz".encode()), StreamMarks()
    whole = chat(Engine(answer), b"{}", marks=False)
    first = chat(Engine(answer), b"{}")
    marks.begin(True)
    seen = marks.take(first[: len(first) // 3])
    _, pieces = asyncio.run(
        post(Engine(answer), "/pd/continue?endpoint=/v1/chat/completions", marks.continue_body(b"{}"))
    )
    second = b"".join(pieces)
    marks_told = [line.split() for line in second.split(b"\n\n") if line.startswith(b": pd ")]
    assert int(marks_told[0][3]) > 0  # the number of its first token: those before were told
    assert facts(seen + cut_and_continue(second, [len(second) // 2], Engine(answer), b"{}", marks)) == facts(
        whole
    )


def test_a_stream_says_what_it_used_and_one_that_another_worker_ends_says_the_same() -> None:
    answer = list(b"hello world")
    first = chat(Engine(answer), b"{}")
    marks, continued = StreamMarks(), StreamMarks()
    marks.begin(True)
    marks.take_last(first)
    cut_and_continue(first, [len(first) // 2], Engine(answer, rid="other"), b"{}", continued)
    assert marks.used is not None
    assert marks.used[0] == len(PROMPT)
    assert marks.used[1] >= len(answer)
    assert continued.used == marks.used


def test_several_choices_say_together_what_they_used_and_each_prompt_once() -> None:
    class Choices(Engine):
        async def generated(self, obj: Obj) -> AsyncGenerator[Any, None]:
            obj.parallel_sample_num = 2
            for index, output in [(0, 1), (1, 1), (2, 1), (0, 2), (3, 1), (3, 2)]:
                meta = {"id": "a", "prompt_tokens": [10, 20][index // 2], "completion_tokens": output}
                meta |= {"cached_tokens": 0, "cached_tokens_details": {}, "reasoning_tokens": 0}
                yield {
                    "text": "a",
                    "meta_info": {**meta, "finish_reason": None},
                    "output_ids": [],
                    "index": index,
                }

    stream = chat(Choices([]), b"{}")
    assert stream.count(b": pd-usage 30 6\n\n") == 1


def test_several_choices_are_passed_on_as_they_come() -> None:
    class Choices(Engine):
        async def generated(self, obj: Obj) -> AsyncGenerator[Any, None]:
            async for content in super().generated(obj):
                yield {**content, "index": 0}

    _, pieces = asyncio.run(post(Choices(list(b"abc")), "/v1/chat/completions", b"{}"))
    assert pieces[0].startswith(b": pd off\n\ndata: ")
    assert len(pieces) > 5
    marks = StreamMarks()
    marks.begin(True)
    ready = marks.take(pieces[0] + pieces[1])
    assert ready == pieces[0].removeprefix(b": pd off\n\n") + pieces[1]
    assert not marks.is_marked


def test_a_stream_with_token_ids_is_passed_on_as_it_comes() -> None:
    """They do not end where the text does, so a part of them would come twice."""
    _, pieces = asyncio.run(post(Engine([65, 66]), "/v1/chat/completions", b'{"return_token_ids":true}'))
    assert pieces[0].startswith(b": pd off\n\ndata: ")


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


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"repetition_penalty": 1.0, "temperature": 0.5, "top_k": 20, "sampling_seed": 1},
        {"custom_params": {"__sglang_reasoning_end_token_ids": [7]}},
    ],
)
def test_other_sampling_can_be_gone_on_with(sampling: dict[str, Any]) -> None:
    body = b'{"characters":1,"token_ids":[104]}\n{}'
    path = "/pd/continue?endpoint=/v1/chat/completions"
    status, pieces = asyncio.run(post(Engine(list(b"hello"), sampling=sampling), path, body))
    assert status == 200
    assert b'"delta":"e"' in b"".join(pieces)


@pytest.mark.parametrize(
    ("settings", "characters", "token", "said"),
    [
        ({"sampling": {"repetition_penalty": 1.1}}, 1, 104, "repetition_penalty"),
        ({"sampling": {"frequency_penalty": 0.5}}, 1, 104, "frequency_penalty"),
        ({"sampling": {"presence_penalty": -0.5}}, 1, 104, "presence_penalty"),
        ({"sampling": {"stop": ["x"]}}, 1, 104, "stop_strs"),
        ({"sampling": {"stop_regex": "x+"}}, 1, 104, "stop_regex_strs"),
        ({"sampling": {"json_schema": "{}"}}, 1, 104, "json_schema"),
        ({"sampling": {"custom_params": {"thinking_budget": 9}}}, 1, 104, "custom_params"),
        ({"return_logprob": True}, 1, 104, "log-probabilities"),  # those so far would be missing
        ({}, 5, 104, "do not make the text"),
        *(({}, 0, token, "vocabulary") for token in (-1, VOCABULARY, 10**30)),
    ],
)
def test_an_answer_whose_rest_depends_on_more_than_its_tokens_is_not_gone_on_with(
    settings: dict[str, Any], characters: int, token: int, said: str
) -> None:
    """The model's generation_config.json may set some, unseen by the router."""
    engine = Engine(list(b"hello"), **settings)
    status, message = refused(engine, b'{"characters":%d,"token_ids":[%d]}\n{}' % (characters, token))
    assert status == 400
    assert said in message
    assert engine.sent == []


@dataclass
class Aborting(Engine):
    """Its scheduler aborts what comes at once, in the words of SGLang's `_handle_abort_req`."""

    finish: dict[str, Any] = field(default_factory=dict)

    async def generated(self, obj: Obj) -> AsyncGenerator[dict[str, Any], None]:
        obj.rid = self.rid
        self._init_req_state(obj)
        await self._send_one_request(self._tokenized(obj, self._sampling(None)))
        meta = {"id": obj.rid, "finish_reason": {"type": "abort"} | self.finish, "completion_tokens": 0}
        yield {"text": "", "output_ids": [], "meta_info": meta}


def test_a_continuation_that_is_aborted_while_it_waits_is_answered_with_the_aborts_status() -> None:
    """So the router can ask another worker."""
    full = {"message": "The request queue is full.", "status_code": 503}
    status, said = refused(Aborting([], finish=full), b'{"characters":1,"token_ids":[104]}\n{}')
    error = json.loads(said)["error"]
    assert (status, error["message"], error["type"]) == (503, full["message"], "server_error")


def test_a_continuation_that_is_aborted_for_no_reason_ends_as_sglang_ends_it() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        reasons.extend(
            [c["meta_info"]["finish_reason"] async for c in engine.generate_request(Obj("a", None))]
        )

    engine, reasons = Aborting([]), []
    engine.app = app  # type: ignore[method-assign]
    asyncio.run(post(engine, "/pd/continue?endpoint=/generate", b'{"characters":1,"token_ids":[104]}\n{}'))
    assert reasons == [None, {"type": "abort"}]


def refused(engine: Engine, body: bytes) -> tuple[int, str]:
    """(status, message) at `/generate`, which has begun its answer before it knows."""
    status, pieces = asyncio.run(post(engine, "/pd/continue?endpoint=/generate", body))
    return status, pieces[0].decode()
