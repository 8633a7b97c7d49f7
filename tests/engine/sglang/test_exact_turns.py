"""SGLang's own rendering and encoding of chats, with recorded tokens around it."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.openai import serving_chat
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.managers.io_struct import GenerateReqInput
from transformers import PreTrainedTokenizerFast

from pdserve.engine.demo.chat import END_OF_TEXT, TURN_END
from pdserve.engine.http.request import HttpRequest
from pdserve.engine.http.request_context import Bootstrap, set_bootstrap
from pdserve.engine.sglang.exact_turns import Rendered, SglangTurns, tokenizer_of
from pdserve.engine.sglang.long_texts import SHORT_CHARS
from pdserve.engine.sglang.prompt import FOR_THE_POOL, named_tokens
from pdserve.engine.sglang.serving import chat_class
from pdserve.engine.sglang.tokenizer_manager import TrackedRequests
from pdserve.engine.turns.exact import ExactTurns
from pdserve.engine.turns.record import Memory
from tests.support.engine.manager import Client, Manager, Scripted, State, Tokenized, scope_of, served
from tests.support.engine.turns import Records, decode, encode, end, letters, tokenizer
from tests.support.random_model import CHAT_TEMPLATE

QUESTION = {"role": "user", "content": "Hi"}
CHAT = [QUESTION, {"role": "assistant", "content": "Hello"}, QUESTION]


def manager_of(**more: Any) -> Any:
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), eos_token=TURN_END, pad_token=END_OF_TEXT)
    fast.chat_template = CHAT_TEMPLATE
    config = {"vocab_size": 600, "hf_eos_token_id": {end(), 0}, "is_multimodal": False}
    return SimpleNamespace(
        tokenizer=fast,
        model_config=SimpleNamespace(**{**config, **more}),
        is_generation=True,
        context_len=4096,
        num_reserved_tokens=0,
    )


class Rendering(OpenAIServingChat):  # type: ignore[misc]  # SGLang ships no types
    """SGLang's chats from the body to the tokens; what follows is left out."""

    def __init__(self, manager: Any) -> None:
        self.tokenizer_manager = manager
        self.template_manager = SimpleNamespace(python_chat_template=None)
        self._prompt_text_round_trip_is_lossy = False

    def _convert_to_internal_request(self, request: Any, raw_request: Any = None) -> Any:
        ids = self.rendered([message.model_dump() for message in request.messages])
        return GenerateReqInput(input_ids=ids, sampling_params={}), request

    def rendered(self, messages: Sequence[dict[str, Any]]) -> Any:
        ids, _ = self._render_and_encode_chat_template(
            [dict(message) for message in messages],
            tools=None,
            template_kwargs={},
            encode_kwargs={"add_special_tokens": False},
            use_cache=False,
        )
        return ids


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SGLang's chats with the text of their prompts kept, and without after the test."""
    monkeypatch.setattr(serving_chat, "parallel_prompt_encode", serving_chat.parallel_prompt_encode)
    monkeypatch.setattr(serving_chat, "OpenAIServingChat", Rendering)
    chat_class.cache_clear()
    yield chat_class()(manager_of())
    chat_class.cache_clear()


def asked(serving: Any, messages: Sequence[dict[str, Any]], **more: Any) -> Any:
    chat = ChatCompletionRequest(model="m", messages=list(messages))
    request, _ = serving._convert_to_internal_request(chat)
    for name, value in more.items():
        setattr(request, name, value)
    return request


def turns_of(manager: Any, records: Records | None = None) -> tuple[SglangTurns, list[str]]:
    outcomes: list[str] = []
    made = tokenizer_of(manager)
    assert made is not None
    turns = ExactTurns(made, Memory(1 << 20), records, outcomes.append)
    return SglangTurns(manager, turns, outcomes.append), outcomes


async def answered(turns: SglangTurns, request: Any, answer: list[int]) -> list[int]:
    """All tokens of one turn."""
    http = HttpRequest("r", "/v1/chat/completions")
    turn = await turns.begin(request, http)
    assert turn is not None
    prompt = list(request.input_ids)
    await turns.end(turn, http, prompt, [*answer, end()])
    return [*prompt, *answer, end()]


def test_a_long_chat_is_encoded_once_and_each_request_has_a_list_of_its_own(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, texts = serving.tokenizer_manager.tokenizer, []
    original = tokenizer.encode

    def encode(text: str, **how: Any) -> Any:
        texts.append(text)
        return original(text, **how)

    monkeypatch.setattr(tokenizer, "encode", encode)
    long = [{"role": "user", "content": "many words " * SHORT_CHARS}]
    first = serving.rendered(long)
    wanted = list(first)
    first.append(0)
    again = serving.rendered(long)
    assert (list(again), again.text) == (wanted, first.text)
    assert len(texts) == 1
    serving.rendered([{"role": "user", "content": "other words " * SHORT_CHARS}])
    assert len(texts) == 2
    serving.encodings.clear()
    assert list(serving.rendered(long)) == wanted
    assert len(texts) == 3


async def test_a_chat_keeps_its_text_and_the_next_one_its_tokens(serving: Any) -> None:
    turns, outcomes = turns_of(serving.tokenizer_manager)
    first = asked(serving, CHAT[:1])
    assert isinstance(first.input_ids, Rendered)
    assert decode(first.input_ids) == first.input_ids.text
    had = await answered(turns, first, letters("Hello"))
    second = asked(serving, CHAT)
    assert second.input_ids.answers == 1
    plain = list(second.input_ids)
    await turns.begin(second, None)
    assert second.input_ids[: len(had)] == had
    assert second.input_ids != plain
    assert decode(second.input_ids) == decode(plain)
    assert type(second.input_ids) is list
    assert outcomes == ["spliced"]


async def test_a_prompt_that_is_only_looked_up_gets_its_tokens_and_is_no_turn(serving: Any) -> None:
    """A chat that is pulled ahead, or whose pages are looked up, was or will be computed and counted once."""
    turns, outcomes = turns_of(serving.tokenizer_manager)
    had = await answered(turns, asked(serving, CHAT[:1]), letters("Hello"))
    tokens = await named_tokens(serving.tokenizer_manager, asked(serving, CHAT), turns)
    assert tokens[: len(had)] == had
    assert outcomes == []
    await turns.begin(asked(serving, CHAT), None)
    assert outcomes == ["spliced"]


async def test_the_stop_tokens_of_model_and_tokenizer_count(serving: Any) -> None:
    made = tokenizer_of(manager_of())
    assert made is not None
    assert made.stop_tokens.texts == {end(): TURN_END, 0: END_OF_TEXT}
    assert tokenizer_of(manager_of(is_multimodal=True)) is None


@pytest.mark.parametrize("ids", [[1, 2], None], ids=["tokens of the client", "a text"])
async def test_what_sglang_made_otherwise_is_left_alone(serving: Any, ids: Any) -> None:
    turns, outcomes = turns_of(serving.tokenizer_manager)
    request = GenerateReqInput(input_ids=ids, text=None if ids else "a", sampling_params={})
    assert await turns.begin(request, None) is None
    assert (request.input_ids, outcomes) == (ids, [])


async def test_a_direct_hand_off_is_left_alone_and_a_prefill_for_the_pool_is_not(serving: Any) -> None:
    turns, outcomes = turns_of(serving.tokenizer_manager)
    await answered(turns, asked(serving, CHAT[:1]), letters("Hello"))
    for room, outcome in ((Bootstrap("10.0.0.5", 8998, 7), "direct"), (FOR_THE_POOL, "spliced")):
        request = asked(serving, CHAT)
        plain = list(request.input_ids)

        def begun(request: Any = request, room: Bootstrap = room) -> Any:
            set_bootstrap(room)
            return asyncio.ensure_future(turns.begin(request, None))

        await contextvars.copy_context().run(begun)
        assert (list(request.input_ids) == plain) == (outcome == "direct")
        assert outcomes[-1] == outcome


async def test_a_tokenizer_that_fails_costs_a_miss(
    serving: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    records = Records()
    turns, _ = turns_of(serving.tokenizer_manager, records)
    await answered(turns, asked(serving, CHAT[:1]), letters("Hello"))
    other, _ = turns_of(serving.tokenizer_manager, records)

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no tokenizer")

    monkeypatch.setattr(PreTrainedTokenizerFast, "decode", fail)
    request = asked(serving, CHAT)
    plain = list(request.input_ids)
    assert await other.begin(request, None) is None
    assert request.input_ids == plain
    assert "could not be put in" in caplog.text
    http = HttpRequest("r", "/")
    turn = await turns.begin(asked(serving, CHAT[:1]), http)
    assert turn is not None
    await turns.end(turn, http, turn.ids, [*letters("Hello"), end()])
    assert "could not be recorded" in caplog.text


async def test_a_prompt_that_gets_too_long_by_recorded_tokens_is_encoded(serving: Any) -> None:
    turns, outcomes = turns_of(serving.tokenizer_manager)
    await answered(turns, asked(serving, CHAT[:1]), letters("Hello"))
    length = len(asked(serving, CHAT).input_ids)
    serving.tokenizer_manager.context_len = length + 10
    await turns.begin(asked(serving, CHAT, sampling_params={"max_new_tokens": 10}), None)
    await turns.begin(asked(serving, CHAT, sampling_params={"max_new_tokens": 1}), None)
    assert outcomes == ["too_long", "spliced"]


class ScriptedChats(Scripted):
    """A manager whose scheduler answers each prompt with `answer`, in one piece or token by token."""

    def __init__(self, answer: list[int], finish: str = "stop") -> None:
        super().__init__()
        self.answer = answer
        self.finish = finish

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        obj.normalize_batch_and_arguments()
        self._init_req_state(obj, request)
        await self._send_one_request(Tokenized(obj.rid, list(obj.input_ids)))
        state: State = self.rid_to_state[obj.rid]
        for count in range(1, len(self.answer) + 1) if obj.stream else [len(self.answer)]:
            state.output_ids = self.answer[:count]
            is_end = count == len(self.answer)
            reason = {"type": self.finish} if is_end else None
            yield {"text": "", "meta_info": {"id": obj.rid, "finish_reason": reason}}


class Chats(TrackedRequests, ScriptedChats):
    pass


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("path", "finish", "outcome"),
    [
        ("/v1/chat/completions", "stop", "spliced"),
        ("/v1/messages", "length", "spliced"),
        ("/v1/chat/completions", "abort", "unknown"),
        ("/pd/prefill", "length", "unknown"),  # one token, which is thrown away
    ],
)
def test_finished_answers_are_recorded(
    serving: Any, streams: bool, path: str, finish: str, outcome: str
) -> None:
    turns, outcomes = turns_of(serving.tokenizer_manager)

    async def app(manager: Manager, client: Client, receive: Any, send: Any) -> None:
        for messages in (CHAT[:1], CHAT):
            async for _ in manager.generate_request(asked(serving, messages, stream=streams)):
                pass

    served(app, Chats([*letters("Hello"), end()], finish), scope_of(path), turns=turns)
    assert outcomes == [outcome]


def test_the_choice_of_the_prefill_worker_is_told_and_taken(serving: Any) -> None:
    """Not what the worker would choose itself."""
    turns, outcomes = turns_of(serving.tokenizer_manager)
    asyncio.run(answered(turns, asked(serving, CHAT[:1]), letters("Hello")))
    taken: list[Any] = []

    async def app(manager: Manager, client: Client, receive: Any, send: Any) -> None:
        request = asked(serving, CHAT)
        async for _ in manager.generate_request(request):
            pass
        taken.append(list(request.input_ids))

    plain = encode(asked(serving, CHAT).input_ids.text)
    for header, bits, is_plain in ((None, 2, False), (b"0", 0, True), (b"2", 2, False), (b"?", 2, False)):
        scope = scope_of("/v1/chat/completions", *([(b"x-pdserve-turns", header)] if header else []))
        _, http, _ = served(app, Chats([end()]), scope, turns=turns)
        assert http.turns_taken == bits
        assert (taken[-1] == plain) == is_plain
    assert set(outcomes) == {"spliced"}
