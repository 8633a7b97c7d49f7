"""Forms: the few fields that the router reads, and hostile ones."""

from __future__ import annotations

import contextlib

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import RequestError
from pdserve.router.api.request_body import MAX_FIELD_BYTES, MAX_PARTS, read_form

TYPE = b"multipart/form-data; boundary=b"


def form(*parts: bytes, end: bytes = b"--b--\r\n") -> bytes:
    return b"".join(b"--b\r\n" + part + b"\r\n" for part in parts) + end


def field(name: str, value: str) -> bytes:
    return f'Content-Disposition: form-data; name="{name}"\r\n\r\n{value}'.encode()


@given(
    st.dictionaries(st.text("abc[]_", min_size=1), st.text("xyz \r\n-é", max_size=40), max_size=5),
    st.binary(max_size=99),
)
def test_a_form_of_httpx_is_read(fields: dict[str, str], sound: bytes) -> None:
    request = httpx.Request("POST", "http://x", data=fields, files={"file": ("a.wav", sound)})
    found = read_form(request.read(), request.headers["content-type"].encode())
    assert found == fields


def test_files_and_long_fields_are_stepped_over() -> None:
    upload = (
        b'Content-Disposition: form-data; name="model"; filename="model"\r\nContent-Type: audio/wav\r\n\r\nx'
    )
    parts = (
        field("model", "m"),
        upload,
        field("prompt", "p" * (MAX_FIELD_BYTES + 1)),
        field("stream", "True"),
    )
    assert read_form(form(*parts), TYPE) == {"model": "m", "stream": "True"}


def test_of_a_name_that_comes_twice_the_last_counts() -> None:
    assert read_form(form(field("model", "a"), field("model", "b")), TYPE) == {"model": "b"}


@pytest.mark.parametrize(
    "content_type",
    [
        b'multipart/form-data; boundary="b"',
        b"Multipart/Form-Data;charset=utf-8;  BOUNDARY=b",
        b"multipart/form-data; boundary=b; charset=utf-8",
    ],
)
def test_the_boundary_is_found_however_it_is_written(content_type: bytes) -> None:
    assert read_form(form(field("model", "m")), content_type) == {"model": "m"}


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (form(field("model", "m")), b"application/json"),
        (form(field("model", "m")), b"multipart/form-data"),
        (form(field("model", "m")), b"multipart/form-data; boundary="),
        (form(field("model", "m")), b"multipart/form-data; boundary=" + b"b" * 99),
        (b"", TYPE),
        (b"{}", TYPE),
        (form(field("model", "m"), end=b""), TYPE),
        (b"--b\r\n" + b"x" * 9999, TYPE),
        (b"--b\r\nno head\r\n--b--", TYPE),
        (form(*[field("model", "m")] * (MAX_PARTS + 1)), TYPE),
    ],
)
def test_what_is_no_form_is_refused(body: bytes, content_type: bytes) -> None:
    with pytest.raises(RequestError) as error:
        read_form(body, content_type)
    assert error.value.status == 400


@given(st.binary(max_size=300))
def test_no_body_raises_anything_else(rest: bytes) -> None:
    with contextlib.suppress(RequestError):
        read_form(b"--b" + rest, TYPE)
