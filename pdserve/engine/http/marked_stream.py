"""A streamed answer with marks, so that another worker can take it over.

A caller that sends `x-pdserve-marks: 1` finds a comment after the events of each step of a streamed answer:
`: pd CHARACTERS FIRST TOKEN TOKEN ...`. CHARACTERS is the length of the text up to here. The tokens are the
output tokens from number FIRST on. Events and their mark leave in one piece. The last events (those of the
finished step, the finish reason, the usage, `[DONE]`) leave in one piece too, without a mark. `: pd off` says
that no marks follow: an answer of several choices cannot be taken over.

With or without marks, `: pd-usage PROMPT OUTPUT` is among the last events of a stream that ended by itself:
the tokens of all prompts, each once, and of all answers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import msgspec

from pdserve.engine.http.connection import BrokenOff, Send, answer
from pdserve.errors import RequestError

MARKS_HEADER = b"x-pdserve-marks"


class SoFar(msgspec.Struct, frozen=True):
    """What the client has of an answer."""

    characters: int
    token_ids: list[int]


class MarkedStream:
    """The events since the last mark, on their way to the caller."""

    def __init__(self, send: Send, so_far: SoFar | None) -> None:
        """`so_far`: what the client has already, where this stream continues another."""
        self.so_far = so_far
        self.is_marked = True
        self._send = send
        self._events: list[bytes] = []
        self._is_begun = False
        self._is_dropping = False
        self._refusal: RequestError | None = None

    def refuse(self, error: RequestError) -> None:
        """Answer with this error instead of a stream. Called before anything was sent."""
        self._refusal = error

    @contextlib.contextmanager
    def dropping(self) -> Iterator[None]:
        """Events that are made in the block are not sent: the client has them."""
        self._is_dropping = True
        try:
            yield
        finally:
            self._is_dropping = False

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """For the app, in place of the server's `send`. Raises BrokenOff where the stream was refused:
        SGLang's `/generate` would report it in a stream that ends well.
        """
        if self._refusal is not None:
            await answer(self._send, self._refusal)
            raise BrokenOff(str(self._refusal))
        if message["type"] == "http.response.start":
            self._is_begun = True
            message = {**message, "headers": [*message.get("headers", ()), (MARKS_HEADER, b"1")]}
        elif message["type"] == "http.response.body" and self.is_marked:
            if not self._is_dropping:
                self._events.append(message.get("body", b""))
            if message.get("more_body", False):
                return
            message = {**message, "body": self._taken()}
        elif message["type"] == "http.response.body" and self._events:
            message = {**message, "body": self._taken() + message.get("body", b"")}
        await self._send(message)

    async def mark(self, characters: int, first: int, token_ids: Sequence[int]) -> None:
        """Send the events since the last mark, and a mark."""
        ids = " ".join(map(str, token_ids))
        self._events.append(f": pd {characters} {first} {ids}\n\n".encode())
        await self._send({"type": "http.response.body", "body": self._taken(), "more_body": True})

    async def end_marks(self) -> None:
        """From here on events are sent as they come."""
        if self.is_marked:
            self.is_marked = False
            self._events.append(b": pd off\n\n")
            if not self._is_begun:  # SGLang makes the first event before it begins to answer
                return
            await self._send({"type": "http.response.body", "body": self._taken(), "more_body": True})

    def tell_usage(self, prompt_tokens: int, output_tokens: int) -> None:
        """Say what the whole answer used, with the next events."""
        self._events.append(f": pd-usage {prompt_tokens} {output_tokens}\n\n".encode())

    def _taken(self) -> bytes:
        taken = b"".join(self._events)
        self._events.clear()
        return taken
