"""What an answer says of tokens, read off its bytes as they pass by.

An answer that says its usage is believed: OpenAI's `usage` and SGLang's `meta_info` both have `prompt_tokens`
and `completion_tokens`. A stream says it in its last event (OpenAI's, where the client asked with
`include_usage`), or in every event, growing, each choice its own (`/generate`, and OpenAI's with
`continuous_usage_stats`): what has several choices is read event by event, all else once, in the end. A
stream that does not is charged what its worker says at the end beside the events (`used`).
What did not come to its end is counted by the worker's marks (stream_marks.py), which
list its tokens. A prompt counts once, however many answers it gets: SGLang's own answers say it each time.
Without marks it is counted by its events: one of them is a token, or a few where the
worker's stream interval is larger. Its prompt's tokens are what a worker's report or header says
(`prompt_tokens`), else the estimate. The names in quotes are searched in the bytes; within a JSON string the
quotes would be escaped, so no answer's text can pretend.
"""

from __future__ import annotations

import re
from typing import Final

from pdserve.router.api.endpoints import ENDPOINTS, OPENAI_USAGE, Usage
from pdserve.router.native.scan import number_after
from pdserve.router.native.slots import copied
from pdserve.router.request.stream_marks import StreamMarks

_EVENT = b"\ndata: "
"""An event, at the start of a line: an answer's text has no line of its own, but may well have `data: `."""
_DONE = b"]\n\n"
"""Ends a whole stream, `data: [DONE]`; other events end with an object."""
_INDEX_MARK = b'"index":'
_INDEX = re.compile(rb'"index":\s*(\d{1,15})\b')
"""The choice that an event is of: OpenAI's say it first, SGLang's own say no other, and only where there are
several.
"""
MAX_DIGITS = 15
"""A longer number is none of tokens, and int() raises for thousands of digits."""
_NO_CHOICE = re.compile(rb'"choices":\s*\[\]')
"""OpenAI's last event with usage: that of all choices."""


class Meter:
    """The usage of one request."""

    __slots__ = (
        "_choices", "_is_done", "_is_one", "_outputs", "_pieces", "_prompt_count", "_prompts", "_said",
        "_usage", "charged_tokens", "events", "mark", "marks", "prompt_tokens",
    )  # fmt: skip

    _usage: Usage
    _choices: int
    _prompt_count: int
    mark: bytes
    """In each piece that says the output's tokens."""
    charged_tokens: int
    """Taken from the tenant's bucket when the request was let in."""
    prompt_tokens: int | None
    """What the prompt has, as a worker says that has computed it; several prompts together."""
    events: int
    marks: StreamMarks | None
    """Of the stream: they list its tokens, and say at the end what it has used."""
    _is_done: bool
    _is_one: bool
    """The usage stands once in what has come, near its end: of one prompt with one answer."""
    _said: bytes
    _pieces: tuple[int, int, int]
    """Prompt and output tokens in the earlier pieces of a long answer, and the prompt counts there."""
    _prompts: dict[bytes, int] | None
    _outputs: dict[bytes, int] | None
    """Of a stream, by choice, as last said. None: nothing was said."""

    def __new__(
        cls, charged_tokens: int, usage: Usage = OPENAI_USAGE, choices: int = 1, prompts: int = 1
    ) -> Meter:
        """`choices`: answers to each of the `prompts`."""
        made = copied(_BLANK)
        made._usage = usage
        made.mark = usage.mark
        made._prompt_count = prompts
        made._choices = choices
        made._is_one = choices == prompts == 1 and bool(usage.prompt_mark)
        made.charged_tokens = charged_tokens
        return made

    def count(self, data: bytes, begins_line: bool = True) -> None:
        """Whole events of a stream. `begins_line`: what came before ended a line. Pieces need not be counted
        whose tokens marks list.
        """
        self.events += data.count(_EVENT) + (begins_line and data[:6] == _EVENT[1:])
        self._is_done = data[-3:] == _DONE
        if self.mark in data:
            self._said = data
            if self.events and _INDEX_MARK in data:  # else the next piece says all that this one does
                self._read(data)

    def count_whole(self, data: bytes) -> None:
        """A piece of an answer that is no stream."""
        if self.mark in data:
            if self._said:
                self._note_piece()
            self._said = data

    def total(self, streamed: bool) -> tuple[int, int]:
        """(prompt tokens, output tokens). An answer in one piece has these numbers once, or once for each
        prompt; of a stream's, which grow, the last of each choice counts.
        """
        marks = self.marks
        if marks is not None and marks.used is not None:
            return marks.used
        if not streamed:
            known = self.charged_tokens if self.prompt_tokens is None else self.prompt_tokens
            usage, data = self._usage, self._said
            if self._is_one:
                return number_after(data, usage.prompt_mark) or known, number_after(data, usage.mark)
            prompt, output, _ = self._sums()
            if usage.is_list and data and not (data[:1] == b"{" and data[-1:] == b"}"):
                prompt = max(prompt, known)
            return prompt or known, output
        self._read(self._said)
        self._said = b""  # who asks again gets the same without reading it again
        if self._outputs:
            output = sum(self._outputs.values())
        else:
            output = self.events if marks is None else marks.token_count or self.events + marks.lost_tokens
        if self.prompt_tokens is not None:
            return self.prompt_tokens, output
        prompts = self._prompts or {}
        said = {int(choice or 0) // self._choices: tokens for choice, tokens in prompts.items()}
        prompt = sum(said.values())
        has_all = len(said) >= self._prompt_count or self._is_done
        if not prompt or not has_all:  # some prompts have not had an event yet
            prompt = max(prompt, self.charged_tokens)
        return prompt, output

    def _note_piece(self) -> None:
        """Another piece of a long answer follows that is no stream."""
        self._pieces, self._is_one = self._sums(), False

    def _sums(self) -> tuple[int, int, int]:
        prompt, output, count = self._pieces
        usage = self._usage
        for said in usage.prompt.findall(self._said):
            if count % self._choices == 0:  # the answers to a prompt stand together
                prompt += _sum_of_list(said) if usage.is_list else int(said)
            count += 1
        for said in usage.output.findall(self._said):
            output += int(said)
        return prompt, output, count

    def _read(self, events: bytes) -> None:
        if not events:
            return
        prompts = self._prompts = self._prompts or {}
        outputs = self._outputs = self._outputs or {}
        for event in events.split(b"\n"):
            if self.mark not in event:
                continue
            choice = _INDEX.search(event)
            if _NO_CHOICE.search(event):
                prompts.clear()
                outputs.clear()
            for name, said in ((self._usage.prompt, prompts), (self._usage.output, outputs)):
                if number := name.search(event):
                    said[choice[1] if choice else b""] = int(number[1])


_BLANK: Final = object.__new__(Meter)
_BLANK.prompt_tokens = _BLANK.marks = _BLANK._prompts = _BLANK._outputs = None
_BLANK.events = 0
_BLANK._is_done = False
_BLANK._said = b""
_BLANK._pieces = 0, 0, 0
ONE_ANSWER: Final = {path: Meter(0, row.usage) for path, row in ENDPOINTS.items()}
"""To be copied, for one answer to one prompt, by the endpoint's path."""


def _sum_of_list(said: bytes) -> int:
    """Of numbers with commas between them; what is no number of tokens does not count."""
    numbers = map(bytes.strip, said.split(b","))
    return sum(int(number) for number in numbers if number.isdigit() and len(number) <= MAX_DIGITS)
