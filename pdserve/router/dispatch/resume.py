"""What a stream has said so far, so that another worker can go on where a lost one stopped.

A worker that is asked (`x-pdserve-marks: 1`) ends the events of each of its steps by a mark, a comment of the
event stream that the router takes out again:

    : pd CHARACTERS FIRST TOKEN TOKEN ...

Whoever has everything up to here has so many characters of the answer's text; they come from the output
tokens of all marks, those of this one standing at FIRST and after. `: pd off` says that no mark will follow.
Events are passed on only up to the last mark, or when the stream is whole: so at any time the marks tell
exactly what the client has.

When the worker is lost, `POST /pd/continue` asks another for the rest, with the tokens so far before the
client's own body (pdserve/engine/http/resume.py). The rest comes under the id and time of the first part.

Only streams whose rest is determined by the tokens so far can be continued: see `may_continue`.
"""

from __future__ import annotations

import re
from array import array
from typing import Any, Literal

import msgspec

from pdserve.router.api.endpoints import Endpoint
from pdserve.router.api.request_body import UNREADABLE

Continue = Literal["deterministic", "always", "never"]

ASK = b"x-pdserve-marks: 1\r\n"
HEADER = b"x-pdserve-marks"
MARK = b": pd "
MAX_HELD_BYTES = 1024 * 1024
"""An event longer than this is passed on in pieces."""
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_OPENING_BYTES = 512
_ID = re.compile(rb'"id":"[^"]*"')
_CREATED = re.compile(rb'"created":\d+')

_GRAMMAR = ("regex", "ebnf", "json_schema", "structural_tag")
_UNLIKE = (
    *("tools", "functions", "logprobs", "top_logprobs", "return_logprob", "return_hidden_states"),
    *("stop", "stop_regex", "custom_logit_processor", "custom_params", "watermark", "session_params"),
    *("image_data", "video_data", "audio_data", "return_sampling_mask", "return_routed_experts"),
    *("min_tokens", "min_new_tokens", "beam_width", "thinking_budget", "suffix", "echo"),
)
"""Set to anything that counts, they make the rest depend on more than the tokens so far."""
_PENALTIES = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1}


class Trail:
    """The marks of one stream."""

    __slots__ = ("_characters", "_is_marked", "_opening", "_renamed", "_tokens")

    def __init__(self) -> None:
        self._characters = 0
        self._tokens = array("l")
        self._opening = b""
        self._is_marked = False
        self._renamed: tuple[bytes, bytes] | None = None

    @property
    def is_marked(self) -> bool:
        """The marks tell what the client has."""
        return self._is_marked

    def begin(self, is_marked: bool) -> None:
        """A worker begins to answer, the first or the next; whether it said that it marks."""
        self._is_marked = is_marked

    def take(self, data: bytes, at_end: bool) -> tuple[bytes, bytes]:
        """(events to pass on now, the beginning of what is not whole yet)."""
        begin, parts = 0, []
        while self._is_marked and (mark := _find_mark(data, begin)) is not None:
            at, end = mark
            parts.append(data[begin:at])
            self._note(data[at + len(MARK) : end])
            begin = end + 2
        rest = data[begin:] if begin else data
        if at_end or (self._is_marked and len(rest) > MAX_HELD_BYTES):
            self._is_marked = False
            ready, held = rest, b""
        elif self._is_marked:
            ready, held = b"", rest
        else:
            ready, held = split_events(rest)
        if parts:
            ready = b"".join((*parts, ready))
        if self._renamed is not None:
            ready = self._rename(ready, *self._renamed)
        elif not self._opening:
            self._opening = ready[:_OPENING_BYTES]
        return ready, held

    def continue_body(self, body: bytes) -> bytes:
        """The body of `/pd/continue` for the client's `body`; what comes then is renamed."""
        found = _ID.search(self._opening), _CREATED.search(self._opening)
        self._renamed = (found[0][0] if found[0] else b"", found[1][0] if found[1] else b"")
        so_far = {"characters": self._characters, "token_ids": self._tokens.tolist()}
        return msgspec.json.encode(so_far) + b"\n" + body

    def _note(self, mark: bytes) -> None:
        try:
            characters, first, *tokens = map(int, mark.split())
        except (ValueError, OverflowError):  # "off", or no number of ours
            self._is_marked = False
            return
        self._characters = characters
        del self._tokens[first:]
        self._tokens.extend(tokens)

    def _rename(self, events: bytes, id_: bytes, created: bytes) -> bytes:
        if id_:
            events = _ID.sub(lambda _: id_, events)
        return _CREATED.sub(lambda _: created, events) if created else events


def _find_mark(data: bytes, begin: int) -> tuple[int, int] | None:
    """[start, end) of the next whole mark, the blank line behind it not counted. Events are lines of JSON, so
    at the start of a line nothing else looks like one.
    """
    at = begin if data.startswith(MARK, begin) else data.find(b"\n" + MARK, begin) + 1
    if at == 0 and not data.startswith(MARK):
        return None
    end = data.find(b"\n\n", at)
    return None if at < begin or end < 0 else (at, end)


def may_continue(endpoint: Endpoint, body: bytes, which: Continue, *, seeds_count: bool) -> bool:
    """Whether another worker, given the tokens so far, goes on as the first one would have done.
    `seeds_count`: what both of them sample depends on the request's seed.

    `deterministic`: sampling is greedy, or seeded where that counts. `always` continues sampled streams too:
    the rest is then another draw from the same distribution. Never under a grammar, with tools, several
    choices, penalties, stop strings or log-probabilities, which look back at more than the tokens.
    """
    if which == "never" or not endpoint.is_resumable:
        return False
    try:
        asked: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
    except UNREADABLE:
        return False
    sampling = asked.get(endpoint.sampling_field) if endpoint.sampling_field else asked
    if not isinstance(sampling, dict) or isinstance(asked.get("text"), list):
        return False
    formatted = asked.get("response_format") or {}
    is_free = not any(sampling.get(name) for name in _GRAMMAR) and (
        isinstance(formatted, dict) and formatted.get("type", "text") == "text"
    )
    is_plain = not any(asked.get(name) or sampling.get(name) for name in _UNLIKE)
    logprobs = asked.get("logprobs")
    if logprobs is not None and logprobs is not False:
        is_plain = False  # 0, in a completion, asks for the chosen token's alone
    is_one = sampling.get("n") in (None, 1) and asked.get("best_of") in (None, 1)
    unpenalized = all(sampling.get(name) in (None, off) for name, off in _PENALTIES.items())
    if not (is_free and is_plain and is_one and unpenalized):
        return False
    if which == "always" or sampling.get("temperature") == 0 or sampling.get("top_k") == 1:
        return True
    return seeds_count and sampling.get("seed", sampling.get("sampling_seed")) is not None


def split_events(data: bytes) -> tuple[bytes, bytes]:
    """(whole events, the beginning of the next one)."""
    if data.endswith(_EVENT_ENDS):
        return data, b""
    end = max(data.rfind(mark) + len(mark) if mark in data else 0 for mark in _EVENT_ENDS)
    if end == 0 and len(data) > MAX_HELD_BYTES:
        return data, b""
    return data[:end], data[end:]
