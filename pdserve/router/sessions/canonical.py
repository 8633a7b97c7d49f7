"""What the messages of a conversation say, however their client writes them: a chain of hashes. Pure.

    messages     system   u1      a1      u2      a2      u3
    turn 1       (left out)  h1
    turn 2                   h1      h2      h3
    turn 3                   h1      h2      h3      h4      h5         h(n) = hash(h(n-1), message n)

Agents write the same message in other ways from turn to turn. So these are equal: members in any order; a
text, and a list with one part of it; a message with a mark for caches (`cache_control`), and one without;
arguments of a tool call with other spaces and with members in another order. A hash decides which
conversation a request continues, and which message changed. It names no page and no token.

What would take many objects to read is hashed as it stands.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final

import msgspec
import xxhash

from pdserve.router.api.request_body import UNREADABLE, is_crowded

MAX_HEAD: Final = 8
"""Messages of the system at the start; those behind them are of the conversation."""
MAX_MARKS: Final = 20_000
"""Commas and brackets of a message that is read as objects: about 1 ms, and 2 MB."""
SHARED_ROLES: Final = ("system", "developer")
_TEXTS: Final = ("text", "input_text", "output_text")


class _Plain(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """A message of text, as most are."""

    role: str
    content: str
    type: str = "message"


class _Role(msgspec.Struct, gc=False):
    role: str = ""


_plain_decoder: Final = msgspec.json.Decoder(list[_Plain])
_list_decoder: Final = msgspec.json.Decoder(list[msgspec.Raw])
_role_decoder: Final = msgspec.json.Decoder(_Role)
_sorted_encoder: Final = msgspec.json.Encoder(order="sorted")


class Chain(msgspec.Struct, frozen=True, gc=False):
    """The messages behind the first ones of the system, which many conversations share."""

    hashes: tuple[str, ...] = ()
    """Of all messages up to each."""
    sizes: tuple[int, ...] = ()
    """Bytes of each as they are hashed: about those of its text."""
    head: str = ""
    """Hash of the messages of the system before them; empty: there is none."""
    head_bytes: int = 0


NO_CHAIN: Final = Chain()


def chain_of(messages: msgspec.Raw, at_most: int) -> Chain:
    """The chain of a JSON list of messages, of the first `at_most` behind those of the system. Empty where it
    is no such list, or one of too many members.
    """
    if not messages or is_crowded(messages):
        return NO_CHAIN
    most = at_most + MAX_HEAD
    try:
        plain = _plain_decoder.decode(messages)
        said = [(one.role, f"{one.role}\0{one.content}".encode()) for one in plain[:most]]
    except msgspec.ValidationError:
        try:
            said = [_said_in(item) for item in _list_decoder.decode(messages)[:most]]
        except UNREADABLE:
            return NO_CHAIN
    except UNREADABLE:
        return NO_CHAIN
    first = 0
    while first < len(said) and said[first][0] in SHARED_ROLES:
        first += 1
    digest, hashes, sizes = xxhash.xxh3_128(b"pdserve session"), [], []
    for _, text in said[first : first + at_most]:
        digest.update(text)
        digest.update(b"\0")
        hashes.append(digest.hexdigest())
        sizes.append(len(text))
    if not first:
        return Chain(tuple(hashes), tuple(sizes))
    head = b"\0".join([text for _, text in said[:first]])
    return Chain(tuple(hashes), tuple(sizes), xxhash.xxh3_128_hexdigest(head), len(head))


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
