"""Cache isolation: every request of a tenant carries a `cache_salt` that only this router gives.

SGLang (0.5.23) takes the salt as the first link of the hash chain that names a prompt's pages, on device,
host and in the pool, so requests of different salts never find each other's pages, and no first-token time
tells one tenant what another has sent. Chat, completions and `/generate` take it as a top-level field, a
string or, for a batch, a list of them.

The body is not parsed for this: the salt is appended as its last member. Where a name comes twice, the last
one counts, in the router's parser (msgspec) as in those behind it (json, orjson, pydantic), however the
client spelt it (`cache\\u005fsalt`); tests/router/tenants/test_cache_salt.py holds all four to that.

A salt is one of: none (the shared namespace), `tenant/NAME` and `tenant/NAME/SALT`, where SALT is the
client's own, which so divides the tenant's cache further, and `shared/SALT`. Names have no slash, so no
client's salt leads out of its namespace.
"""

from __future__ import annotations

import msgspec

from pdserve.errors import RequestError
from pdserve.router.config.tenants import SHARED

_salts = msgspec.json.Decoder(str | list[str] | None)


def isolated(body: bytes, given: msgspec.Raw, namespace: str) -> bytes:
    """`body`, a JSON object whose `cache_salt` is `given` (empty: none), in a cache namespace. Raises
    RequestError (400) for a salt that is none.
    """
    try:
        salts = _salts.decode(given) if given else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise RequestError(
            400, "Invalid value for 'cache_salt': it must be a string, or a list of them.", param="cache_salt"
        ) from None
    if not salts and namespace == SHARED:
        return body
    if isinstance(salts, list):
        return _with_salt(body, [_salt(namespace, salt) for salt in salts])
    return _with_salt(body, _salt(namespace, salts or ""))


def _salt(namespace: str, own: str) -> str:
    if namespace == SHARED:
        return f"{SHARED}/{own}" if own else ""
    return f"tenant/{namespace}/{own}" if own else f"tenant/{namespace}"


def _with_salt(body: bytes, salt: str | list[str]) -> bytes:
    inside = body.rstrip(b" \t\r\n")[:-1]
    comma = b"" if inside.rstrip(b" \t\r\n").endswith(b"{") else b","
    return b'%b%b"cache_salt":%b}' % (inside, comma, msgspec.json.encode(salt))
