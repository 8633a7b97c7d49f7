"""One streamed request to a server of OpenAI's API, timed.

Times are of `time.monotonic()`. The first token is the first event that carries any of the answer. What goes
wrong becomes the record's `error`, a kind in few words, and `detail`, what the server or the system said;
nothing is raised.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import msgspec

from benchmarks.lib.load import Cached
from tests.support.processes import HarnessError

PATH: Final = "/v1/completions"
CONNECT_TIMEOUT_S: Final = 5.0
END_TIMEOUT_S: Final = 1.0  # from an answer's last word to its end, which servers send together
MAX_DETAIL: Final = 200  # characters of an error's text that are kept
MAX_EVENT_BYTES: Final = 16 << 20
NOT_CACHED: Final = Cached()


@dataclass
class Response:
    """An answer as it came."""

    sent_s: float
    first_s: float | None = None
    done_s: float = 0.0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    """Between events that carry text."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached: Cached = NOT_CACHED
    finish: str = ""
    server_timing: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Of the answer."""
    error: str = ""
    detail: str = ""


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _CachedTotal(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _CachedTotal | None = None


class _Places(msgspec.Struct):
    device: int = 0
    host: int = 0
    storage: int | None = None


class _Extension(msgspec.Struct):
    cached_tokens_details: _Places | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    sglext: _Extension | None = None
    error: Any = None


class _ModelCard(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_ModelCard]


_event_decoder: Final = msgspec.json.Decoder(_Event)


class ServerClient:
    """Connections to one server. Close it with `aclose`."""

    def __init__(self, url: str, silence_s: float) -> None:
        """`silence_s`: how long a server may say nothing, before the first token or after it. The API key is
        that of OPENAI_API_KEY. Raises HarnessError for what is no URL.
        """
        api_key = os.environ.get("OPENAI_API_KEY", "")
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=4.0)
        timeout = httpx.Timeout(silence_s, connect=CONNECT_TIMEOUT_S, pool=None)
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._http = httpx.AsyncClient(
                base_url=url, headers=headers, limits=limits, timeout=timeout, trust_env=False, verify=False
            )
        except httpx.InvalidURL as error:
            raise HarnessError(f"{url}: {error}; a server's URL is of the form http://HOST:PORT") from None

    async def aclose(self) -> None:
        await self._http.aclose()

    async def model(self) -> tuple[str, int | None]:
        """Name and context length of the first model served. Raises HarnessError."""
        try:
            answer = await self._http.get("/v1/models", timeout=30.0)
            answer.raise_for_status()
            card = msgspec.json.decode(answer.content, type=_Models).data[0]
        except (httpx.HTTPError, msgspec.MsgspecError, IndexError) as error:
            raise HarnessError(
                f"{self._http.base_url} does not list a model at /v1/models: {error}"
            ) from error
        return card.id, card.max_model_len

    async def request(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Response:
        """Send it and listen to the end of the answer."""
        content = msgspec.json.encode(body)
        response = Response(sent_s=time.monotonic())
        try:
            async with self._http.stream(
                "POST",
                PATH,
                content=content,
                headers={"content-type": "application/json", **headers},
            ) as answer:
                response.server_timing = answer.headers.get("server-timing", "")
                response.headers = answer.headers
                if answer.status_code != 200:
                    response.error = f"status {answer.status_code}"
                    response.detail = _shortened((await answer.aread()).decode(errors="replace"))
                else:
                    await _listen(answer, response)
        except httpx.ConnectError as error:
            response.error, response.detail = "no connection", str(error)
        except httpx.ConnectTimeout as error:
            response.error, response.detail = "no connection in time", str(error)
        except httpx.TimeoutException as error:
            silent = "no first token in time" if response.first_s is None else "stalled"
            response.error, response.detail = silent, type(error).__name__
        except httpx.HTTPError as error:
            cut = "no answer" if response.first_s is None else "cut off"
            response.error, response.detail = cut, _shortened(f"{type(error).__name__}: {error}")
        response.done_s = response.done_s or time.monotonic()
        return response


def asked(model: str, output_tokens: int) -> dict[str, Any]:
    """What bodies have beside the prompt: an answer of this length, streamed, that says what was cached."""
    return {
        "model": model,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_cached_tokens_details": True,
    }


async def _listen(answer: httpx.Response, response: Response) -> None:
    """Fill in what the stream says."""
    said: list[str] = []
    last_s, ended = 0.0, False
    events = _events(answer)
    async for data in events:
        if data == b"[DONE]":
            ended = True
            response.done_s = time.monotonic()
            await _read_out(events)
            break
        now_s = time.monotonic()
        try:
            event = _event_decoder.decode(data)
        except msgspec.MsgspecError as error:
            response.error, response.detail = "garbage in the stream", _shortened(str(error))
            break
        if event.error is not None:
            response.error, response.detail = "error in the stream", _shortened(_message(event.error))
            break
        if response.first_s is None:
            if any(map(_begins, event.choices)):
                response.first_s = last_s = now_s
        elif any(map(_carries, event.choices)):
            response.gaps_s.append(now_s - last_s)
            last_s = now_s
        for choice in event.choices:
            said.append(choice.text or "")
            response.token_ids += choice.token_ids or ()
            response.finish = choice.finish_reason or response.finish
        _note(event, response)
    response.text = "".join(said)
    if response.error:
        return
    if not ended:
        response.error = "cut off"
    elif response.finish == "abort":
        response.error = "aborted by the server"
    elif response.first_s is None:
        response.error = "an answer without text"
    response.output_tokens = response.output_tokens or len(response.token_ids) or 1 + len(response.gaps_s)


async def _read_out(events: AsyncIterator[bytes]) -> None:
    """To the end of an answer that is whole, so that the next request gets its connection."""
    with suppress(TimeoutError, httpx.HTTPError):  # costs the connection, and nothing else
        async with asyncio.timeout(END_TIMEOUT_S):
            async for _ in events:
                pass


async def _events(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The data of each event. Ours have one line of data each, as OpenAI's do."""
    buffer = b""
    async for piece in answer.aiter_bytes():
        buffer += piece
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
        if len(buffer) > MAX_EVENT_BYTES:
            yield b"an event without end"


def _begins(choice: _Choice) -> bool:
    """Whether it has the first of an answer: of one token, it may be the last event too, without a text."""
    return _carries(choice) or choice.finish_reason == "length"


def _carries(choice: _Choice) -> bool:
    """Whether it has any of the answer. An event has a token even where its text is empty: the beginning of a
    character.
    """
    return bool(choice.text or choice.token_ids) or (choice.text is not None and choice.finish_reason is None)


def _note(event: _Event, response: Response) -> None:
    cached = response.cached
    if event.usage is not None:
        response.prompt_tokens = event.usage.prompt_tokens
        response.output_tokens = event.usage.completion_tokens
        details = event.usage.prompt_tokens_details
        if details is not None:
            cached = msgspec.structs.replace(cached, total=details.cached_tokens)
    if event.sglext is not None and (places := event.sglext.cached_tokens_details) is not None:
        cached = Cached(cached.total, places.device, places.host, places.storage)
    response.cached = cached


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_DETAIL else line[: MAX_DETAIL - 1] + "…"
