"""Long texts are tokenized beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.openai.protocol import TokenizeRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingTokenize

from pdserve.engine.sglang.long_texts import HUGE_CHARS, SHORT_CHARS, TextThreads, install
from pdserve.engine.sglang.tokenizer_manager import manager_class

LONG = "x" * (SHORT_CHARS + 1)


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


async def test_the_loop_goes_on_while_a_long_text_is_tokenized() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def enter() -> None:
        entered.set()
        assert go_on.wait(30)

    manager = manager_with(Tokenizer(enter))
    work = asyncio.create_task(manager._tokenize_texts(LONG))
    assert await asyncio.to_thread(entered.wait, 10), "the loop does not go on"
    assert not work.done()
    go_on.set()
    ids, _ = await work
    assert len(ids) == len(LONG)


async def test_a_long_text_does_not_wait_for_huge_ones() -> None:
    entered, go_on = threading.Semaphore(0), threading.Event()

    class Slow(Tokenizer):
        def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
            if len(texts[0]) > HUGE_CHARS:
                entered.release()
                assert go_on.wait(30)
            return {"input_ids": [[1] * len(text) for text in texts]}

    manager = manager_with(Slow())
    huge = [asyncio.create_task(manager._tokenize_texts("x" * (HUGE_CHARS + 1))) for _ in range(5)]
    assert await asyncio.to_thread(entered.acquire, True, 10)
    ids, _ = await asyncio.wait_for(manager._tokenize_texts(LONG), 10)
    assert len(ids) == len(LONG)
    assert not any(task.done() for task in huge)
    go_on.set()
    await asyncio.gather(*huge)


async def test_a_client_that_leaves_while_its_text_waits_or_is_tokenized_leaves_nothing_behind() -> None:
    entered, go_on = threading.Semaphore(0), threading.Event()

    def enter() -> None:
        entered.release()
        assert go_on.wait(30)

    tokenizer = Tokenizer(enter)
    manager = manager_with(tokenizer)
    tasks = [asyncio.create_task(manager._tokenize_texts(LONG)) for _ in range(5)]
    for _ in range(2):
        assert await asyncio.to_thread(entered.acquire, True, 10)
    for task in tasks:
        task.cancel()
    assert all(
        isinstance(end, asyncio.CancelledError)
        for end in await asyncio.gather(*tasks, return_exceptions=True)
    )
    go_on.set()
    ids, _ = await manager._tokenize_texts(LONG)
    assert (len(ids), tokenizer.calls) == (len(LONG), 3)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own methods come back after the test."""
    for owner, names in (
        (OpenAIServingTokenize, ("_handle_non_streaming_request",)),
        (AnthropicServing, ("handle_count_tokens", "_handle_non_streaming", "_handle_streaming")),
        (OpenAIServingChat, ("_convert_to_internal_request",)),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))


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


@pytest.mark.usefixtures("kept")
async def test_tokenizing_for_a_client_answers_as_sglang_does_and_beside_the_loop() -> None:
    words = Words()
    manager = manager_with(words)
    serving = OpenAIServingTokenize.__new__(OpenAIServingTokenize)
    serving.tokenizer_manager = manager
    request = TokenizeRequest(model="m", prompt="a bb ccc " + LONG)
    plain = await serving._handle_non_streaming_request(request, request, None)
    install(TextThreads())
    answer = await serving._handle_non_streaming_request(request, request, None)
    assert answer.body == b'{"tokens":[1,2,3,4097],"count":4,"max_model_len":64}'
    assert plain.model_dump_json().encode() == answer.body
    main = threading.main_thread()
    assert [thread is main for thread in words.threads] == [True, False]


class Chat(OpenAIServingChat):
    """SGLang's chats as far as Anthropic's use them. Notes the threads that convert."""

    def __init__(self, refusal: str = "") -> None:
        self.refusal = refusal
        self.threads: list[threading.Thread] = []
        self.supports_inline_system = True  # type: ignore[misc]
        self.tokenizer_manager = SimpleNamespace(model_config=SimpleNamespace(is_multimodal=False))

    def _validate_request(self, request: Any) -> str | None:
        return self.refusal or None

    def _process_messages(self, request: Any, is_multimodal: bool) -> Any:
        self.threads.append(threading.current_thread())
        return SimpleNamespace(prompt_ids=[1] * len(request.messages))

    async def _handle_non_streaming_request(self, adapted: Any, request: Any, raw_request: Any) -> Any:
        raise ValueError(f"generated from {adapted}")


def anthropics(monkeypatch: pytest.MonkeyPatch, chat: Chat, converted: Callable[[], Any]) -> AnthropicServing:
    """Anthropic's endpoint over `chat`, which converts a request to what `converted` returns."""

    def convert(self: Chat, request: Any, raw_request: Any = None) -> Any:
        self.threads.append(threading.current_thread())
        return SimpleNamespace(made=converted()), request

    monkeypatch.setattr(OpenAIServingChat, "_convert_to_internal_request", convert)
    return AnthropicServing(chat)


RAW = SimpleNamespace(headers={"content-length": "10"})
MESSAGES: Any = [{"role": "user", "content": "a"}]


@pytest.mark.usefixtures("kept")
async def test_anthropics_chats_are_converted_once_and_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chat = Chat()
    serving = anthropics(monkeypatch, chat, lambda: "tokens")
    install(TextThreads())
    asked = AnthropicMessagesRequest(model="m", max_tokens=1, messages=MESSAGES)
    answer = await serving.handle_messages(asked, RAW)  # type: ignore[arg-type]
    assert b"generated from namespace(made='tokens'" in answer.body
    assert [thread is threading.main_thread() for thread in chat.threads] == [False]
    counted = await serving.handle_count_tokens(
        AnthropicCountTokensRequest(model="m", messages=MESSAGES),
        RAW,  # type: ignore[arg-type]
    )
    assert counted.body == b'{"input_tokens":1}'
    assert [thread is threading.main_thread() for thread in chat.threads] == [False, False]


@pytest.mark.usefixtures("kept")
async def test_what_anthropics_chats_cannot_be_converted_for_is_answered_as_by_sglang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> Any:
        raise ValueError("the template does not like it")

    asked = AnthropicMessagesRequest(model="m", max_tokens=1, messages=MESSAGES)
    install(TextThreads())
    for refusal, said in (("", b"the template does not like it"), ("not allowed", b"not allowed")):
        serving = anthropics(monkeypatch, Chat(refusal), fail)
        answer = await serving.handle_messages(asked, RAW)  # type: ignore[arg-type]
        assert (answer.status_code, said in answer.body) == (400, True)
