"""Cache salts: what the workers' parsers make of the rewritten body."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import orjson
import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.errors import RequestError
from pdserve.router.api.request_body import parse_request
from pdserve.router.tenants.rights import MAX_SALT_BYTES, isolated


class Model(pydantic.BaseModel):
    """As SGLang's request models take it."""

    model_config = pydantic.ConfigDict(extra="allow")
    cache_salt: list[str] | str | None = None


class Struct(msgspec.Struct):
    cache_salt: list[str] | str | None = None


def salts_seen(body: bytes) -> Any:
    """The salt, as every parser between the client and SGLang's scheduler understands it."""
    seen = [
        json.loads(body).get("cache_salt"),
        orjson.loads(body).get("cache_salt"),
        Model.model_validate_json(body).cache_salt,
        msgspec.json.decode(body, type=Struct).cache_salt,
    ]
    assert all(salt == seen[0] for salt in seen), seen
    return seen[0]


def rewritten(body: bytes, namespace: str) -> bytes:
    return isolated(body, parse_request(body).cache_salt, namespace)


@pytest.mark.parametrize(
    ("body", "namespace", "salt"),
    [
        (b"{}", "acme", "tenant/acme"),
        (b" \n{ } \r\n\t", "acme", "tenant/acme"),
        (b'{"model":"m"}', "acme", "tenant/acme"),
        (b'{"a":{"b":{}}}\n', "acme", "tenant/acme"),
        (b'{"a":"}"}', "acme", "tenant/acme"),
        (b'{"cache_salt":"x"}', "acme", "tenant/acme/x"),
        (b'{"cache_salt":""}', "acme", "tenant/acme"),
        (b'{"cache_salt":null}', "acme", "tenant/acme"),
        (b'{"cache_salt":["x",""]}', "acme", ["tenant/acme/x", "tenant/acme"]),
        (b'{"cache_salt":"tenant/beta"}', "acme", "tenant/acme/tenant/beta"),
        (b'{"cache_salt":"x","cache_salt":"y"}', "acme", "tenant/acme/y"),
        (b'{"cache_salt":"x","cache\\u005fsalt":"y"}', "acme", "tenant/acme/y"),
        (b'{"cache\\u005fsalt":"tenant/beta"}', "acme", "tenant/acme/tenant/beta"),
        (b'{"model":"m"}', "shared", None),
        (b'{"cache_salt":"tenant/beta"}', "shared", "shared/tenant/beta"),
        (b'{"cache_salt":["tenant/beta",""]}', "shared", ["shared/tenant/beta", ""]),
    ],
)
def test_every_parser_sees_the_tenants_salt(body: bytes, namespace: str, salt: Any) -> None:
    assert salts_seen(rewritten(body, namespace)) == salt


def test_a_salt_that_is_no_string_or_too_many_are_the_clients_fault() -> None:
    body = b'{"model":"m","messages":[]} '
    assert rewritten(body, "shared") is body, "it has none, and nothing is to be kept apart"
    many = "[" + '"",' * (MAX_SALT_BYTES // 3) + '""]'
    for salt in ("1", "true", "{}", "[1]", "[[]]", many):
        with pytest.raises(RequestError, match="256 KiB" if salt is many else "cache_salt") as caught:
            rewritten(f'{{"cache_salt":{salt}}}'.encode(), "acme")
        assert (caught.value.status, caught.value.param) == (400, "cache_salt")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
OWN = st.none() | st.text()


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(st.dictionaries(st.text(), JSON), NAMES, OWN, st.booleans())
def test_nothing_but_the_salt_is_changed(
    fields: dict[str, Any], namespace: str, own: str | None, is_spaced: bool
) -> None:
    typed = ("model", "stream", "user", "cache_salt")  # hypothesis takes names from the code, too
    fields = {name: value for name, value in fields.items() if name not in typed}
    fields |= {} if own is None else {"cache_salt": own}
    body = json.dumps(fields, indent=1 if is_spaced else None).encode()
    after = json.loads(rewritten(body, namespace))
    assert {**after, "cache_salt": None} == {**fields, "cache_salt": None}


@given(NAMES, OWN, NAMES, OWN)
def test_salts_of_two_namespaces_are_never_equal(
    one: str, own_one: str | None, two: str, own_two: str | None
) -> None:
    def salt(namespace: str, own: str | None) -> Any:
        body = json.dumps({} if own is None else {"cache_salt": own}).encode()
        return salts_seen(rewritten(body, namespace)) or None

    same_place = one == two and (own_one or "") == (own_two or "")
    assert (salt(one, own_one) == salt(two, own_two)) == same_place
