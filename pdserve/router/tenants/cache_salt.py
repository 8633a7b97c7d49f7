"""Cache isolation: the router adds a `cache_salt` to each request of a tenant.

SGLang (0.5.23) starts the hash chain that names a prompt's pages with the salt, on device, on host and in the
pool. So requests with different salts never find each other's pages, and the time to the first token reveals
nothing about other tenants' prompts. The salt is a top-level member: a string, or a list for a batch.

Where SGLang takes it, the router appends the salt as the body's last member, and does not parse the body for
this. When a name comes twice, the last one counts, however the client spells it (`cache\\u005fsalt`). That
holds for the router's parser (msgspec) and the workers' (json, orjson, pydantic);
tests/router/tenants/test_cache_salt.py checks all four.

Some endpoints of SGLang take no salt. For these the router sends it in a header, and pdserve's worker gives
it to SGLang (`engine/http/cache_salt.py`). A header has no room for the salts of a batch.

Some engines' caches take no slash in a salt. Their workers get a digest of it, in hexadecimal digits.

A salt is one of: none (the shared namespace), `tenant/NAME`, `tenant/NAME/SALT` and `shared/SALT`. SALT comes
from the client and divides its cache further. Names have no slash, so a client's SALT cannot name another
tenant's namespace.
"""

from __future__ import annotations

import hashlib
import json
from typing import Final

import msgspec

from pdserve.errors import RequestError
from pdserve.router.api.request_body import with_member
from pdserve.router.config.tenants import SHARED

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
    if len(given) > MAX_SALT_BYTES:
        what = f"'cache_salt' has more than {MAX_SALT_BYTES // 1024} KiB."
        raise RequestError(400, what, param="cache_salt")
    try:
        salts = _salts.decode(given) if given else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise RequestError(
            400, "Invalid value for 'cache_salt': it must be a string, or a list of them.", param="cache_salt"
        ) from None
    if not salts and namespace == SHARED:
        return body
    salt_of = _plain_salt if is_plain else _salt
    if isinstance(salts, list):
        return with_member(body, "cache_salt", [salt_of(namespace, salt) for salt in salts])
    return with_member(body, "cache_salt", salt_of(namespace, salts or ""))


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
