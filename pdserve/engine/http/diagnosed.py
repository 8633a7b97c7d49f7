"""ASGI middleware that puts Anthropic's `diagnostics` into an answer: what its client changed of the prompt
since the turn before, as the router found.

x-pdserve-changed: system_changed=1234        tokens that had to be computed again; `none`: nothing changed

    {"diagnostics": {"cache_miss_reason": {"type": "system_changed", "cache_missed_input_tokens": 1234}}, ...}

A stream has it in the message of its first event.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from typing import Any, Final

import msgspec

from pdserve.engine.http.connection import AsgiApp, Receive, Scope, Send

CHANGED_HEADER: Final = b"x-pdserve-changed"
_WORDS: Final = re.compile(rb"([a-z_]{1,64})(?:=(\d{1,15}))?")
_STARTS: Final = (b'{"id":', b'"message":{')
"""Where a whole answer begins, and where the message of a stream's first event does."""


class Diagnosed:
    """See the module's docstring."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        said = b""
        if scope["type"] == "http":
            said = next((value for name, value in scope["headers"] if name == CHANGED_HEADER), b"")
        found = _WORDS.fullmatch(said)
        await self._app(scope, receive, send if found is None else _Answer(send, found).send)


class _Answer:
    """The way back: the head waits for the first piece, whose length changes."""

    def __init__(self, send: Send, words: re.Match[bytes]) -> None:
        self._send = send
        self._member = _member(words)
        self._head: MutableMapping[str, Any] | None = None
        self._is_told = False

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """For the app."""
        if message["type"] == "http.response.start":
            self._head, self._is_told = message, message["status"] != 200
            return
        body = message.get("body", b"")
        if not self._is_told and body:
            self._is_told = True
            message = {**message, "body": (body := self._with_member(body))}
        if self._head is not None:
            await self._send(self._with_length(self._head, body, message.get("more_body", False)))
            self._head = None
        await self._send(message)

    def _with_member(self, body: bytes) -> bytes:
        whole, in_event = _STARTS
        if body.startswith(whole):
            return b"{%b,%b" % (self._member, body[1:])
        return body.replace(in_event, b"%b%b," % (in_event, self._member), 1)

    @staticmethod
    def _with_length(head: MutableMapping[str, Any], body: bytes, more: bool) -> MutableMapping[str, Any]:
        headers = [pair for pair in head.get("headers", ()) if pair[0].lower() != b"content-length"]
        if not more:
            headers.append((b"content-length", b"%d" % len(body)))
        return {**head, "headers": headers}


def _member(words: re.Match[bytes]) -> bytes:
    reason: dict[str, Any] | None = None
    if words[1] != b"none":
        reason = {"type": words[1].decode()}
        if words[2] is not None:
            reason["cache_missed_input_tokens"] = int(words[2])
    return b'"diagnostics":' + msgspec.json.encode(reason and {"cache_miss_reason": reason})
