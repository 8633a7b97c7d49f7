"""The session key of a request.

A client can name its session in a header, a cookie or a field of the body. Such names are compared exactly.
`config.placement.AGENTS_NAMES` are those that agents give, in the order in which they count. For other
clients the source `messages` makes keys from the conversation itself: the chain of hashes of `canonical`.

`h1` names the session for placement: it is equal in every turn and at every router. The session table finds
the conversation by its longest known link. So two conversations with the same first message differ from their
second turn on. Many clients send one constant `user`. The source `user:messages` makes the same keys, apart
for each `user`, instead of one session of all its conversations. `prompt_cache_key` does too, but the key
names the session for placement: clients give one key to conversations that begin alike.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, Literal

import msgspec

from pdserve.errors import ConfigError
from pdserve.router.api.request_body import UNREADABLE, RequestView
from pdserve.router.sessions.canonical import LINK_BYTES, Chains

PARENT_HEADERS: Final = (
    b"x-parent-session-id",
    b"x-dynamo-parent-session-id",
    b"x-claude-code-parent-agent-id",
)
"""The session that began this one: its prompt begins as the parent's does."""
PARENT_OF: Final = {b"x-claude-code-agent-id": b"x-claude-code-session-id"}
"""Where none of `PARENT_HEADERS` is sent: the header with the parent of a session, by that with its name."""
FINAL_HEADERS: Final = (b"x-dynamo-session-final", b"x-session-final")
"""`true`: no request of the session follows."""
_PARENTS: Final = frozenset((*PARENT_HEADERS, *PARENT_OF.values()))
MAX_SESSION_KEY_CHARS = 256
"""A longer session key is replaced by its digest, which bounds the session table's memory."""
MAX_LINKS = 64
"""Messages after this many have no link of their own."""


class SessionSource(msgspec.Struct, frozen=True):
    """One place where a session key may be."""

    kind: Literal["header", "cookie", "user", "body", "messages", "prompt_cache_key", "metadata.user_id"]
    name: str = ""
    """Header name (lower case), cookie name, dotted path; `messages`: the conversations of a user."""
    header: bytes = b""
    """The header's name as it stands in a request; empty: the source is none."""


class SessionKey(msgspec.Struct, frozen=True, gc=False):
    """`name` decides the placement. The last turn is stored under the last of `links`.

    A look-up takes the last link that the table knows.
    """

    name: str
    links: tuple[str, ...]
    parent: str = ""
    """The link of the session that began this one; empty: none is known."""
    is_named: bool = False
    """The client names it, so it is the same whatever its messages say."""

    def of_model(self, model: str, tenant: str = "") -> SessionKey:
        """The key for one model, and one tenant. `name` keeps apart tenants only, because placement is per
        model already.
        """
        name, of = (f"{tenant}/{self.name}", f"{tenant}/{model}") if tenant else (self.name, model)
        if self.is_named:
            parent = f"{of}/{self.parent}" if self.parent else ""
            return SessionKey(name, (f"{of}/{self.name}",), parent, is_named=True)
        return SessionKey(name, tuple([f"{of}/{link}" for link in self.links]))

    def of_user(self, user: str) -> SessionKey:
        """The key for one user."""
        return SessionKey(f"{user}/{self.name}", tuple([f"{user}/{link}" for link in self.links]))


def named(name: str, parent: str = "") -> SessionKey:
    """The key of a session that its client names."""
    if len(name) > MAX_SESSION_KEY_CHARS:
        name = _bounded(name)
    return SessionKey(name, (name,), parent, is_named=True)


class _Metadata(msgspec.Struct, gc=False):
    user_id: str = ""


_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_metadata_decoder = msgspec.json.Decoder(_Metadata)
_name_decoder = msgspec.json.Decoder(str | int | None)
_SESSION_IN_USER: Final = re.compile(
    r'(?:^|_)session_([\w.-]{1,128})$|"session_id"\s*:\s*"([^"\\]{1,128})"', re.ASCII
)
"""Claude Code's `user_..._session_...`, and its later object written as a text."""


def parse_sources(texts: Sequence[str]) -> tuple[SessionSource, ...]:
    """Parse `session.sources` of the configuration. Raises ConfigError that names an invalid source."""
    sources = []
    for text in texts:
        kind, _, name = text.partition(":")
        if text in ("user", "messages", "prompt_cache_key", "metadata.user_id"):
            sources.append(SessionSource(text))  # type: ignore[arg-type]
        elif text == "user:messages":
            sources.append(SessionSource("user", "messages"))
        elif kind == "header" and _TOKEN.fullmatch(name):
            sources.append(SessionSource("header", name.lower(), name.lower().encode("ascii")))
        elif kind == "cookie" and _TOKEN.fullmatch(name):
            sources.append(SessionSource("cookie", name))
        elif kind == "body" and name and all(name.split(".")):
            sources.append(SessionSource("body", name))
        else:
            raise ConfigError(
                f"session.sources: {text!r} is not `header:NAME`, `cookie:NAME`, `user`, `user:messages`, "
                "`prompt_cache_key`, `metadata.user_id`, `body:PATH` (a dotted path) or `messages`"
            )
    return tuple(sources)


def find_session_key(
    sources: Sequence[SessionSource],
    headers: Mapping[bytes, bytes],
    view: RequestView,
    body: bytes,
    chains: Chains,
) -> SessionKey | None:
    """The first non-empty key of the sources, bounded in length. None: no source has one. `headers`: by name
    in lower case. `chains`: of the requests before; they change nothing but the time that this takes.
    """
    key: str | None
    for source in sources:
        kind = source.kind
        if source.header:
            if said := headers.get(source.header):
                return named(said.decode("latin-1"), _parent(headers, source.header, said))
            continue
        if kind == "prompt_cache_key":
            if view.prompt_cache_key and (group := _name(view.prompt_cache_key)):
                return _grouped(_bounded(group), view, chains)
            continue
        if kind == "user" and source.name:
            if view.user and (links := _links(view, view.user, chains)):
                return SessionKey(links[0], links).of_user(_bounded(view.user))
            continue
        if kind == "messages":
            if links := _links(view, "", chains):
                return SessionKey(links[0], links)
            continue
        if kind == "metadata.user_id":
            key = _session_in(view.metadata) if view.metadata else None
        elif kind == "user":
            key = view.user
        elif kind == "cookie":
            key = _cookie(headers.get(b"cookie", b"").decode("latin-1"), source.name)
        else:
            key = _at_path(body, source.name.split("."))
        if key:
            return named(key)
    return None


def is_final(headers: Mapping[bytes, bytes]) -> bool:
    """The client says that this is the session's last request."""
    return any(headers.get(name, b"").strip().lower() == b"true" for name in FINAL_HEADERS)


def _parent(headers: Mapping[bytes, bytes], source: bytes, key: bytes) -> str:
    """The name of the session's parent; empty: none is said."""
    if _PARENTS.isdisjoint(headers):
        return ""
    for name in (*PARENT_HEADERS, PARENT_OF.get(source, b"")):
        if (parent := headers.get(name)) and parent != key:
            return _bounded(parent.decode("latin-1"))
    return ""


def _grouped(group: str, view: RequestView, chains: Chains) -> SessionKey:
    """A conversation of a group whose prompts begin alike."""
    links = _links(view, group, chains)
    return SessionKey(group, tuple([f"{group}/{link}" for link in links]) if links else (group,))


def _bounded(key: str) -> str:
    if len(key) <= MAX_SESSION_KEY_CHARS:
        return key
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()


def _links(view: RequestView, who: str, chains: Chains) -> tuple[str, ...]:
    """The hash chain of the request's messages, without its leading system and developer messages. Empty
    where there are too many to look at.
    """
    hashes = chains.of(who, view.messages or view.input, MAX_LINKS).hashes
    ends = range(LINK_BYTES, len(hashes) + 1, LINK_BYTES)
    return tuple([f"messages:{hashes[end - LINK_BYTES : end].hex()}" for end in ends])


def _name(json: bytes | msgspec.Raw) -> str:
    """A name that may be a number; empty for anything else."""
    try:
        value = _name_decoder.decode(json)
    except UNREADABLE:
        return ""
    return "" if value is None else str(value)


def _session_in(metadata: msgspec.Raw) -> str:
    """The session that `metadata.user_id` holds; empty: none."""
    try:
        found = _SESSION_IN_USER.search(_metadata_decoder.decode(metadata).user_id[:1024])
    except UNREADABLE:
        return ""
    return "" if found is None else found[1] or found[2]


def _cookie(header: str, name: str) -> str | None:
    """The undecoded value of a cookie (RFC 6265, section 4.2.1)."""
    for pair in header.split(";"):
        found, _, value = pair.strip().partition("=")
        if found == name:
            return value.strip('"')
    return None


def _at_path(body: bytes | msgspec.Raw, path: Sequence[str]) -> str | None:
    """The string or number at a path of object keys, or None."""
    try:
        for step in path:
            body = _member(step).decode(body).value
    except UNREADABLE:
        return None
    return _name(body) or None


@lru_cache(maxsize=64)
def _member(name: str) -> msgspec.json.Decoder[Any]:
    """Decodes one member of an object, `value`, and makes nothing of the others. Names come from the
    configuration.
    """
    return msgspec.json.Decoder(msgspec.defstruct("Member", [("value", msgspec.Raw)], rename={"value": name}))
