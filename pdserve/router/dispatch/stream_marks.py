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
"""

from __future__ import annotations

import re
from array import array

import msgspec

MARKS_REQUEST = b"x-pdserve-marks: 1\r\n"
MARKS_HEADER = b"x-pdserve-marks"
MARK = b": pd "
MAX_HELD_BYTES = 1024 * 1024
"""A longer event is passed on in pieces."""
USAGE = b": pd-usage "
_USAGE = re.compile(rb"^: pd-usage (\d{1,15}) (\d{1,15})\n\n", re.MULTILINE)
"""No event has these bytes: its JSON has no line's end."""
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_OPENING_BYTES = 512
_ID = re.compile(rb'"id":"[^"]*"')
_CREATED = re.compile(rb'"created":\d+')


class StreamMarks:
    """The marks of one stream, and the bytes that cannot be passed on yet."""

    __slots__ = (
        "_characters",
        "_held",
        "_is_marked",
        "_opening",
        "_renamed",
        "_tells_usage",
        "_tokens",
        "used",
    )

    def __init__(self) -> None:
        self._characters = 0
        self._tokens = array("l")
        self._held = b""
        self._opening = b""
        self._is_marked = False
        self._tells_usage = False
        self.used: tuple[int, int] | None = None
        """Prompt and output tokens, as the worker says at the end."""
        self._renamed: tuple[bytes, bytes] | None = None
        """Id and creation time of the first part; None until another worker continues."""

    @property
    def is_marked(self) -> bool:
        """The marks tell what the client has."""
        return self._is_marked

    @property
    def token_count(self) -> int:
        """Output tokens that the marks have listed so far; 0 after marks that did not go to the end."""
        return len(self._tokens)

    def begin(self, is_marked: bool) -> None:
        """A worker begins or continues the stream. `is_marked`: its answer says that it sends marks."""
        self._is_marked = self._tells_usage = is_marked
        self._held = b""

    def take(self, data: bytes, at_end: bool) -> bytes:
        """Take the stream's next bytes. Returns the events to pass on now; the rest is held."""
        if self._held:
            data = self._held + data
        begin, parts = 0, []
        while self._is_marked and begin < len(data) and (mark := _find_mark(data, begin)) is not None:
            at, end = mark
            parts.append(data[begin:at])
            self._note(data[at + len(MARK) : end])
            begin = end + 2
        rest = data[begin:] if begin else data
        if at_end or (self._is_marked and len(rest) > MAX_HELD_BYTES):
            self._is_marked = False
            ready, self._held = rest, b""
        elif self._is_marked:
            ready, self._held = b"", rest
        elif rest.endswith(_EVENT_ENDS):
            ready, self._held = rest, b""
        else:
            ready, self._held = split_events(rest)
        if parts:
            ready = b"".join((*parts, ready))
        if self._tells_usage and USAGE in ready and (said := _USAGE.search(ready)):
            self.used = int(said[1]), int(said[2])
            ready = ready[: said.start()] + ready[said.end() :]
        if self._renamed is not None:
            ready = self._rename(ready, *self._renamed)
        elif not self._opening:
            self._opening = ready[:_OPENING_BYTES]
        return ready

    def continue_body(self, body: bytes) -> bytes:
        """The body of `/pd/continue` for the client's `body`. Later events are renamed."""
        found = _ID.search(self._opening), _CREATED.search(self._opening)
        self._renamed = (found[0][0] if found[0] else b"", found[1][0] if found[1] else b"")
        so_far = {"characters": self._characters, "token_ids": self._tokens.tolist()}
        return msgspec.json.encode(so_far) + b"\n" + body

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
        self._is_marked = False
        self._tokens = array("l")

    def _rename(self, events: bytes, id_: bytes, created: bytes) -> bytes:
        if id_:
            events = _ID.sub(lambda _: id_, events)
        return _CREATED.sub(lambda _: created, events) if created else events


def _find_mark(data: bytes, begin: int) -> tuple[int, int] | None:
    """[start, end) of the next whole mark, without the blank line behind it. Events are lines of JSON, so at
    the start of a line only a mark looks like one.
    """
    at = begin if data.startswith(MARK, begin) else data.find(b"\n" + MARK, begin) + 1
    if at == 0 and not data.startswith(MARK):
        return None
    end = data.find(b"\n\n", at)
    return None if at < begin or end < 0 else (at, end)


def split_events(data: bytes) -> tuple[bytes, bytes]:
    """(whole events, the beginning of the next one)."""
    end = max(data.rfind(mark) + len(mark) if mark in data else 0 for mark in _EVENT_ENDS)
    if end == 0 and len(data) > MAX_HELD_BYTES:
        return data, b""
    return data[:end], data[end:]
