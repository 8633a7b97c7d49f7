"""ASGI middleware that holds each body against the contract (`pdserve.engine.contract`) before SGLang sees
it, and gives errors the form of the API that was asked.

It stands inside of `RequestTracking`, so a record says whether anything went to the scheduler. What fails
before that is the fault of the request, whatever SGLang calls it: a 400, whose text tells nothing of the
server.

A router that has found what an Anthropic client changed of the prompt since the turn before says so in a
header, and the answer gets Anthropic's `diagnostics`. A stream has it in the message of its first event.

x-pdserve-changed: system_changed=1234        tokens that had to be computed again; `none`: nothing changed

    {"diagnostics": {"cache_miss_reason": {"type": "system_changed", "cache_missed_input_tokens": 1234}}, ...}
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec

from pdserve.engine.contract.endpoints import CHAT, COUNT_TOKENS, MESSAGES, PREFILL, Contract
from pdserve.engine.http.connection import AsgiApp, Receive, Scope, Send, answer
from pdserve.engine.http.request import current_request
from pdserve.engine.http.resume import replayed, whole_body
from pdserve.errors import RequestError

logger = logging.getLogger(__name__)

IGNORED_HEADER: Final = b"x-pdserve-ignored"
"""Members of the body that have no effect here, separated by commas."""
CHANGED_HEADER: Final = b"x-pdserve-changed"
_CHANGED: Final = re.compile(rb"([a-z_]{1,64})(?:=(\d{1,15}))?")
_MESSAGE: Final = b'"message":{'
"""Where the message of a stream's first event begins."""
MAX_ERROR_BYTES: Final = 65_536
_NEVER_COMPUTED: Final = frozenset(
    {"/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize", COUNT_TOKENS}
)
_OF_A_BODY: Final = (b"content-length", b"content-type")
_NAME: Final = re.compile(r"[\w.-]{1,64}", re.ASCII)
_LEAK: Final = re.compile(
    r'File "|\.py\b|line \d+|Traceback|0x[0-9a-f]{6,}|<class |object at |sglang|pydantic|\[type=|'
    r"(?:TypeError|AttributeError|KeyError|IndexError|NoneType|AssertionError)"
)
_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class Judged:
    """See the module's docstring. `contract` is asked for at each request: None until the engine is there."""

    def __init__(self, app: AsgiApp, contract: Callable[[], Contract | None]) -> None:
        self._app = app
        self._contract = contract

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        contract = self._contract() if scope["type"] == "http" and scope["method"] == "POST" else None
        endpoint = _endpoint(scope) if contract is not None else ""
        if contract is None or not contract.knows(endpoint):
            await self._app(scope, receive, send)
            return
        try:
            body = await whole_body(receive)
            judgement = contract.judge(endpoint, body)
        except RequestError as error:
            await answer(send, error, body=error_body(endpoint, error))
            return
        if endpoint == MESSAGES and (record := current_request()) is not None:
            record.marks_cache = b'"cache_control"' in body
        headers = [pair for pair in scope["headers"] if pair[0] not in _OF_A_BODY]
        headers.append((b"content-length", b"%d" % len(judgement.body)))
        headers.append((b"content-type", b"application/json"))
        changed = next((value for name, value in headers if name == CHANGED_HEADER), b"")
        way_back = _Answer(send, endpoint, judgement.ignored, _diagnostics(changed))
        await self._app({**scope, "headers": headers}, replayed(judgement.body, receive), way_back.send)


def _endpoint(scope: Scope) -> str:
    path = str(scope["path"])
    if path != PREFILL:
        return path
    found: str = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("endpoint", [CHAT])[0]
    return found


class _Answer:
    """The way back: tells what was ignored, and holds errors until they are whole, to rewrite them. With
    `diagnostics` the head waits for the first piece, whose length changes.
    """

    def __init__(self, send: Send, endpoint: str, ignored: Sequence[str], diagnostics: bytes) -> None:
        self._send = send
        self._endpoint = endpoint
        names = [name if _NAME.fullmatch(name) else "?" for name in ignored]
        self._more = [(IGNORED_HEADER, ", ".join(names).encode())] if names else []
        self._diagnostics = diagnostics
        self._head: MutableMapping[str, Any] | None = None
        self._status = 200
        self._headers: list[tuple[bytes, bytes]] = []
        self._error = bytearray()

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """For the app."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            if self._status < 400:
                head = {**message, "headers": [*message.get("headers", ()), *self._more]}
                if self._status == 200 and self._diagnostics:
                    self._head = head
                else:
                    await self._send(head)
            else:
                self._headers = [pair for pair in message.get("headers", ()) if pair[0] not in _OF_A_BODY]
            return
        if self._status < 400:
            await self._send(message if self._head is None else await self._diagnosed(self._head, message))
            return
        self._error += message.get("body", b"")[: MAX_ERROR_BYTES - len(self._error)]
        if not message.get("more_body", False):
            error = self._told()
            await answer(self._send, error, self._headers, error_body(self._endpoint, error))

    async def _diagnosed(
        self, head: MutableMapping[str, Any], message: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        """The first piece of the body with the diagnostics; its head is sent."""
        self._head, body = None, message.get("body", b"")
        if body.startswith(b"{"):
            body = b"{%b,%b" % (self._diagnostics, body[1:])
        else:
            body = body.replace(_MESSAGE, b"%b%b," % (_MESSAGE, self._diagnostics), 1)
        headers = [pair for pair in head["headers"] if pair[0].lower() != b"content-length"]
        if not message.get("more_body", False):
            headers.append((b"content-length", b"%d" % len(body)))
        await self._send({**head, "headers": headers})
        return {**message, "body": body}

    def _told(self) -> RequestError:
        text, param, code = _words(bytes(self._error))
        status = self._status
        if status in (500, 501) and self._was_not_computed():
            logger.warning("a request to %s cannot be read by SGLang: %s", self._endpoint, text)
            status, text = 400, "The request has a part that this model cannot be asked with."
        elif _LEAK.search(text):
            logger.warning("an answer of status %d, whose text is not told: %s", status, text)
            text = "The request is not valid." if status < 500 else "The server failed."
        return RequestError(
            status,
            text,
            type_="invalid_request_error" if status < 500 else "server_error",
            param=param,
            code=code,
        )

    def _was_not_computed(self) -> bool:
        """Nothing of the request went to the scheduler."""
        if (record := current_request()) is not None:
            return not any(one.was_sent for one in record.requests.values())
        return self._endpoint in _NEVER_COMPUTED


def _diagnostics(changed: bytes) -> bytes:
    """The member of an answer; empty for what is no word of a router."""
    if (words := _CHANGED.fullmatch(changed)) is None:
        return b""
    reason: dict[str, Any] | None = None
    if words[1] != b"none":
        reason = {"type": words[1].decode()}
        if words[2] is not None:
            reason["cache_missed_input_tokens"] = int(words[2])
    return b'"diagnostics":' + msgspec.json.encode(reason and {"cache_miss_reason": reason})


def _words(body: bytes) -> tuple[str, str | None, str | None]:
    """(message, field, code) of an error in whatever form."""
    try:
        said = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode("utf-8", "replace")[:500] or "no reason given", None, None
    error = said.get("error", said) if isinstance(said, dict) else said
    if not isinstance(error, dict):
        return str(error)[:500], None, None
    message = error.get("message") or error.get("detail") or "no reason given"
    param, code = error.get("param"), error.get("code")
    return (
        str(message)[:2000],
        param if isinstance(param, str) else None,
        code if isinstance(code, str) else None,
    )


def error_body(endpoint: str, error: RequestError) -> bytes:
    """The error in Anthropic's form where its API was asked, else in OpenAI's."""
    if endpoint.startswith("/v1/messages"):
        kind = _ANTHROPIC_TYPES.get(
            error.status, "invalid_request_error" if error.status < 500 else "api_error"
        )
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": str(error)}})
    return msgspec.json.encode(error.body())


def validation_error(errors: Sequence[Any]) -> RequestError:
    """Of a framework's list of errors (`loc`, `msg`): the first field that is wrong, in words."""
    for error in errors:
        where = ".".join(
            str(part) for part in error.get("loc", ()) if part != "body" and "[" not in str(part)
        )
        why = str(error.get("msg", "")).removeprefix("Value error, ")
        if where and not _LEAK.search(where + why):
            return RequestError(400, f"{where[:200]}: {why[:300]}", param=where[:200], code="invalid_value")
    return RequestError(400, "The request is not valid.", code="invalid_value")
