"""What a stream has said so far, so that another worker can continue it.

The router asks a worker for marks (`x-pdserve-marks: 1`). The worker then ends the events of each of its
steps with a mark. A mark is a comment of the event stream, and the router takes it out again:

    : pd CHARACTERS FIRST TOKEN TOKEN ...

A client that has everything up to a mark has CHARACTERS characters of the answer's text. They come from the
output tokens of all marks; the tokens of this mark stand at FIRST and after. `: pd off` says that no mark
follows. Events are passed on only up to the last mark, or when the stream is whole. So at any time the marks
tell exactly what the client has. Near its end the stream says what it used, `: pd-usage PROMPT OUTPUT`, also
where it has no marks. The router takes that out too, and charges it.

When the worker is lost, `POST /pd/continue` asks another worker for the rest, with the tokens so far before
the client's own body (pdserve/engine/http/resume.py). The rest comes under the id and time of the first part.

Whether another worker can continue a lost stream: where the tokens so far determine the rest. Pure.
"""

from __future__ import annotations

import re
from array import array
from typing import Any, Final, Literal

import msgspec

from pdserve.router.api.endpoints import Endpoint
from pdserve.router.api.request_body import UNREADABLE
from pdserve.router.native.slots import copied

MARKS_REQUEST = b"x-pdserve-marks: 1\r\n"
MARKS_HEADER = b"x-pdserve-marks"
MARK = b": pd "
_BLOCK_BYTES = 1024
MAX_HELD_BYTES = 1024 * 1024
"""A longer event is passed on in pieces."""
USAGE = b": pd-usage "
_USAGE = re.compile(rb"^: pd-usage (\d{1,15}) (\d{1,15})\n\n", re.MULTILINE)
"""No event has these bytes: its JSON has no line's end."""
_MARKS = re.compile(rb"^: pd ([^\n]*+(?:\n(?!\n)[^\n]*+)*+\n\n)", re.MULTILINE)
"""A whole mark and the blank line behind it. Events are lines of JSON: no other line begins like one."""
_usual = re.compile(rb"((?:(?:event: [^\n]*+\n)?data: [^\n]*+\n\n)++): pd (\d[^\n]*+\n\n)").fullmatch
_usual_end = re.compile(
    rb"((?:(?:event: [^\n]*+\n)?data: [^\n]*+\n\n)*+)(?:: pd (\d[^\n]*+\n\n))?"
    rb": pd-usage (\d{1,15}) (\d{1,15})\n\n((?:(?:event: [^\n]*+\n)?data: [^\n]*+\n\n)*+)"
).fullmatch
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_OPENING_BYTES = 512
_ID = re.compile(rb'"id":"[^"]*"')
_CREATED = re.compile(rb'"created":\d+')


class StreamMarks:
    """The marks of one stream, and the bytes that cannot be passed on yet."""

    __slots__ = (
        "_blocks", "_characters", "_has_ended", "_held", "_lost", "_opening", "_renamed",
        "_tells_usage", "_tokens", "_unread", "is_marked", "used",
    )  # fmt: skip

    _characters: int
    _tokens: array[int]
    _unread: bytes
    _blocks: list[bytes]
    """Marks that were taken out and not looked at, in lots, and `_unread` behind them: they are read when
    somebody asks for the tokens, which is seldom.
    """
    _held: bytes
    _opening: bytes
    is_marked: bool
    """Events are held until a mark has come."""
    _has_ended: bool
    """No further mark counts."""
    _lost: int
    """Tokens of marks that did not go to the end."""
    used: tuple[int, int] | None
    """Prompt and output tokens, as the worker says at the end."""
    _renamed: tuple[bytes, bytes] | None
    """Id and creation time of the first part; None until another worker continues."""

    def __new__(cls, is_marked: bool = False) -> StreamMarks:
        """`is_marked`: as of `begin`."""
        made = copied(_BLANK)
        made._tokens, made._blocks = array("l"), []
        made.is_marked = made._tells_usage = is_marked
        made._has_ended = not is_marked
        return made

    @property
    def tells_all(self) -> bool:
        """The marks tell what the client has."""
        self._read()
        return not self._has_ended

    @property
    def token_count(self) -> int:
        """Output tokens that the marks have listed, if they went to the end."""
        self._read()
        return len(self._tokens)

    @property
    def lost_tokens(self) -> int:
        """Output tokens that marks have listed that did not go to the end."""
        return self._lost

    def begin(self, is_marked: bool) -> None:
        """A worker begins or continues the stream. `is_marked`: its answer says that it sends marks."""
        self._read()
        self.is_marked = self._tells_usage = is_marked
        self._has_ended = not is_marked
        self._held = b""

    def take(self, data: bytes) -> bytes:
        """Take the stream's next bytes. Returns the events to pass on now; the rest is held."""
        if self.is_marked and not (self._held or self._renamed):
            usual = _usual(data)
            if usual is not None:  # whole events and one mark behind them: nearly always
                events = usual[1]
                self._unread += usual[2]
                if self._unread[_BLOCK_BYTES:]:
                    self._blocks.append(self._unread)
                    self._unread = b""
                if not self._opening:
                    self._opening = events[:_OPENING_BYTES]
                return events
        return self.take_any(data, at_end=False)

    def take_last(self, data: bytes) -> bytes:
        """As `take`, of the stream's last bytes: nothing is held."""
        if self.is_marked and not (self._held or self._renamed):
            usual = _usual_end(data)
            if usual is not None:
                events, mark, prompt, output, rest = usual.groups(b"")
                self._unread += mark
                self._opening = self._opening or events[:_OPENING_BYTES]
                self.is_marked, self.used = False, (int(prompt), int(output))
                return events + rest
        return self.take_any(data, at_end=True)

    def take_any(self, data: bytes, *, at_end: bool) -> bytes:
        """As `take`, or `take_last`, for any number of marks anywhere."""
        if self._held:
            data = self._held + data
            self._held = b""
        if at_end:
            if self.is_marked and MARK in data:
                pieces = _MARKS.split(data)
                self._unread += b"".join(pieces[1::2])
                data = b"".join(pieces[::2])
            self.is_marked, ready = False, data
        else:
            ready = self._without_marks(data)
        if self._tells_usage and USAGE in ready and (said := _USAGE.search(ready)):
            self.used = int(said[1]), int(said[2])
            begin, end = said.span()
            ready = ready[:begin] + ready[end:]
        if self._renamed is not None:
            ready = self._rename(ready, *self._renamed)
        elif not self._opening:
            self._opening = ready[:_OPENING_BYTES]
        return ready

    def _without_marks(self, data: bytes) -> bytes:
        """The events to pass on; the rest is held."""
        begin, parts = 0, []
        while self.is_marked and (mark := _MARKS.search(data, begin)) is not None:
            parts.append(data[begin : mark.start()])
            self._unread += mark[1]
            self._read()  # what is no mark of this version ends them
            begin = mark.end()
        rest = data[begin:] if begin else data
        if self.is_marked and len(rest) > MAX_HELD_BYTES:
            self._read()
            self._has_ended = True
            self.is_marked = False
        elif self.is_marked:
            rest, self._held = b"", rest
        elif not rest.endswith(_EVENT_ENDS):
            rest, self._held = split_events(rest)
        return b"".join((*parts, rest)) if parts else rest

    def continue_body(self, body: bytes) -> bytes:
        """The body of `/pd/continue` for the client's `body`. Later events are renamed."""
        self._read()
        found = _ID.search(self._opening), _CREATED.search(self._opening)
        self._renamed = (found[0][0] if found[0] else b"", found[1][0] if found[1] else b"")
        so_far = {"characters": self._characters, "token_ids": self._tokens.tolist()}
        return msgspec.json.encode(so_far) + b"\n" + body

    def _read(self) -> None:
        if self._unread or self._blocks:
            marks = b"".join((*self._blocks, self._unread))[:-2].split(b"\n\n")
            self._unread = b""
            self._blocks.clear()
            for mark in marks:
                if not self._has_ended:
                    self._note(mark)

    def _note(self, mark: bytes) -> None:
        try:
            characters, first, *tokens = map(int, mark.split())
            added = array("l", tokens)
        except (ValueError, OverflowError):  # "off", or no mark of this version
            self._forget_tokens()
            return
        if characters < 0 or not 0 <= first <= len(self._tokens) or min(tokens, default=0) < 0:
            self._forget_tokens()  # tokens are missing, or are none
            return
        self._characters = characters
        del self._tokens[first:]
        self._tokens.extend(added)

    def _forget_tokens(self) -> None:
        self.is_marked, self._has_ended = False, True
        self._lost += len(self._tokens)
        self._tokens = array("l")

    def _rename(self, events: bytes, id_: bytes, created: bytes) -> bytes:
        if id_:
            events = _ID.sub(lambda _: id_, events)
        return _CREATED.sub(lambda _: created, events) if created else events


_BLANK: Final = object.__new__(StreamMarks)
_BLANK._characters = _BLANK._lost = 0
_BLANK._unread = _BLANK._held = _BLANK._opening = b""
_BLANK.used = _BLANK._renamed = None


def split_events(data: bytes) -> tuple[bytes, bytes]:
    """(whole events, the beginning of the next one)."""
    end = max(data.rfind(mark) + len(mark) if mark in data else 0 for mark in _EVENT_ENDS)
    if end == 0 and len(data) > MAX_HELD_BYTES:
        return data, b""
    return data[:end], data[end:]


Continue = Literal["deterministic", "always", "never"]

_LOOKS_BACK: Final = (
    *("regex", "ebnf", "json_schema", "structural_tag", "tools", "functions"),
    *("top_logprobs", "return_logprob", "return_hidden_states"),
    *(
        "stop",
        "stop_sequences",
        "stop_regex",
        "custom_logit_processor",
        "custom_params",
        "watermark",
        "session_params",
    ),
    *("image_data", "video_data", "audio_data", "return_sampling_mask", "return_routed_experts"),
    *("min_tokens", "min_new_tokens", "beam_width", "thinking_budget", "suffix", "echo"),
    "output_config",
)
"""Parameters that make the rest depend on more than the tokens so far, unless they are empty."""
_NEUTRAL: Final = {
    "n": 1,
    "best_of": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
}
"""Parameters of the same kind that are harmless at this value."""


def may_resume(endpoint: Endpoint, body: bytes, which: Continue, *, seeds_count: bool) -> bool:
    """Whether another worker, given the tokens so far, continues as the first one would have done.
    `seeds_count`: the request's seed determines what both of them sample.

    `deterministic`: sampling is greedy, or seeded where seeds count. `always`: sampled streams too; the rest
    is then another draw from the same distribution.
    """
    if which == "never" or not endpoint.is_resumable:
        return False
    try:
        asked: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
    except UNREADABLE:
        return False
    sampling = asked.get(endpoint.sampling_field) if endpoint.sampling_field else asked
    if not isinstance(sampling, dict) or _looks_back(asked) or _looks_back(sampling):
        return False
    if which == "always" or sampling.get("temperature") == 0 or sampling.get("top_k") == 1:
        return True
    return seeds_count and sampling.get("seed", sampling.get("sampling_seed")) is not None


def _looks_back(asked: dict[str, Any]) -> bool:
    """Some parameter makes the rest depend on more than the tokens so far."""
    formatted, logprobs = asked.get("response_format") or {}, asked.get("logprobs")
    is_text = isinstance(formatted, dict) and formatted.get("type", "text") == "text"
    is_batch = isinstance(asked.get("text"), list)
    return (
        not is_text
        or is_batch
        or any(asked.get(name) for name in _LOOKS_BACK)
        or any(asked.get(name) not in (None, value) for name, value in _NEUTRAL.items())
        or (logprobs is not None and logprobs is not False)  # 0 asks for the chosen token's
    )
