"""What the router reads of a request: as little as planning needs.

`RequestView` decodes the few fields that planning looks at; msgspec checks the syntax of everything else and
throws it away, and `messages` and `prompt` stay raw bytes. The body itself goes on to the worker byte for
byte, so a parameter that the router has never heard of works.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from pdserve.errors import ConfigError, RequestError

BYTES_PER_TOKEN = 4
"""Rule of thumb for natural-language text under the usual tokenizers; an estimate only ever moves work."""
MAX_SESSION_KEY_CHARS = 256
"""A longer session key is replaced by its digest, so that the session table's memory is bounded."""
_EMPTY = msgspec.Raw(b"")


class RequestView(msgspec.Struct, gc=False):
    """The fields of an OpenAI (or SGLang `/generate`) request that planning looks at."""

    model: str | None = None
    stream: bool | None = None
    user: str | None = None
    messages: msgspec.Raw = _EMPTY
    prompt: msgspec.Raw = _EMPTY


class Facts(msgspec.Struct, frozen=True, gc=False):
    """What the plan is made from."""

    endpoint: str
    model: str | None = None
    session_key: str | None = None
    prompt_tokens_estimate: int = 0
    turn: int = 0
    """Number of the request at this router; breaks ties between equally good workers."""


_decoder = msgspec.json.Decoder(RequestView)
_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_FIELD = re.compile(r" - at `\$\.(?P<field>[A-Za-z_]+)[^`]*`$")


def parse_request(body: bytes) -> RequestView:
    """The request in `body`. Raises RequestError (400) for what is not a JSON object of that form."""
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        match = _FIELD.search(str(error))
        if match is None:
            raise RequestError(400, "The request body must be a JSON object.") from None
        what = str(error)[: match.start()].replace("`", "")
        raise RequestError(
            400, f"Invalid value for '{match['field']}': {what}.", param=match["field"]
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(400, f"The request body is not valid JSON: {error}.") from None
    except RecursionError:
        raise RequestError(400, "The request body is nested too deeply.") from None


def estimate_prompt_tokens(view: RequestView) -> int:
    """Roughly how many tokens the prompt has, from the length of its JSON."""
    return (len(view.messages) + len(view.prompt)) // BYTES_PER_TOKEN


# --- session keys


class SessionSource(msgspec.Struct, frozen=True):
    """One place where a session key may be."""

    kind: Literal["header", "user", "body"]
    name: str = ""
    """Header name (lower case) or dotted path."""


def parse_sources(texts: Sequence[str]) -> tuple[SessionSource, ...]:
    """`session.sources` of the configuration. Raises ConfigError naming the one that is no source."""
    sources = []
    for text in texts:
        kind, _, name = text.partition(":")
        if kind == "user" and not name:
            sources.append(SessionSource("user"))
        elif kind == "header" and re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
            sources.append(SessionSource("header", name.lower()))
        elif kind == "body" and name and all(name.split(".")):
            sources.append(SessionSource("body", name))
        else:
            raise ConfigError(
                f"session.sources: {text!r} is not `header:NAME`, `user` or `body:PATH` (a dotted path)"
            )
    return tuple(sources)


def find_session_key(
    sources: Sequence[SessionSource], header: Callable[[str], str | None], view: RequestView, body: bytes
) -> str | None:
    """The first non-empty key that the sources give, bounded in length; None when there is none."""
    for source in sources:
        if source.kind == "header":
            key = header(source.name)
        elif source.kind == "user":
            key = view.user
        else:
            key = _at_path(body, source.name.split("."))
        if key:
            if len(key) <= MAX_SESSION_KEY_CHARS:
                return key
            return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()
    return None


def _at_path(body: bytes | msgspec.Raw, path: Sequence[str]) -> str | None:
    """The string or number at a path of object keys; None where there is none."""
    try:
        for step in path:
            body = _object_decoder.decode(body)[step]
        value = msgspec.json.decode(body, type=str | int | None)
    except (msgspec.DecodeError, KeyError, RecursionError):
        return None
    return None if value is None else str(value)
