"""Nonces that agents write at the start of their prompts, taken out. Pure.

Claude Code begins its system prompt with a line that is for Anthropic's accounting, and no word to the model:

    x-anthropic-billing-header: cc_version=2.1.114.76c; cc_entrypoint=cli; cch=ea6aa;

`cch` and the end of `cc_version` change with each request. So no request would find a page of the one before.
The line is a block of its own, or the first one of the text. Gateways that translate between APIs leave it
where it is. So it is looked for at the start of the first text of the system, whichever member holds that,
and nowhere else: the same line in what a user or a tool says is content. A line of other content stays.

All other bodies are passed on byte for byte. Almost all of them are told apart by a look at the first
`HEAD_BYTES` of one member, which takes a microsecond however long the request is.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from pdserve.router.api.request_body import UNREADABLE, RequestView, is_crowded, with_member

HEAD_BYTES: Final = 1024
MARK: Final = b"x-anthropic-"
STRIPPED_HEADER: Final = b"x-pdserve-stripped"
"""Of the answer: the names of the lines that were taken out."""
_LINE: Final = re.compile(
    r"(x-anthropic-[a-z-]{1,64}):(?:[ \t]*[\w.-]{1,64}=[^;\r\n]{0,256};){1,16}[ \t]*(?:\r?\n|\Z)"
)
_MEMBERS: Final = ("system", "instructions", "messages", "input")
_ROLES: Final = ("system", "developer")
_list_decoder: Final = msgspec.json.Decoder(list[msgspec.Raw])


def without_nonce(body: bytes, view: RequestView) -> tuple[bytes, bytes]:
    """(the body without such a line, the line's name). The body itself and no name where it has none."""
    for member in _MEMBERS:
        said: msgspec.Raw = getattr(view, member)
        if said and MARK in bytes(memoryview(said)[:HEAD_BYTES]):
            try:
                found = _first_without(said, is_text=member in ("system", "instructions"))
            except UNREADABLE:
                continue
            if found is not None:
                old, new, name = found
                return _replaced(body, bytes(said), old, new, member), name
    return body, b""


def _first_without(said: msgspec.Raw, *, is_text: bool) -> tuple[bytes, bytes, bytes] | None:
    """(bytes of a member, what is to stand for them, the line's name); None: there is no such line.
    `is_text`: the member is the system's text; otherwise its first message is, if it is one of the system.
    """
    if bytes(said)[:1] == b'"':
        value = msgspec.json.decode(said)
        text, name = _without_line(value) if is_text else (value, b"")
        return (bytes(said), msgspec.json.encode(text), name) if name else None
    if is_crowded(said):
        return None
    items = _list_decoder.decode(said)
    if not items or MARK not in bytes(items[0]):
        return None
    first = bytes(items[0])
    value = msgspec.json.decode(first)
    if not isinstance(value, dict):
        return None
    if not is_text:
        name = _strip_message(value)
    elif (name := _strip_part(value)) and not value["text"]:
        rest = b",".join(map(bytes, items[1:]))
        return bytes(said), b"[%b]" % rest, name
    return (first, msgspec.json.encode(value), name) if name else None


def _strip_message(message: dict[str, Any]) -> bytes:
    """Take the line out of a message of the system; its name."""
    content = message.get("content")
    if message.get("role") not in _ROLES:
        return b""
    if isinstance(content, str):
        message["content"], name = _without_line(content)
        return name
    if not isinstance(content, list) or not content or not isinstance(content[0], dict):
        return b""
    name = _strip_part(content[0])
    if name and not content[0]["text"]:
        del content[0]
    return name


def _strip_part(part: dict[str, Any]) -> bytes:
    text = part.get("text")
    if not isinstance(text, str):
        return b""
    part["text"], name = _without_line(text)
    return name


def _without_line(text: str) -> tuple[str, bytes]:
    found = _LINE.match(text)
    return (text, b"") if found is None else (text[found.end() :], found[1].encode("ascii"))


def _replaced(body: bytes, member: bytes, old: bytes, new: bytes, name: str) -> bytes:
    """`body` with `new` for `old`, which is a part of its member `name`; that may come twice, and counts then
    as it stands last.
    """
    if body.count(old) == 1:
        return body.replace(old, new)
    return with_member(body, name, msgspec.Raw(member.replace(old, new, 1)))
