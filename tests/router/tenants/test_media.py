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
DOMAINS = ("cdn.example.com", "*.images.example.org", "10.0.0.9")


def chat(part: dict[str, Any]) -> bytes:
    content = [{"type": "text", "text": "what is this?"}, part]
    return json.dumps({"messages": [{"role": "user", "content": content}]}).encode()


def image(url: str) -> bytes:
    return chat({"type": "image_url", "image_url": {"url": url, "detail": "low"}})


def checked(body: bytes, *domains: str) -> None:
    check_media(parse_tenant_request(body), domains)


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64,AAAA",
        f"data:image/jpeg;base64,{JPEG}",
        "https://cdn.example.com/a.png",
        "http://CDN.example.com:8080/a.png?x=1",
        "https://a.images.example.org/a",
        "https://a.b.images.example.org/a",
        "http://10.0.0.9/a.png",
    ],
)
def test_media_of_the_request_and_of_allowed_hosts_are_taken(url: str) -> None:
    checked(image(url), *DOMAINS)


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
    "https://images.example.org.evil.net/a",
    "https://cdn.example.com@evil.net/a",
    "https://evil.net\\\\@cdn.example.com/a",
    "https://cdn.example.com\t.evil.net/a",
    "http://[broken/a",
    "http:///a",
]


@pytest.mark.parametrize("url", HOSTILE)
def test_files_and_other_hosts_are_refused(url: str) -> None:
    for domains in ((), DOMAINS):
        with pytest.raises(RequestError) as error:
            checked(image(url), *domains)
        assert error.value.status == 400
        assert "'messages'" in str(error.value)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1/a", "http://localhost/a", "http://0x7f.1/a", "http://[::1]/a"]
)
def test_every_name_is_no_address(url: str) -> None:
    checked(image("https://anything.example/a"), "*")
    with pytest.raises(RequestError):
        checked(image(url), "*")


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


def test_sound_in_openais_form_is_always_data() -> None:
    checked(chat({"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}))


def test_text_about_images_is_text() -> None:
    content = 'see image_url: file:///etc/passwd and {"image_url": "file:///x"}'
    checked(json.dumps({"messages": [{"role": "user", "content": content}], "prompt": content}).encode())


def test_messages_nested_without_end_are_refused() -> None:
    deep = b"[" * 5000 + b'"image"' + b"]" * 5000
    with pytest.raises(RequestError):
        checked(b'{"messages": %b}' % deep)


@pytest.mark.parametrize("many", [b"[]", b"{}", b'""', b"1"])
def test_messages_of_millions_of_parts_are_refused_before_they_are_made(many: bytes) -> None:
    with pytest.raises(RequestError, match="cannot be checked"):
        checked(b'{"messages": ["image"' + (b"," + many) * 1_000_001 + b"]}")


def anthropics(source: Any, **more: Any) -> bytes:
    return chat({"type": "image", "source": source} | more)


@pytest.mark.parametrize("url", HOSTILE)
def test_images_of_anthropics_form_come_from_allowed_hosts_only(url: str) -> None:
    for body in (
        anthropics({"type": "url", "url": url}),
        chat({"type": "tool_result", "content": [{"type": "image", "source": {"type": "url", "url": url}}]}),
        json.dumps({"documents": [[{"type": "image_url", "image_url": {"url": url}}]]}).encode(),
        json.dumps({"query": [{"type": "image_url", "image_url": {"url": url}}]}).encode(),
    ):
        with pytest.raises(RequestError, match="cannot be taken"):
            checked(body, *DOMAINS)


def test_images_of_anthropics_form_may_be_in_the_request_and_sources_of_texts_are_no_media() -> None:
    checked(anthropics({"type": "base64", "media_type": "image/png", "data": "AAAA"}))
    checked(anthropics({"type": "url", "url": "https://cdn.example.com/a.png"}), *DOMAINS)
    checked(chat({"type": "search_result", "source": "https://anywhere.net/image", "content": []}))


@pytest.mark.parametrize(
    "text",
    [
        "The quick brown fox jumps over the lazy dog, and says what it sees.\n" * 16_000,
        'def show(image):\n    return f"<img src={image.url}>"  # "image_url": not a member\n' * 14_000,
    ],
)
def test_a_prompt_of_a_megabyte_is_looked_through_in_a_moment(text: str) -> None:
    """Byte by byte with a regular expression it took 29 ms and more, in which no stream moved."""
    view = parse_tenant_request(json.dumps({"messages": [{"role": "user", "content": text}]}).encode())
    spent_s = []
    for _ in range(10):
        begun_s = time.thread_time()
        check_media(view, ())
        spent_s.append(time.thread_time() - begun_s)
    assert min(spent_s) < 0.005


# --- Fields that control the engine: refused from tenants, whatever their spelling


REQUEST: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}


def check_engine_fields(body: bytes) -> None:
    check_fields(parse_tenant_request(body))


@pytest.mark.parametrize("field", ENGINE_FIELDS)
@pytest.mark.parametrize("value", [0, 1, "", "x", [], {"a": 1}, False])
def test_each_is_refused_whatever_its_value(field: str, value: object) -> None:
    with pytest.raises(RequestError) as error:
        check_engine_fields(json.dumps({**REQUEST, field: value}).encode())
    assert error.value.status == 400
    assert f"'{field}'" in str(error.value)


def test_a_name_written_with_escapes_is_the_same_name() -> None:
    with pytest.raises(RequestError, match="'rid'"):
        check_engine_fields(b'{"r\\u0069d": "x"}')


def test_of_a_name_that_comes_twice_the_last_counts_as_for_the_engine() -> None:
    with pytest.raises(RequestError):
        check_engine_fields(b'{"rid": null, "rid": "x"}')


@pytest.mark.parametrize(
    "body",
    [
        REQUEST,
        {**REQUEST, "session_id": None, "rid": None},
        {**REQUEST, "messages": [{"role": "user", "content": '{"priority": 5, "rid": "x"}'}]},
        {
            **REQUEST,
            "tools": [{"function": {"parameters": {"properties": {"priority": {"type": "integer"}}}}}],
        },
        {**REQUEST, "temperature": 0.5, "user": "u", "seed": 1, "top_logprobs": 2, "regex": "a*"},
    ],
)
def test_what_shapes_ones_own_answer_passes(body: dict[str, Any]) -> None:
    encoded = json.dumps(body).encode()
    check_engine_fields(encoded)
    view, plain = parse_tenant_request(encoded), parse_request(encoded)
    assert (view.model, view.stream, bytes(view.messages)) == (
        plain.model,
        plain.stream,
        bytes(plain.messages),
    )


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
