"""What an answer says of tokens, read off its bytes as they pass by.

An answer that says its usage is believed: OpenAI's `usage` and SGLang's `meta_info` both have `prompt_tokens`
and `completion_tokens`. A stream says it in its last event (OpenAI's, where the client asked with
`include_usage`) or in every event, growing (`/generate`, for each of its choices). A stream that does not, or
whose client left, is counted by its events, one of which is a token, or a few where the worker's stream
interval is larger; its prompt's tokens are what a worker's report or header says (`prompt_tokens`), else the
estimate. The names in quotes are searched in the bytes; within a JSON string the quotes would be
escaped, so no answer's text can pretend.
"""

from __future__ import annotations

import re

_EVENT = b"\ndata: "
"""An event, at the start of a line: an answer's text has no line of its own, but may well have `data: `."""
_MARK = b'"completion_tokens":'
_ENDED = b'"finish_reason":{'
"""`/generate` alone has an object there, in the last event of each choice."""
_TOKENS = re.compile(rb'"(?:(prompt)|completion)_tokens":\s*(\d{1,15})\b')
_LAST_OUTPUT = re.compile(rb'"finish_reason":\{[^\n]*?"completion_tokens":\s*(\d{1,15})\b')


class Meter:
    """The usage of one request."""

    __slots__ = ("_ended", "_said", "_tail", "charged_tokens", "events", "prompt_tokens")

    def __init__(self, charged_tokens: int) -> None:
        self.charged_tokens = charged_tokens
        """Taken from the tenant's bucket when the request was let in."""
        self.prompt_tokens: int | None = None
        """What the prompt has, as a worker says that has computed it."""
        self.events = 0
        self._tail = b"\n"
        self._said = b""
        self._ended: list[bytes] = []

    def count(self, data: bytes) -> None:
        """A piece of the answer."""
        text = self._tail + data
        self.events += text.count(_EVENT)
        self._tail = text[1 - len(_EVENT) :]
        if _MARK in data:
            self._said = data
            if _ENDED in data:
                self._ended.append(data)

    def total(self, streamed: bool) -> tuple[int, int]:
        """(prompt tokens, output tokens). An answer in one piece has these numbers once, or once for each
        prompt; of a stream's, which grow, the last of each choice counts.
        """
        known = self.charged_tokens if self.prompt_tokens is None else self.prompt_tokens
        if not self._said:
            return known, self.events if streamed else 0
        prompt: list[int] = []
        output: list[int] = []
        for is_prompt, number in _TOKENS.findall(self._said):
            (prompt if is_prompt else output).append(int(number))
        if not streamed:
            return (sum(prompt) or known), sum(output)
        ended = [int(number) for data in self._ended for number in _LAST_OUTPUT.findall(data)]
        return (prompt or [known])[-1], sum(ended) or (output or [self.events])[-1]
