"""Errors in the form of an endpoint's API, and SGLang's error bodies brought into it.

    OpenAI      {"error": {"message", "type", "param", "code"}}
    Anthropic   {"type": "error", "error": {"type", "message"}}
    Responses   as OpenAI; within a stream {"type": "error", "code", "message", "param", "sequence_number"}

SGLang 0.5.23 answers `{"object":"error","message","type","param","code":<status>}`, or in one of the forms
above, and FastAPI answers `{"detail": ...}`. All become the form of the endpoint, with the message kept.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final, Literal

import msgspec

from pdserve.errors import RequestError
from pdserve.router.api.content_coding import TAKEN
from pdserve.router.api.request_body import UNREADABLE

ErrorForm = Literal["openai", "anthropic", "responses"]
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Their clients know these types only."""
_CONTEXT = re.compile(r"longer than the model's context length|model's maximum context length")
RETRY_STATUSES: Final = (429, 503)
MAX_MESSAGE_CHARS = 4000
"""SGLang repeats the input in a validation error. A longer message is cut."""


class NoWorkerError(RequestError):
    """No worker can be given the request now (503, `Retry-After`)."""

    def __init__(self, message: str) -> None:
        super().__init__(503, message, type_="service_unavailable_error", code="no_healthy_worker")


def error_type(status: int) -> str:
    """OpenAI's error type for an HTTP status."""
    return _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")


def error_body(
    status: int,
    message: str,
    *,
    type_: str = "",
    code: str | None = None,
    param: str | None = None,
    form: ErrorForm = "openai",
) -> bytes:
    """An error's JSON. `type_`: OpenAI's, where it is not the status' own."""
    if form == "anthropic":
        own = _ANTHROPIC_TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
        return msgspec.json.encode({"type": "error", "error": {"type": own, "message": message}})
    fields = {"message": message, "type": type_ or error_type(status), "param": param, "code": code}
    return msgspec.json.encode({"error": fields})


def error_of(error: RequestError, form: ErrorForm = "openai") -> bytes:
    """The answer's body for a RequestError."""
    return error_body(
        error.status, str(error), type_=error.type_, code=error.code, param=error.param, form=form
    )


def error_headers(error: RequestError) -> list[tuple[bytes, bytes]]:
    """What the head of the answer says more: when to try again, or that a key is needed."""
    if error.status == 401:
        return [(b"www-authenticate", b"Bearer")]
    if error.status == 415:
        return [(b"accept-encoding", TAKEN.encode())]
    return [(b"retry-after", b"%d" % error.retry_after_s)] if error.status in RETRY_STATUSES else []


def error_event(status: int, message: str, code: str | None = None, form: ErrorForm = "openai") -> bytes:
    """The server-sent event that ends a broken stream."""
    return as_event(error_body(status, message, code=code, form=form), form)


def as_event(body: bytes, form: ErrorForm) -> bytes:
    """The server-sent event that says what `body`, an error in this form, says as a whole answer."""
    if form == "openai":
        return b"data: %b\n\n" % body
    if form == "responses":
        said = msgspec.json.decode(body)["error"]
        flat = {name: said[name] for name in ("code", "message", "param")}
        body = msgspec.json.encode({"type": "error", **flat, "sequence_number": 0})
    return b"event: error\ndata: %b\n\n" % body


def refused_stream(body: bytes, form: ErrorForm) -> bytes:
    """The events that answer a request whose stream has a head already, and nothing else: the error, and what
    ends a stream of this API.
    """
    return as_event(body, form) + (b"data: [DONE]\n\n" if form == "openai" else b"")


def convert_error(status: int, body: bytes, form: ErrorForm = "openai") -> bytes:
    """A worker's error answer (status >= 400) in the endpoint's form, its message kept."""
    try:
        value = msgspec.json.decode(body)
    except UNREADABLE:
        value = None
    given: dict[str, Any] = {}
    if isinstance(value, dict):
        inner = value.get("error")
        given = inner if isinstance(inner, dict) else value
        if isinstance(inner, str):
            given = {"message": inner}
    message = given.get("message") or _detail(given.get("detail"))
    if not isinstance(message, str) or not message:
        message = f"The worker answered with status {status} and no message."
    message = message[:MAX_MESSAGE_CHARS]
    code = given.get("code")
    if not isinstance(code, str):
        code = "context_length_exceeded" if status == 400 and _CONTEXT.search(message) else None
    param = given.get("param")
    return error_body(status, message, code=code, param=param if isinstance(param, str) else None, form=form)


def _detail(detail: Any) -> str | None:
    """FastAPI's `detail`: a text, or a list of {"loc", "msg"}."""
    if isinstance(detail, str):
        return detail
    if not isinstance(detail, list):
        return None
    lines = []
    for entry in detail:
        if isinstance(entry, dict) and isinstance(entry.get("msg"), str):
            where = ".".join(str(step) for step in entry.get("loc", ()) if step != "body")
            lines.append(f"{where}: {entry['msg']}" if where else entry["msg"])
    return "; ".join(lines) or None


class TooManyError(RequestError):
    """A limit is reached (429, `Retry-After`)."""

    def __init__(self, message: str, wait_s: float, code: str) -> None:
        retry_after_s = max(1, math.ceil(wait_s))
        super().__init__(
            429,
            f"{message} Try again in {retry_after_s} s.",
            type_="rate_limit_error",
            code=code,
            retry_after_s=retry_after_s,
        )
