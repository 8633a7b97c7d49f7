"""The header by which the router says what an earlier stage found."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.http.cache_report import Found, parse_prefilled


@given(st.binary())
def test_any_bytes_can_be_the_header(value: bytes) -> None:
    assert all(len(found) == 3 for found in parse_prefilled(value))


def test_the_header_is_understood() -> None:
    assert parse_prefilled(b"1/2/3,4/5/6") == [Found(1, 2, 3), Found(4, 5, 6)]
    assert parse_prefilled(b"1/2/3/4/5") == parse_prefilled(b"") == []
