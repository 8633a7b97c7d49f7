"""SGLang's serving as a worker runs it: long texts are tokenized beside the event loop, and tokens counted as
Anthropic's API does.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.anthropic import serving as anthropic
from sglang.srt.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.openai.protocol import TokenizeRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingTokenize

from pdserve.engine.http.request import current_request
from pdserve.engine.sglang.long_texts import HUGE_CHARS, SHORT_CHARS, TextThreads
from pdserve.engine.sglang.serving import chat_class, count_created, take_places
from pdserve.engine.sglang.tokenizer_manager import manager_class
from tests.support.engine.manager import scope_of, served

LONG = "x" * (SHORT_CHARS + 1)
PAGE = 16


@pytest.fixture(autouse=True)
def functions_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own function comes back after the test."""
    usage_of = inspect.unwrap(anthropic._anthropic_usage_from_openai)
    monkeypatch.setattr(anthropic, "_anthropic_usage_from_openai", usage_of)


class Tokenizer:
    """One token for each character. `enter` is called first."""

    is_fast = True

    def __init__(self, enter: Any = lambda: None) -> None:
        self.enter = enter
        self.calls = 0

    def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
        self.calls += 1
        self.enter()
        return {"input_ids": [[1] * len(text) for text in texts]}


def manager_with(tokenizer: Tokenizer) -> Any:
    """SGLang's own tokenizing, on a manager that was not started."""
    manager = manager_class().__new__(manager_class())
    manager.tokenizer, manager.async_dynamic_batch_tokenizer = tokenizer, None
    manager.model_config = SimpleNamespace(is_embedding_gemma=False)
    manager.text_threads = TextThreads()
    return manager


class Held:
    """What tokenizes here waits until `go_on` is set; `entered` counts."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Semaphore(0), threading.Event()

    def __call__(self) -> None:
        self.entered.release()
        assert self.go_on.wait(30)

    async def until(self, count: int) -> None:
        for _ in range(count):
            assert await asyncio.to_thread(self.entered.acquire, True, 10), "the loop does not go on"


async def test_the_loop_goes_on_and_clients_may_leave_while_long_texts_are_tokenized() -> None:
    held = Held()
    tokenizer = Tokenizer(held)
    manager = manager_with(tokenizer)
    tasks = [asyncio.create_task(manager._tokenize_texts(LONG)) for _ in range(5)]
    await held.until(2)
    assert not any(task.done() for task in tasks)
    for task in tasks[1:]:
        task.cancel()
    left = await asyncio.gather(*tasks[1:], return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in left)
    held.go_on.set()
    assert len((await tasks[0])[0]) == len(LONG)
    ids, _ = await manager._tokenize_texts(LONG)
    assert (len(ids), tokenizer.calls) == (len(LONG), 3)  # nothing of those who left is tokenized later


async def test_a_long_text_does_not_wait_for_huge_ones() -> None:
    held = Held()

    class Slow(Tokenizer):
        def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
            if len(texts[0]) > HUGE_CHARS:
                held()
            return {"input_ids": [[1] * len(text) for text in texts]}

    manager = manager_with(Slow())
    huge = [asyncio.create_task(manager._tokenize_texts("x" * (HUGE_CHARS + 1))) for _ in range(5)]
    await held.until(1)
    ids, _ = await asyncio.wait_for(manager._tokenize_texts(LONG), 10)
    assert len(ids) == len(LONG)
    assert not any(task.done() for task in huge)
    held.go_on.set()
    await asyncio.gather(*huge)


class Words(Tokenizer):
    """A token for each word: its length."""

    model_max_length = 64
    chat_template = None

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[threading.Thread] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.threads.append(threading.current_thread())
        return [len(word) for word in text.split()]

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        return " ".join(message["content"] for message in messages)


def placed(manager: Any, chat: Any = None) -> Any:
    """SGLang's objects of an app, whose places ours have taken."""
    tokenize = OpenAIServingTokenize.__new__(OpenAIServingTokenize)
    tokenize.tokenizer_manager = manager
    front = AnthropicServing(chat or SimpleNamespace(supports_inline_system=True))
    responses = OpenAIServingResponses.__new__(OpenAIServingResponses)
    state = SimpleNamespace(openai_serving_tokenize=tokenize, anthropic_serving=front)
    take_places(state, PAGE)  # of a model without responses
    state.openai_serving_responses = responses
    take_places(state, PAGE)
    assert type(responses) is not OpenAIServingResponses
    return state


async def test_tokenizing_for_a_client_answers_as_sglang_does_and_beside_the_loop() -> None:
    words = Words()
    manager = manager_with(words)
    plain = OpenAIServingTokenize.__new__(OpenAIServingTokenize)
    plain.tokenizer_manager = manager
    request = TokenizeRequest(model="m", prompt="a bb ccc " + LONG)
    theirs = await plain._handle_non_streaming_request(request, request, None)
    ours = placed(manager).openai_serving_tokenize
    answer = await ours._handle_non_streaming_request(request, request, None)
    assert answer.body == b'{"tokens":[1,2,3,4097],"count":4,"max_model_len":64}'
    assert theirs.model_dump_json().encode() == answer.body
    main = threading.main_thread()
    assert [thread is main for thread in words.threads] == [True, False]


RAW: Any = SimpleNamespace(headers={"content-length": "10"})
MESSAGES: Any = [{"role": "user", "content": "a"}]


class Theirs(OpenAIServingChat):  # type: ignore[misc]  # SGLang ships no types
    """SGLang's chats as far as Anthropic's use them. Notes the threads that convert."""

    supports_inline_system = True

    def __init__(self, make: Callable[[], Any], refusal: str = "") -> None:
        self.make, self.refusal = make, refusal
        self.threads: list[threading.Thread] = []
        config = SimpleNamespace(is_multimodal=False)
        self.tokenizer_manager = SimpleNamespace(model_config=config, text_threads=TextThreads())

    def _validate_request(self, request: Any) -> str | None:
        return self.refusal or None

    def _process_messages(self, request: Any, is_multimodal: bool) -> Any:
        self.threads.append(threading.current_thread())
        return SimpleNamespace(prompt_ids=[1] * len(request.messages))

    def _convert_to_internal_request(self, request: Any, raw_request: Any = None) -> Any:
        self.threads.append(threading.current_thread())
        return SimpleNamespace(made=self.make()), request

    async def _handle_non_streaming_request(self, adapted: Any, request: Any, raw_request: Any) -> Any:
        raise ValueError(f"generated from {adapted}")


def chats(make: Callable[[], Any], refusal: str = "") -> Any:
    """A worker's chats over these."""
    return type("Chats", (chat_class(), Theirs), {})(make, refusal)


async def ask(chat: Any) -> Any:
    asked = AnthropicMessagesRequest(model="m", max_tokens=1, messages=MESSAGES)
    return await placed(None, chat).anthropic_serving.handle_messages(asked, RAW)


async def test_anthropics_chats_are_converted_once_and_beside_the_loop() -> None:
    chat = chats(lambda: "tokens")
    assert b"generated from namespace(made='tokens'" in (await ask(chat)).body
    counting = AnthropicCountTokensRequest(model="m", messages=MESSAGES)
    counted = await placed(None, chat).anthropic_serving.handle_count_tokens(counting, RAW)
    assert counted.body == b'{"input_tokens":1}'
    assert [thread is threading.main_thread() for thread in chat.threads] == [False, False]


@pytest.mark.parametrize("refusal", ["", "not allowed"])
async def test_what_anthropics_chats_cannot_be_converted_for_is_answered_as_by_sglang(refusal: str) -> None:
    def fail() -> Any:
        raise ValueError("the template does not like it")

    answer = await ask(chats(fail, refusal))
    assert answer.status_code == 400
    assert (refusal or "the template does not like it").encode() in answer.body


@pytest.mark.parametrize(
    ("prompt", "cached", "is_marked", "told"),
    [
        (100, 0, True, (4, 0, 96)),
        (100, 64, True, (4, 64, 32)),
        (100, 96, True, (4, 96, 0)),
        (10, 0, True, (10, 0, 0)),
        (96, 80, True, (0, 80, 16)),
        (10, 64, True, (0, 10, 0)),  # never more was read than the prompt has
        (10, 64, False, (0, 10, None)),
        (100, 64, False, (36, 64, None)),
        (100, 0, False, (100, None, None)),
    ],
)
def test_of_a_marked_prompt_the_whole_pages_that_were_computed_are_created(
    prompt: int, cached: int, is_marked: bool, told: tuple[int, int | None, int | None]
) -> None:
    assert usage(prompt, cached, is_marked=is_marked) == {
        name: tokens for name, tokens in zip(KINDS, (*told, 3), strict=True) if tokens is not None
    }
    assert usage(prompt, cached, is_marked=is_marked, include_input=False) == {"output_tokens": 3}


KINDS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "output_tokens")


def usage(prompt: int, cached: int, *, is_marked: bool, include_input: bool = True) -> dict[str, Any]:
    """What SGLang's front of Anthropic's API tells of a request."""
    details = SimpleNamespace(cached_tokens=cached)
    found = SimpleNamespace(prompt_tokens=prompt, completion_tokens=3, prompt_tokens_details=details)
    made: list[Any] = []

    async def app(_manager: Any, _client: Any, _receive: Any, _send: Any) -> None:
        request = current_request()
        assert request is not None
        request.marks_cache = is_marked
        kinds = {"include_input": include_input, "include_output": True}
        made.append(anthropic._anthropic_usage_from_openai(found, **kinds))

    count_created(PAGE)
    served(app, scope=scope_of("/v1/messages"))
    return dict(made[0].model_dump(exclude_none=True))
