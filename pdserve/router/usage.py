"""How many tokens a request used, read off the answer that passes by.

An answer that says its usage is believed: OpenAI's `usage` and SGLang's `meta_info` both have `prompt_tokens`
and `completion_tokens`, in a stream in its last events. A stream that does not (the client did not ask for
`include_usage`, or it left) is counted by its events, one of which is a token, or a few where the worker's
stream interval is larger. The names in quotes are searched in the bytes; within a JSON string the quotes
would be escaped, so no answer's text can pretend.
"""

from __future__ import annotations

import re

_EVENT = b"data: "
_MARK = b'"completion_tokens":'
_PROMPT = re.compile(rb'"prompt_tokens": ?(\d{1,15})')
_OUTPUT = re.compile(rb'"completion_tokens": ?(\d{1,15})')


class Meter:
    """The usage of one request."""

    __slots__ = ("_said", "charged_tokens", "events", "prompt_tokens")

    def __init__(self, charged_tokens: int) -> None:
        self.charged_tokens = charged_tokens
        """Taken from the tenant's bucket when the request was let in."""
        self.prompt_tokens = charged_tokens
        """What the prompt has as far as is known."""
        self.events = 0
        self._said = b""

    def count(self, data: bytes) -> None:
        """A piece of the answer, whole events of a stream."""
        self.events += data.count(_EVENT)
        if _MARK in data:
            self._said = data

    def total(self, streamed: bool) -> tuple[int, int]:
        """(prompt tokens, output tokens). A stream's numbers grow, so the last of them count; an answer in
        one piece has one, or one for each prompt.
        """
        if not self._said:
            return self.prompt_tokens, self.events if streamed else 0
        prompt = [int(number) for number in _PROMPT.findall(self._said)]
        output = [int(number) for number in _OUTPUT.findall(self._said)]
        if not streamed:
            return (sum(prompt) or self.prompt_tokens), sum(output)
        return (prompt or [self.prompt_tokens])[-1], (output or [self.events])[-1]
