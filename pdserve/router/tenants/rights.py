"""What a tenant may ask for in a request's body: salts, engine fields, media, priorities.

Cache isolation: the router adds a `cache_salt` to each request of a tenant.

SGLang (0.5.23) starts the hash chain that names a prompt's pages with the salt, on device, on host and in the
pool. So requests with different salts never find each other's pages, and the time to the first token reveals
nothing about other tenants' prompts. The salt is a top-level member: a string, or a list for a batch.

Where SGLang takes it, the router appends the salt as the body's last member, and does not parse the body for
this. When a name comes twice, the last one counts, however the client spells it (`cache\u005fsalt`). That
holds for the router's parser (msgspec) and the workers' (json, orjson, pydantic);
tests/router/tenants/test_cache_salt.py checks all four.

Some endpoints of SGLang take no salt. For these the router sends it in a header, and pdserve's worker gives
it to SGLang (`engine/http/cache_salt.py`). A header has no room for the salts of a batch.

Some engines' caches take no slash in a salt. Their workers get a digest of it, in hexadecimal digits.

A salt is one of: none (the shared namespace), `tenant/NAME`, `tenant/NAME/SALT` and `shared/SALT`. SALT comes
from the client and divides its cache further. Names have no slash, so a client's SALT cannot name another
tenant's namespace.

Fields of a request by which a client controls the engine, and not only its own answer. Pure.

A router with API keys refuses them (400), unless the tenant may set them (`controls_engine`). They are not
taken out quietly: a client that sends one expects an effect. A router without keys has one user, its
operator, and passes everything on. The names are those of SGLang 0.5.23 (`GenerateReqInput`, and the request
classes of its OpenAI endpoints), and two of our own lookup.

Images, videos and sound of a request: from where a worker may fetch them for a tenant. Pure.

SGLang (0.5.23) takes media as `data:` URLs, by http(s), from `file://`, as base64, and by the path of a file.
It tries a text that is no URL as a path, so base64 and paths cannot be told apart. A client could read files
of a worker's host, and have the worker ask hosts inside its network.

A router with API keys lets through `data:` URLs, and http(s) URLs of the hosts in `media_domains`: names,
`*.example.com` for all below a name, or `*` for all names. Addresses and `localhost` must be listed as they
stand. A name may still lead to an internal address, and a host may redirect: list only hosts that you trust.
`input_audio` holds base64 that SGLang makes a `data:` URL of. So does an image of Anthropic's form
(`{"type": "image", "source": {...}}`), unless its source has a `url`.

How urgent a request is: `priority` of its body, or a header. Pure.

The number is SGLang's own. Larger ones come first, unless workers run with
`--schedule-low-priority-values-first`. A tenant orders its own requests by it in the router's queue, and
workers that run with `--enable-priority-scheduling` order those of all tenants. So a tenant may be as urgent
as its `max_priority` allows, and less urgent as it likes. A request that asks for more is refused: its client
expects an effect.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
from collections.abc import Callable, Collection, Iterator
from functools import lru_cache
from operator import attrgetter, itemgetter
from typing import Annotated, Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from pdserve.errors import RequestError
from pdserve.router.api.request_body import UNREADABLE, RequestView, decode_view, with_member, with_text
from pdserve.router.config.tenants import SHARED
from pdserve.router.native.scan import has_after

MAX_SALT_BYTES = 256 * 1024
"""Each salt of a list is made longer. Room for one of 120 characters for each of 2,048 prompts."""
SALT_HEADER: Final = b"x-pdserve-cache-salt"
MAX_HEADER_BYTES: Final = 8 * 1024
_salts = msgspec.json.Decoder(str | list[str] | None)
_one_salt = msgspec.json.Decoder(str | None)


def isolated(body: bytes, given: msgspec.Raw, namespace: str, *, is_plain: bool = False) -> bytes:
    """`body` with the salt of `namespace` appended; `is_plain`: its digest.

    `body` is a JSON object and `given` its own `cache_salt` (empty: none). Raises RequestError (400) if
    `given` is not a string or a list of strings, or too long.
    """
    if not given:
        return body if namespace == SHARED else with_text(body, _member_of(namespace, is_plain=is_plain))
    if len(given) > MAX_SALT_BYTES:
        what = f"'cache_salt' has more than {MAX_SALT_BYTES // 1024} KiB."
        raise RequestError(400, what, param="cache_salt")
    try:
        salts = _salts.decode(given)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise RequestError(
            400, "Invalid value for 'cache_salt': it must be a string, or a list of them.", param="cache_salt"
        ) from None
    if not salts:
        return isolated(body, _EMPTY, namespace, is_plain=is_plain)
    salt_of = _plain_salt if is_plain else _salt
    if isinstance(salts, list):
        return with_member(body, "cache_salt", [salt_of(namespace, salt) for salt in salts])
    return with_member(body, "cache_salt", salt_of(namespace, salts))


@lru_cache(maxsize=1024)
def _member_of(namespace: str, *, is_plain: bool) -> bytes:
    """The salt of a request that has none of its own, for `with_text`."""
    salt = (_plain_salt if is_plain else _salt)(namespace, "")
    return msgspec.json.encode({"cache_salt": salt})[1:]


def salt_line(given: msgspec.Raw, namespace: str) -> bytes:
    """The header line with the salt of `namespace`, as a JSON string in ASCII; empty for the shared one.

    `given`: the client's own salt. Raises RequestError (400) if it is no string, or too long for a header.
    """
    try:
        own = _one_salt.decode(given) if given else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise RequestError(
            400, "Invalid value for 'cache_salt': it must be a string.", param="cache_salt"
        ) from None
    salt = _salt(namespace, own or "")
    line = b"%b: %b\r\n" % (SALT_HEADER, json.dumps(salt).encode("ascii")) if salt else b""
    if len(line) > MAX_HEADER_BYTES:
        raise RequestError(
            400, f"'cache_salt' has more than {MAX_HEADER_BYTES // 1024} KiB.", param="cache_salt"
        )
    return line


def _plain_salt(namespace: str, own: str) -> str:
    salt = _salt(namespace, own)
    return hashlib.sha256(salt.encode("utf-8", "surrogatepass")).hexdigest()[:32] if salt else ""


def _salt(namespace: str, own: str) -> str:
    if namespace == SHARED:
        return f"{SHARED}/{own}" if own else ""
    return f"tenant/{namespace}/{own}" if own else f"tenant/{namespace}"


_RANK: Final = "it decides which rank computes"
_CONNECTS: Final = "it makes a worker connect to an address"
_NAMES: Final = "it could name a request or a session of others"
_CACHE: Final = "it tells caches what a prompt is"
_UNCOUNTED: Final = "what it stands for is not counted"
_METRICS: Final = "it changes what the operator measures"

ENGINE_FIELDS: Final = {
    "received_time": "it decides who is served first",
    "kv_hints": "it decides what caches keep",
    "routed_dp_rank": _RANK,
    "data_parallel_rank": _RANK,
    "disagg_prefill_dp_rank": _RANK,
    "routing_key": _RANK,
    "decode_tp_size": _RANK,
    "bootstrap_host": _CONNECTS,
    "bootstrap_port": _CONNECTS,
    "bootstrap_room": _CONNECTS,
    "bootstrap_pair_key": _CONNECTS,
    "encoder_urls": _CONNECTS,
    "http_worker_ipc": _CONNECTS,
    "need_wait_for_mm_inputs": _CONNECTS,
    "num_items_assigned": _CONNECTS,
    "custom_logit_processor": "it is code that runs in the worker",
    "rid": _NAMES,
    "session_id": _NAMES,
    "session_params": _NAMES,
    "lora_id": _NAMES,
    "extra_key": _CACHE,
    "mm_hashes": _CACHE,
    "mm_content_hashes": _CACHE,
    "input_embeds": _UNCOUNTED,
    "embed_overrides": _UNCOUNTED,
    "background": "what it computes after its answer is not counted",
    "embed_override_token_id": _UNCOUNTED,
    "query_embed_overrides": _UNCOUNTED,
    "item_embed_overrides": _UNCOUNTED,
    "positional_embed_overrides": _UNCOUNTED,
    "token_indices_to_pool": _UNCOUNTED,
    "custom_params": "it is for custom_logit_processor",
    "return_hidden_states": "it shows the inside of the model",
    "no_logs": _METRICS,
    "custom_labels": _METRICS,
    "external_trace_header": _METRICS,
    "log_metrics": _METRICS,
    "hashes": "they name pages of all tenants",
}
"""Each field, and why a tenant may not set it."""

_EMPTY: Final = msgspec.Raw(b"")
TenantView: Final = msgspec.defstruct(
    "TenantView",
    [(name, msgspec.Raw, _EMPTY) for name in (*ENGINE_FIELDS, "image_data", "video_data", "audio_data")],
    bases=(RequestView,),
    gc=False,
)
"""A `RequestView` with the fields that a tenant may not set, and SGLang's own fields of media."""
_decoder: Final = msgspec.json.Decoder(TenantView)
_given: Final = attrgetter(*ENGINE_FIELDS)


decode_tenant_request: Final[Callable[[bytes], Any]] = _decoder.decode
"""As `parse_tenant_request`, but raises `UNREADABLE`."""


def parse_tenant_request(body: bytes) -> RequestView:
    """As `parse_request`, for a router with API keys."""
    view = decode_view(_decoder, body)
    assert isinstance(view, RequestView)
    return view


def empty_tenant_request() -> RequestView:
    """As `parse_tenant_request` gives it for a body without members."""
    view = TenantView()
    assert isinstance(view, RequestView)
    return view


def check_fields(view: RequestView, but: str = "") -> None:
    """Raises RequestError (400) if the request sets a field that controls the engine, `but` for this one.
    `view`: from `parse_tenant_request`.
    """
    given = _given(view)
    if not any(given):
        return
    for (name, reason), said in zip(ENGINE_FIELDS.items(), given, strict=True):
        if said and bytes(said) != b"null" and name != but:
            message = f"You may not set '{name}': {reason}."
            raise RequestError(400, message, param=name)


_PARTS: Final = frozenset(("image_url", "video_url", "audio_url", "input_image", "image", "video", "audio"))
"""Members of a content part that hold media, in all spellings that SGLang's endpoints take."""
MAX_MARKS: Final = 1_000_000
"""Of a text that is decoded: what is made of it in memory is bounded by them, and the time that it takes."""
_MEDIA_TEXTS: Final = ("messages", "input", "query", "documents")
_MEDIA_DATA: Final = ("image_data", "video_data", "audio_data")
_media_texts: Final = attrgetter(*_MEDIA_TEXTS)
_media_data: Final = attrgetter(*_MEDIA_DATA)
_is_said: Final = itemgetter(1)
_MEDIA_NAMES: Final = tuple(b'%b"' % name.encode() for name in (*sorted(_PARTS), *_MEDIA_DATA))
"""Members that hold media, and parts' types, behind their quotes. In a text quotes would be written with a
backslash.
"""
_LETTERS: Final = b"u005", b"u006", b"u007"
"""Behind a backslash: a name may be written with escapes in place of its letters."""


def check_media(body: bytes, view: RequestView, domains: Collection[str]) -> None:
    """Raises RequestError (400) for media that would not come from the body or one of the domains. `view`:
    from `parse_tenant_request`.
    """
    if not _names_media(body):
        return
    for where, source in _sources(view):
        problem = _problem(source, domains)
        if problem:
            raise RequestError(400, f"Media in '{where}' cannot be taken: {problem}.", param=where)


def _sources(view: RequestView) -> Iterator[tuple[str, str]]:
    """(field, URL or data) of all media."""
    for field, said in filter(_is_said, zip(_MEDIA_TEXTS, _media_texts(view), strict=True)):
        if _names_media(said):
            for source in _in_parts(_decoded(said, field)):
                yield field, source
    for field, said in filter(_is_said, zip(_MEDIA_DATA, _media_data(view), strict=True)):
        for source in _texts(_decoded(said, field)):
            yield field, source


def _names_media(text: bytes | msgspec.Raw) -> bool:
    return has_after(text, b'"', _MEDIA_NAMES) or has_after(text, b"\\", _LETTERS)


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
    allowed = {domain.lower() for domain in domains}
    if host in allowed:
        return ""
    is_name = host != "localhost" and not _is_address(host)
    above = host.split(".")
    below = {"*." + ".".join(above[i:]) for i in range(1, len(above))} | {"*"}
    if is_name and below & allowed:
        return ""
    return f"{host} is not among the hosts that your operator allows (media_domains)"


def _is_address(host: str) -> bool:
    """Whether it is an IP address, also in a spelling that only resolvers take (`0x7f.1`, `2130706433`)."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return re.fullmatch(r"[0-9.]+|0x[0-9a-f.x]+", host) is not None
    return True


PRIORITY_HEADER: Final = b"x-pdserve-priority"
_NUMBER: Final = re.compile(rb"[+-]?\d{1,18}")
_priority_decoder: Final = msgspec.json.Decoder(Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)])


class Priority(NamedTuple):
    """What a request asks for."""

    urgency: int
    """More is sooner; 0: it asks for nothing."""
    to_send: int | None
    """The number that workers must be sent, since it does not stand in the body."""


NO_PRIORITY: Final = Priority(0, None)


def priority_of(
    said: msgspec.Raw, header: bytes | None, signs: Collection[int], at_most: int | None
) -> Priority:
    """What the body's member `said` (empty: there is none) asks for; without it, what the header does.

    `signs`: see `Fleet.priority_signs`. Where workers do not agree, the more urgent reading counts.
    `at_most`: the highest urgency; None: there is no bound, and workers judge the body. Raises RequestError
    (400).
    """
    if said and bytes(said) != b"null":
        try:
            number, to_send = _priority_decoder.decode(said), None
        except UNREADABLE:
            if at_most is None:
                return NO_PRIORITY
            # a worker may read a number there all the same
            message = "Invalid value for 'priority': it must be an integer of at most 64 bits."
            raise RequestError(400, message, param="priority") from None
    elif header is not None:
        if not _NUMBER.fullmatch(header):
            raise RequestError(400, f"The header {PRIORITY_HEADER.decode()} must be an integer.")
        number = to_send = int(header)
    else:
        return NO_PRIORITY
    urgency = max(sign * number for sign in signs or (1,))
    if at_most is not None and urgency > at_most:
        bound = f"at most {at_most}" if max(signs, default=1) > 0 else f"at least {-at_most}"
        raise RequestError(400, f"You may set 'priority' to {bound}.", param="priority")
    return Priority(urgency, to_send)
