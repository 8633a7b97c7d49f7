"""What the messages of a conversation say, however their client writes them: a chain of hashes. Pure.

    messages     system   u1      a1      u2      a2      u3
    turn 1       (left out)  h1
    turn 2                   h1      h2      h3
    turn 3                   h1      h2      h3      h4      h5         h(n) = hash(h(n-1), message n)

A turn mostly repeats the bytes of the one before and adds a few messages. So a chain has marks: hashes of the
list's bytes up to the ends of its last messages. Given the chain of the last turn, only what stands behind
its last mark that still holds is read.

Agents write the same message in other ways from turn to turn. So these are equal: members in any order; a
text, and a list with one part of it; a message with a mark for caches (`cache_control`), and one without;
arguments of a tool call with other spaces and with members in another order. A hash decides which
conversation a request continues, and which message changed. It names no page and no token.

What would take many objects to read is hashed as it stands.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import xxhash

from pdserve.router.api.request_body import MAX_MEMBERS, UNREADABLE, is_crowded

MAX_HEAD: Final = 8
"""Messages of the system at the start; those behind them are of the conversation."""
MAX_MARKS: Final = 20_000
"""Commas and brackets of a message that is read as objects: about 1 ms, and 2 MB."""
SHARED_ROLES: Final = ("system", "developer")
_TEXTS: Final = ("text", "input_text", "output_text")


MAX_REPEATED: Final = 8
"""Marks of a chain."""
LINK_BYTES: Final = 16
MAX_CHAINS: Final = 1024
BEGIN_BYTES: Final = 512
"""Of a conversation, by which its last turn is found."""
_SPACE: Final = b" \t\r\n"


class _Plain(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """A message of text, as most are."""

    role: str
    content: str
    type: str = "message"


class _Role(msgspec.Struct, gc=False):
    role: str = ""


_plain_decoder: Final = msgspec.json.Decoder(_Plain)
_list_decoder: Final = msgspec.json.Decoder(list[msgspec.Raw])
_role_decoder: Final = msgspec.json.Decoder(_Role)
_sorted_encoder: Final = msgspec.json.Encoder(order="sorted")


class Mark(NamedTuple):
    """The end of a message, where another turn may begin to differ."""

    messages: int
    """Messages of the conversation up to there."""
    end: int
    """Bytes of the JSON list up to there."""
    digest: int
    """Their hash."""


class Chain(msgspec.Struct, frozen=True, gc=False):
    """The messages behind the first ones of the system, which many conversations share."""

    hashes: bytes = b""
    """Of all messages up to each, `LINK_BYTES` each."""
    sizes: array[int] = array("L")
    """Bytes of each as they are hashed: about those of its text."""
    head: bytes = b""
    """Hash of the messages of the system before them; empty: there is none."""
    head_bytes: int = 0
    marks: tuple[Mark, ...] = ()
    """Of the last messages, in order."""


NO_CHAIN: Final = Chain()


def chain_of(messages: msgspec.Raw, at_most: int, before: Iterable[Chain] = ()) -> Chain:
    """The chain of a JSON list of messages, of the first `at_most` behind those of the system. Empty where it
    is no such list, or one of too many members. `before`: of turns that may begin alike; they change
    nothing but the time that this takes.
    """
    marks: tuple[Mark, ...] = ()
    last = NO_CHAIN
    for earlier in before:
        if marks := _common(messages, earlier.marks):
            last = earlier
            break
    if marks:
        count, end, _ = marks[-1]
        text = b"[" + bytes(memoryview(messages)[end:]).lstrip(_SPACE).removeprefix(b",")
    else:
        count, text = 0, bytes(messages)
    if not text or (len(text) > MAX_MEMBERS and is_crowded(text)):
        return NO_CHAIN
    try:
        items = _list_decoder.decode(text)
        said = [_said_in(item) for item in items[: at_most - count + MAX_HEAD]]
    except UNREADABLE:
        return NO_CHAIN
    first, head, head_bytes = 0, last.head, last.head_bytes
    if not marks:
        while first < len(said) and said[first][0] in SHARED_ROLES:
            first += 1
        shared = b"\0".join([one for _, one in said[:first]])
        head, head_bytes = xxhash.xxh3_128_digest(shared) if first else b"", len(shared)
    links, sizes = [last.hashes[: count * LINK_BYTES]], last.sizes[:count]
    link = links[0][-LINK_BYTES:]
    for _, one in said[first : first + at_most - count]:
        link = xxhash.xxh3_128_digest(link + one)
        links.append(link)
        sizes.append(len(one))
    if items and first + len(sizes) - count == len(items):
        marks += _marks(messages, items[first:][-MAX_REPEATED:], len(sizes))
    return Chain(b"".join(links), sizes, head, head_bytes, marks[-MAX_REPEATED:])


class Chains:
    """The chains of the conversations that came last: of their next turns only what is new is read."""

    def __init__(self, capacity: int = MAX_CHAINS) -> None:
        self._capacity = capacity
        self._chains: OrderedDict[tuple[str, bytes], Chain] = OrderedDict()
        """By whose they are, and how they begin."""

    def of(self, who: str, messages: msgspec.Raw, at_most: int) -> Chain:
        """As `chain_of`."""
        begin = who, bytes(memoryview(messages)[:BEGIN_BYTES])
        made = chain_of(messages, at_most, [self._chains.pop(begin, NO_CHAIN)])
        self._chains[begin] = made
        if len(self._chains) > self._capacity:
            self._chains.popitem(last=False)
        return made


def _common(messages: msgspec.Raw, marks: tuple[Mark, ...]) -> tuple[Mark, ...]:
    """Those of the marks that hold for these messages."""
    text = memoryview(messages)
    if marks:
        _, end, expected = marks[-1]
        if end < len(text) and xxhash.xxh3_64_intdigest(text[:end]) == expected:
            return marks  # nearly always
    digest, at, held = xxhash.xxh3_64(), 0, 0
    for _, end, expected in marks:
        digest.update(text[at:end])
        if end >= len(text) or digest.intdigest() != expected:
            break
        at, held = end, held + 1
    return marks[:held]


def _marks(messages: msgspec.Raw, items: Sequence[msgspec.Raw], count: int) -> tuple[Mark, ...]:
    """Marks at the ends of the last `items` of the list, which has `count` messages of the conversation."""
    text = memoryview(messages)
    ends, at = [], _before(text, len(text), b"]")
    for item in reversed(items):
        ends.append(at)
        at = _before(text, at - len(memoryview(item)), b",")
    digest, at, marks = xxhash.xxh3_64(), 0, []
    for number, end in enumerate(reversed(ends), count - len(ends) + 1):
        digest.update(text[at:end])
        at = end
        marks.append(Mark(number, end, digest.intdigest()))
    return tuple(marks)


def _before(text: memoryview, end: int, mark: bytes) -> int:
    """Where what stands before `mark` and blanks ends."""
    blank = _SPACE + mark
    while end and text[end - 1] in blank:
        end -= 1
    return end


def canonical(json: msgspec.Raw) -> bytes:
    """A text, or a list of parts, without marks for caches, with their members in order."""
    text = bytes(json)
    if text.count(b",") + text.count(b"[") + text.count(b"{") > MAX_MARKS:
        return text
    try:
        value = msgspec.json.decode(json)
        for part in value if isinstance(value, list) else ():
            if isinstance(part, dict):
                part.pop("cache_control", None)
        only = _text_of(value[0]) if isinstance(value, list) and len(value) == 1 else None
        return _sorted_encoder.encode(value if only is None else only)
    except UNREADABLE:
        return text


def _said_in(item: msgspec.Raw) -> tuple[str, bytes]:
    """(role, what is hashed) of a message. Raises one of UNREADABLE."""
    with contextlib.suppress(msgspec.ValidationError):
        plain = _plain_decoder.decode(item)
        return plain.role, f"{plain.role}\0{plain.content}".encode()
    text = bytes(item)
    if text.count(b",") + text.count(b"[") + text.count(b"{") > MAX_MARKS:
        return _role_decoder.decode(item).role, text
    message = msgspec.json.decode(item)
    role = message.pop("role", "") if isinstance(message, dict) else None
    if not isinstance(role, str):
        raise msgspec.ValidationError("a message is an object, whose role is a text")
    message.pop("cache_control", None)
    if message.get("type") == "message":
        del message["type"]
    content = message.pop("content", None)
    parts = content if isinstance(content, list) else ()
    for part in parts:
        if isinstance(part, dict):
            part.pop("cache_control", None)
    if len(parts) == 1 and (only := _text_of(parts[0])) is not None:
        content = only
    if "tool_calls" in message or "arguments" in message:
        _read_arguments(message)
    if isinstance(content, str) and not message:
        return role, f"{role}\0{content}".encode()
    return role, _sorted_encoder.encode([role, content, message])


def _text_of(part: Any) -> str | None:
    """The text of a part that has nothing else."""
    if isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] in _TEXTS:
        text = part["text"]
        return text if isinstance(text, str) else None
    return None


def _read_arguments(message: dict[str, Any]) -> None:
    """Put objects in place of the texts that hold them: of the calls of a chat's message, or of a call that
    is an item of Responses.
    """
    calls = message.get("tool_calls")
    functions = (
        [one.get("function") for one in calls if isinstance(one, dict)] if isinstance(calls, list) else []
    )
    for function in (message, *functions):
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            with contextlib.suppress(*UNREADABLE):
                function["arguments"] = msgspec.json.decode(function["arguments"])
