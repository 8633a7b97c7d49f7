"""Clients that are no dependency of the tests, unmodified, against a running router.

    PYTHON -m tests.support.other_clients http://127.0.0.1:8000/v1 MODEL [EMBEDDING_MODEL]

PYTHON is one that has `langchain-openai` and `litellm`. It needs nothing of pdserve. Each line says what a
client did; the exit status is the number of failures. docs/clients.md has what was seen.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Callable
from typing import Any

CITIES = ["Oslo", "Rome"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": CITIES}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city", "strict": True, "parameters": SCHEMA},
}
FORCED = {"type": "function", "function": {"name": "weather"}}
ASKED = [{"role": "user", "content": "Write something about dictionaries."}]
TOKENS = 16
Check = Callable[[], object]


def langchain(url: str, model: str, vectors: str) -> dict[str, Check]:
    """`langchain-openai`: chat, streams, tools, structured output, responses, embeddings."""
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

    given: dict[str, Any] = {
        "base_url": url,
        "api_key": "unused",
        "model": model,
        "temperature": 0,
        "max_retries": 0,
    }
    chat = ChatOpenAI(**given, max_tokens=TOKENS)
    wide = ChatOpenAI(**given, max_tokens=64)

    @tool
    def weather(city: str) -> str:
        """Of a city."""
        return f"sunny in {city}"

    def invoke() -> None:
        said = chat.invoke("Hello.")
        assert said.content
        assert said.usage_metadata["output_tokens"] == TOKENS

    def stream() -> None:
        chunks = list(chat.stream("Hello.", stream_usage=True))
        assert len(chunks) > 2
        assert "".join(str(c.content) for c in chunks) == chat.invoke("Hello.").content
        assert any(c.usage_metadata for c in chunks)

    def ainvoke() -> None:
        async def both() -> None:
            one, more = await asyncio.gather(chat.ainvoke("Hello."), chat.abatch(["a", "b"]))
            assert one.content
            assert len(more) == 2

        asyncio.run(both())

    def tools() -> None:
        said = wide.bind_tools([FUNCTION], tool_choice="weather").invoke("Oslo?")
        assert said.tool_calls[0]["args"]["city"] in CITIES
        turn = [HumanMessage("Oslo?"), said, ToolMessage("sunny", tool_call_id=said.tool_calls[0]["id"])]
        assert isinstance(wide.bind_tools([weather]).invoke(turn), AIMessage)

    def structured() -> None:
        said = wide.with_structured_output({"title": "city", **SCHEMA}, method="json_schema").invoke("Oslo?")
        assert said["city"] in CITIES

    def responses() -> None:
        assert ChatOpenAI(**given, max_tokens=TOKENS, use_responses_api=True).invoke("Hello.").content

    def completion() -> None:
        assert OpenAI(**given, max_tokens=TOKENS).invoke("Once upon")

    checks = {
        "chat": invoke,
        "chat, stream": stream,
        "chat, async and batch": ainvoke,
        "chat, tools": tools,
        "chat, structured output": structured,
        "responses": responses,
        "completion": completion,
    }
    if vectors:

        def embed() -> None:
            maker = OpenAIEmbeddings(
                base_url=url, api_key="unused", model=vectors, check_embedding_ctx_length=False
            )
            assert len(maker.embed_documents(["a", "b"])) == 2
            assert maker.embed_query("a")

        checks["embeddings"] = embed
    return {f"langchain-openai: {name}": check for name, check in checks.items()}


def litellm(url: str, model: str, vectors: str) -> dict[str, Check]:
    """`litellm`: chat, streams, tools, completion, responses, Anthropic's messages, embeddings."""
    import litellm as lite

    given: dict[str, Any] = {
        "model": f"openai/{model}",
        "api_base": url,
        "api_key": "unused",
        "num_retries": 0,
    }
    short = {"max_tokens": TOKENS, "temperature": 0}

    def chat() -> None:
        said = lite.completion(messages=ASKED, **given, **short)
        assert said.choices[0].message.content
        assert said.usage.completion_tokens == TOKENS

    def stream() -> None:
        chunks = list(lite.completion(messages=ASKED, stream=True, **given, **short))
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        assert text == lite.completion(messages=ASKED, **given, **short).choices[0].message.content

    def acompletion() -> None:
        assert asyncio.run(lite.acompletion(messages=ASKED, **given, **short)).choices

    def tools() -> None:
        said = lite.completion(messages=ASKED, tools=[FUNCTION], tool_choice=FORCED, max_tokens=64, **given)
        assert said.choices[0].message.tool_calls[0].function.name == "weather"

    def text() -> None:
        named = given | {"model": f"text-completion-openai/{model}"}
        assert lite.text_completion(prompt="Once upon", **named, **short).choices[0].text

    def responses() -> None:
        assert lite.responses(input="Hello.", max_output_tokens=TOKENS, **given).output

    def messages() -> None:
        root = url.removesuffix("/v1")
        said = asyncio.run(
            lite.anthropic.messages.acreate(
                model=f"anthropic/{model}", api_base=root, api_key="unused", messages=ASKED, max_tokens=TOKENS
            )
        )
        assert said["content"][0]["text"]

    def unknown() -> None:
        try:
            lite.completion(messages=ASKED, **(given | {"model": "openai/nobody"}))
        except lite.exceptions.NotFoundError:
            return
        raise AssertionError("a model that is not there was answered")

    checks = {
        "chat": chat,
        "chat, stream": stream,
        "chat, async": acompletion,
        "chat, tools": tools,
        "completion": text,
        "responses": responses,
        "Anthropic's messages": messages,
        "an unknown model is its NotFoundError": unknown,
    }
    if vectors:

        def embed() -> None:
            said = lite.embedding(input=["a", "b"], **(given | {"model": f"openai/{vectors}"}))
            assert len(said.data) == 2

        checks["embeddings"] = embed
    return {f"litellm: {name}": check for name, check in checks.items()}


def main(url: str, model: str, vectors: str = "") -> int:
    """The number of failures."""
    failures = 0
    for name, check in {**langchain(url, model, vectors), **litellm(url, model, vectors)}.items():
        try:
            check()
            sys.stdout.write(f"ok    {name}\n")
        except Exception:  # boundary: whatever a client raises is its verdict
            failures += 1
            sys.stdout.write(f"FAILS {name}\n{traceback.format_exc(limit=-3)}\n")
    return failures


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
