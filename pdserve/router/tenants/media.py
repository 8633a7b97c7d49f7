"""Images, videos and sound of a request: from where a worker may fetch them for a tenant. Pure.

SGLang (0.5.23) takes media as `data:` URLs, by http(s), from `file://`, as base64, and by the path of a file.
It tries a text that is no URL as a path, so base64 and paths cannot be told apart. A client could read files
of a worker's host, and have the worker ask hosts inside its network.

A router with API keys lets through `data:` URLs, and http(s) URLs of the hosts in `media_domains`: names,
`*.example.com` for all below a name, or `*` for all names. Addresses and `localhost` must be listed as they
stand. A name may still lead to an internal address, and a host may redirect: list only hosts that you trust.
`input_audio` holds base64 that SGLang makes a `data:` URL of. So does an image of Anthropic's form
(`{"type": "image", "source": {...}}`), unless its source has a `url`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterator
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from pdserve.errors import RequestError
from pdserve.router.api.request_body import UNREADABLE, RequestView

_PARTS: Final = frozenset(("image_url", "video_url", "audio_url", "input_image", "image", "video", "audio"))
"""Members of a content part that hold media, in all spellings that SGLang's endpoints take."""
MAX_MARKS: Final = 1_000_000
"""Of a text that is decoded: what is made of it in memory is bounded by them, and the time that it takes."""
_FIELDS: Final = ("image_data", "video_data", "audio_data")
_NAME: Final = re.compile(rb'"[iva](?:mage|ideo|udio|nput_image)(?:_url)?"')
"""A member that holds media, or a part's type. In a text its quotes would be written with a backslash. Every
prompt of a tenant is searched, so it begins with a byte that is rare, for which a regular expression is fast.
"""
_ESCAPE: Final = b"\\u00"
_LETTER: Final = re.compile(rb"\\u00[5-7]")
"""A name may be written with escapes in place of its letters."""


def check_media(view: RequestView, domains: Collection[str]) -> None:
    """Raises RequestError (400) for media that would not come from the body or one of the domains. `view`:
    from `parse_tenant_request`.
    """
    for where, source in _sources(view):
        problem = _problem(source, domains)
        if problem:
            raise RequestError(400, f"Media in '{where}' cannot be taken: {problem}.", param=where)


def _sources(view: RequestView) -> Iterator[tuple[str, str]]:
    """(field, URL or data) of all media."""
    for field in ("messages", "input", "query", "documents"):
        said: msgspec.Raw = getattr(view, field)
        if said and _names_media(bytes(said)):
            for source in _in_parts(_decoded(said, field)):
                yield field, source
    for field in _FIELDS:
        said = getattr(view, field)
        if said:
            for source in _texts(_decoded(said, field)):
                yield field, source


def _names_media(text: bytes) -> bool:
    return _NAME.search(text) is not None or (_ESCAPE in text and _LETTER.search(text) is not None)


def _decoded(said: msgspec.Raw, field: str) -> Any:
    """Raises RequestError (400)."""
    text = bytes(said)
    if sum(text.count(mark) for mark in (b"{", b"[", b'"', b",")) > MAX_MARKS:
        what = f"it has more than {MAX_MARKS:,} brackets, quotes and commas"
        message = f"Media in '{field}' cannot be checked: {what}."
        raise RequestError(400, message, param=field)
    try:
        return msgspec.json.decode(said)
    except UNREADABLE as error:
        raise RequestError(400, f"Invalid value for '{field}': {error}.", param=field) from None


def _in_parts(value: Any) -> Iterator[str]:
    """All text below members that hold media."""
    waiting = [value]  # not by recursion: a body may be nested deeply
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            is_image = each.get("type") == "image"
            for name, inner in each.items():
                if name in _PARTS:
                    yield from _texts(inner)
                elif is_image and name == "source" and isinstance(inner, dict):
                    yield from _texts(inner.get("url"))
                else:
                    waiting.append(inner)
        elif isinstance(each, list):
            waiting += each


def _texts(value: Any) -> Iterator[str]:
    """The URLs and data in what a member holds: text, lists of it, or objects with `url` or `data`."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, list):
            waiting += each
        elif isinstance(each, dict):
            waiting += [inner for name, inner in each.items() if name not in ("detail", "format", "id")]


def _problem(source: str, domains: Collection[str]) -> str:
    """Why a worker may not load it; empty if it may."""
    if source.startswith("data:"):
        return ""
    if source.startswith(("http://", "https://")):
        return _domain_problem(source, domains)
    return "it must be a data: URL, or an https: URL of a host that is allowed" if source else ""


def _domain_problem(url: str, domains: Collection[str]) -> str:
    try:
        host = (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        host = ""
    if not host or any(character in url for character in "\\\t\r\n@ "):  # readers differ on such a URL's host
        return "its URL is malformed"
    if host in domains:
        return ""
    is_name = host != "localhost" and not _is_address(host)
    above = host.split(".")
    below = {"*." + ".".join(above[i:]) for i in range(1, len(above))} | {"*"}
    if is_name and below & set(domains):
        return ""
    return f"{host} is not among the hosts that your operator allows (media_domains)"


def _is_address(host: str) -> bool:
    """Whether it is an IP address, also in a spelling that only resolvers take (`0x7f.1`, `2130706433`)."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return re.fullmatch(r"[0-9.]+|0x[0-9a-f.x]+", host) is not None
    return True
