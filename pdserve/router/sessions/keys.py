"""The session key of a request.

A client can name its session in a header, a cookie or a field of the body. Such names are compared exactly.
For other clients the source `messages` makes keys from the conversation itself:

    messages     system   u1      a1      u2      a2      u3
    turn 1       (left out)  h1
    turn 2                   h1      h2      h3
    turn 3                   h1      h2      h3      h4      h5         h(n) = hash(h(n-1), message n's JSON)

`h1` names the session for placement: it is equal in every turn and at every router. The session table finds
the conversation by its longest known link. So two conversations with the same first message differ from
their second turn on. Many clients send one constant `user`. The source `user:messages` makes the same keys,
apart for each `user`, instead of one session of all its conversations. Leading `system` and `developer`
messages are left out, since many conversations share them. If a client does not repeat earlier messages
byte for byte, its request begins a new session.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal

import msgspec
import xxhash

from pdserve.errors import ConfigError
from pdserve.router.api.request_body import UNREADABLE, RequestView, is_crowded

MAX_SESSION_KEY_CHARS = 256
"""A longer session key is replaced by its digest, which bounds the session table's memory."""
MAX_LINKS = 64
"""Messages after this many have no link of their own."""
SHARED_ROLES = ("system", "developer")


class SessionSource(msgspec.Struct, frozen=True):
    """One place where a session key may be."""

    kind: Literal["header", "cookie", "user", "body", "messages"]
    name: str = ""
    """Header name (lower case), cookie name, dotted path; `messages`: the conversations of a user."""


class SessionKey(msgspec.Struct, frozen=True, gc=False):
    """`name` decides the placement. The last turn is stored under the last of `links`.

    A look-up takes the last link that the table knows.
    """

    name: str
    links: tuple[str, ...]

    def of_model(self, model: str) -> SessionKey:
        """The key for one model. `name` stays, because placement is per model already."""
        return SessionKey(self.name, tuple([f"{model}/{link}" for link in self.links]))

    def within(self, tenant: str) -> SessionKey:
        """The key for one tenant, or for one user."""
        return SessionKey(f"{tenant}/{self.name}", tuple([f"{tenant}/{link}" for link in self.links]))


def named(name: str) -> SessionKey:
    """The key of a session that its client names."""
    return SessionKey(name, (name,))


class _Role(msgspec.Struct, gc=False):
    role: str = ""


_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_role_decoder = msgspec.json.Decoder(_Role)


def parse_sources(texts: Sequence[str]) -> tuple[SessionSource, ...]:
    """Parse `session.sources` of the configuration. Raises ConfigError that names an invalid source."""
    sources = []
    for text in texts:
        kind, _, name = text.partition(":")
        if kind in ("user", "messages") and text == kind:
            sources.append(SessionSource(kind))  # type: ignore[arg-type]
        elif text == "user:messages":
            sources.append(SessionSource("user", "messages"))
        elif kind == "header" and _TOKEN.fullmatch(name):
            sources.append(SessionSource("header", name.lower()))
        elif kind == "cookie" and _TOKEN.fullmatch(name):
            sources.append(SessionSource("cookie", name))
        elif kind == "body" and name and all(name.split(".")):
            sources.append(SessionSource("body", name))
        else:
            raise ConfigError(
                f"session.sources: {text!r} is not `header:NAME`, `cookie:NAME`, `user`, `user:messages`, "
                "`body:PATH` (a dotted path) or `messages`"
            )
    return tuple(sources)


def find_session_key(
    sources: Sequence[SessionSource], header: Callable[[str], str | None], view: RequestView, body: bytes
) -> SessionKey | None:
    """The first non-empty key of the sources, bounded in length. None: no source has one."""
    for source in sources:
        kind = source.kind
        if kind == "header":
            key = header(source.name)
        elif kind == "user" and source.name:
            links = message_links(view.messages or view.input) if view.user else ()
            if links:
                return SessionKey(links[0], links).within(_bounded(view.user or ""))
            continue
        elif kind == "user":
            key = view.user
        elif kind == "cookie":
            key = _cookie(header("cookie"), source.name)
        elif kind == "body":
            key = _at_path(body, source.name.split("."))
        else:
            links = message_links(view.messages or view.input)
            if links:
                return SessionKey(links[0], links)
            continue
        if key:
            return named(_bounded(key))
    return None


def _bounded(key: str) -> str:
    if len(key) <= MAX_SESSION_KEY_CHARS:
        return key
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()


def message_links(messages: msgspec.Raw) -> tuple[str, ...]:
    """The hash chain of a JSON list of messages, without its leading system and developer messages. Empty
    where there are too many to look at.
    """
    if is_crowded(messages):
        return ()
    try:
        items = _list_decoder.decode(messages)
        first = 0
        while first < len(items) and _role_decoder.decode(items[first]).role in SHARED_ROLES:
            first += 1
    except UNREADABLE:
        return ()
    digest, links = xxhash.xxh3_128(b"pdserve session"), []
    for item in items[first : first + MAX_LINKS]:
        digest.update(item)
        links.append("messages:" + digest.hexdigest())
    return tuple(links)


def _cookie(header: str | None, name: str) -> str | None:
    """The undecoded value of a cookie (RFC 6265, section 4.2.1)."""
    for pair in (header or "").split(";"):
        found, _, value = pair.strip().partition("=")
        if found == name:
            return value.strip('"')
    return None


def _at_path(body: bytes | msgspec.Raw, path: Sequence[str]) -> str | None:
    """The string or number at a path of object keys, or None."""
    try:
        for step in path:
            body = _member(step).decode(body).value
        value = msgspec.json.decode(body, type=str | int | None)
    except UNREADABLE:
        return None
    return None if value is None else str(value)


@lru_cache(maxsize=64)
def _member(name: str) -> msgspec.json.Decoder[Any]:
    """Decodes one member of an object, `value`, and makes nothing of the others. Names come from the
    configuration.
    """
    return msgspec.json.Decoder(msgspec.defstruct("Member", [("value", msgspec.Raw)], rename={"value": name}))
