"""What tenants may not ask of workers: media of other hosts, and fields that control the engine."""

from __future__ import annotations

import inspect
import json
import time
from typing import Any

import pytest

from pdserve.errors import RequestError
from pdserve.router.api.request_body import parse_request
from pdserve.router.tenants.rights import ENGINE_FIELDS, check_fields, check_media, parse_tenant_request

JPEG = "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAgGBgcGBQgHBwcJCQgKDBQNDAsLDBkSEw8UHRofHh0aHBwg2Q=="
DOMAINS = ("Cdn.example.com", "*.images.example.ORG", "10.0.0.9")


def chat(part: dict[str, Any]) -> bytes:
    content = [{"type": "text", "text": "what is this?"}, part]
    return json.dumps({"messages": [{"role": "user", "content": content}]}).encode()


def image(url: str) -> bytes:
    return chat({"type": "image_url", "image_url": {"url": url, "detail": "low"}})


def checked(body: bytes, *domains: str) -> None:
    check_media(body, parse_tenant_request(body), domains)


TEXT = 'see image_url: file:///etc/passwd and {"image_url": "file:///x"}'


@pytest.mark.parametrize(
    "body",
    [
        image("data:image/png;base64,AAAA"),
        image(f"data:image/jpeg;base64,{JPEG}"),
        image("https://cdn.example.com/a.png"),
        image("http://CDN.example.com:8080/a.png?x=1"),
        image("https://a.images.example.org/a"),
        image("https://a.b.images.example.org/a"),
        image("http://10.0.0.9/a.png"),
        chat({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}),
        chat({"type": "image", "source": {"type": "url", "url": "https://cdn.example.com/a.png"}}),
        chat({"type": "search_result", "source": "https://anywhere.net/image", "content": []}),
        chat({"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}),  # always data
        json.dumps({"messages": [{"role": "user", "content": TEXT}], "prompt": TEXT}).encode(),
    ],
)
def test_media_of_the_request_and_of_allowed_hosts_and_text_about_media_are_taken(body: bytes) -> None:
    checked(body, *DOMAINS)


def test_every_name_is_no_address() -> None:
    checked(image("https://anything.example/a"), "*")
    for url in ("http://127.0.0.1/a", "http://localhost/a", "http://0x7f.1/a", "http://[::1]/a"):
        with pytest.raises(RequestError):
            checked(image(url), "*")


def test_messages_nested_without_end_or_of_millions_of_parts_are_refused_before_they_are_made() -> None:
    deep = b"[" * 5000 + b'"image"' + b"]" * 5000
    with pytest.raises(RequestError):
        checked(b'{"messages": %b}' % deep)
    for many in (b"[]", b"{}", b'""', b"1"):
        with pytest.raises(RequestError, match="cannot be checked"):
            checked(b'{"messages": ["image"' + (b"," + many) * 1_000_001 + b"]}")


HOSTILE = [
    "file:///etc/passwd",
    "FILE:///etc/passwd",
    "/etc/ssl/private/picture.png",
    "/etc/passwd",
    "secret",
    JPEG,
    "../../secret.jpg",
    "secretpng",
    "AAAA.JPG",
    "ftp://cdn.example.com/a",
    "http://127.0.0.1:8100/flush_cache",
    "http://localhost/a",
    "http://[::1]/a",
    "http://169.254.169.254/latest/meta-data",
    "http://2130706433/a",
    "http://0x7f.1/a",
    "https://other.example.com/a.png",
    "https://images.example.org/a",
    "https://images.example.org.evil.net/a",
    "https://cdn.example.com@evil.net/a",
    "https://evil.net\\\\@cdn.example.com/a",
    "https://cdn.example.com\t.evil.net/a",
    "http://[broken/a",
    "http:///a",
]


@pytest.mark.parametrize(
    "body",
    [
        image("file:///x").replace(b"image_url", b"im\\u0061ge_url"),
        chat({"type": "image_url", "image_url": "file:///x"}),
        chat({"type": "video_url", "video_url": {"url": "file:///x"}}),
        chat({"type": "audio_url", "audio_url": {"url": "file:///x"}}),
        json.dumps({"text": "a", "image_data": "/etc/passwd"}).encode(),
        json.dumps({"text": "a", "image_data": "file:///x"}).encode(),
        json.dumps({"text": "a", "image_data": ["data:,", ["file:///x"]]}).encode(),
        json.dumps({"text": "a", "video_data": [{"url": "/etc/x.mp4"}]}).encode(),
        json.dumps({"text": "a", "audio_data": "http://127.0.0.1/a"}).encode(),
        json.dumps({"input": [{"text": "a", "image": "file:///x"}]}).encode(),
    ],
)
def test_wherever_media_stand_they_are_seen(body: bytes) -> None:
    with pytest.raises(RequestError):
        checked(body)


@pytest.mark.parametrize("url", HOSTILE)
def test_files_and_other_hosts_are_refused_in_openais_form_and_in_anthropics(url: str) -> None:
    source = {"type": "image", "source": {"type": "url", "url": url}}
    for body in (
        image(url),
        chat(source),
        chat({"type": "tool_result", "content": [source]}),
        json.dumps({"documents": [[{"type": "image_url", "image_url": {"url": url}}]]}).encode(),
        json.dumps({"query": [{"type": "image_url", "image_url": {"url": url}}]}).encode(),
    ):
        for domains in ((), DOMAINS):
            with pytest.raises(RequestError, match="cannot be taken") as error:
                checked(body, *domains)
            assert error.value.status == 400


def test_a_prompt_of_a_megabyte_is_looked_through_in_a_moment() -> None:
    """Byte by byte with a regular expression it took 29 ms and more, in which no stream moved."""
    for text in (
        "The quick brown fox jumps over the lazy dog, and says what it sees.\n" * 16_000,
        'def show(image):\n    return f"<img src={image.url}>"  # "image_url": not a member\n' * 14_000,
    ):
        body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
        view, spent_s = parse_tenant_request(body), []
        for _ in range(10):
            begun_s = time.thread_time()
            check_media(body, view, ())
            spent_s.append(time.thread_time() - begun_s)
        assert min(spent_s) < 0.005


# --- Fields that control the engine: refused from tenants, whatever their spelling


REQUEST: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}


def check_engine_fields(body: bytes) -> None:
    check_fields(parse_tenant_request(body))


@pytest.mark.parametrize("field", ENGINE_FIELDS)
def test_each_is_refused_whatever_its_value(field: str) -> None:
    for value in (0, 1, "", "x", [], {"a": 1}, False):
        with pytest.raises(RequestError, match=f"'{field}'") as error:
            check_engine_fields(json.dumps({**REQUEST, field: value}).encode())
        assert error.value.status == 400


def test_a_name_written_with_escapes_is_the_same_name_and_of_one_that_comes_twice_the_last_counts() -> None:
    for body in (b'{"r\\u0069d": "x"}', b'{"rid": null, "rid": "x"}'):
        with pytest.raises(RequestError, match="'rid'"):
            check_engine_fields(body)


def test_what_shapes_ones_own_answer_passes() -> None:
    schema = {"function": {"parameters": {"properties": {"priority": {"type": "integer"}}}}}
    quoted = [{"role": "user", "content": '{"priority": 5, "rid": "x"}'}]
    for more in (
        {},
        {"session_id": None, "rid": None},
        {"messages": quoted},
        {"tools": [schema]},
        {"temperature": 0.5, "user": "u", "seed": 1, "top_logprobs": 2, "regex": "a*"},
    ):
        encoded = json.dumps(REQUEST | more).encode()
        check_engine_fields(encoded)
        view, plain = parse_tenant_request(encoded), parse_request(encoded)
        for name in ("model", "stream", "messages"):
            assert getattr(view, name) == getattr(plain, name)


def test_the_table_names_fields_that_this_sglang_has() -> None:
    """A name that SGLang gave up, or spells otherwise now, would protect nothing."""
    from sglang.srt.entrypoints.openai import protocol
    from sglang.srt.managers.io_struct import GenerateReqInput

    from pdserve.decode.lookup import Asked

    known = set(inspect.signature(GenerateReqInput).parameters) | {"kv_hints"}
    names = ("ChatCompletionRequest", "CompletionRequest", "EmbeddingRequest", "ScoringRequest")
    for request in (getattr(protocol, name) for name in names):
        known |= set(request.model_fields)
    known |= set(Asked.__struct_fields__)  # of our own look-up
    assert set(ENGINE_FIELDS) <= known
