"""What the router reads of a JSON body."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import RequestError
from pdserve.router.api.endpoints import ENDPOINTS
from pdserve.router.api.request_body import (
    RequestView,
    asks_about_prompt,
    count_candidates,
    count_choices,
    count_prompts,
    estimate_prompt_tokens,
    has_media,
    has_several_prompts,
    parse_request,
)
from tests.support.memory import peak_bytes

KNOWN = set(RequestView.__struct_fields__)
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(st.dictionaries(st.text().filter(lambda k: k not in KNOWN), JSON_VALUES))
def test_any_other_parameter_passes(body: dict[str, object]) -> None:
    view = parse_request(json.dumps(body).encode())
    assert view.model is None


@given(st.binary())
def test_any_bytes_are_understood_or_refused_as_bad_request(body: bytes) -> None:
    status = 200
    try:
        parse_request(body)
    except RequestError as error:
        status = error.status
    assert status in (200, 400)


@pytest.mark.parametrize(
    ("body", "said", "param"),
    [
        (b'{"model": "m"', "not valid JSON", None),
        (b"", "not valid JSON", None),
        (b"[1]", "must be a JSON object", None),
        (b'{"model": 3}', "'model'", "model"),
        (b'{"stream": "yes"}', "'stream'", "stream"),
        (b'{"model": "\xff"}', "not valid JSON", None),
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply", None),
    ],
)
def test_bad_bodies_are_named(body: bytes, said: str, param: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        parse_request(body)
    assert caught.value.status == 400
    assert said in str(caught.value)
    assert caught.value.param == param


@pytest.mark.parametrize("nothing", ["null", "[]", '""', "[ ]"])
def test_a_field_with_nothing_in_it_does_not_hide_a_batch(nothing: str) -> None:
    view = parse_request(b'{"text": %b ,"input_ids":[[1],[2,3]]}' % nothing.encode())
    assert bytes(prompt := view.prompt_json(ENDPOINTS["/generate"].prompt_fields)) == b"[[1],[2,3]]"
    assert has_several_prompts(prompt)


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/chat/completions", b'[{"a":1}]'),
        ("/v1/completions", b'["a","b"]'),
        ("/v1/embeddings", b'["c","d","e"]'),
        ("/generate", b'["f","g"]'),
    ],
)
def test_a_field_of_another_route_is_not_taken_for_the_prompt(path: str, prompt: bytes) -> None:
    body = b'{"messages":[{"a":1}],"prompt":["a","b"],"input":["c","d","e"],"text":["f","g"]}'
    assert bytes(parse_request(body).prompt_json(ENDPOINTS[path].prompt_fields)) == prompt


@pytest.mark.parametrize(
    ("body", "prompts", "choices"),
    [
        (b'{"prompt": "a"}', 1, 1),
        (b'{"prompt": "a", "n": 3}', 1, 3),
        (b'{"prompt": "a", "n": 3, "best_of": 5}', 1, 5),
        (b'{"prompt": "a", "n": null, "best_of": null}', 1, 1),
        (b'{"prompt": "a", "n": 2e1}', 1, 20),
        (b'{"prompt": "a", "n": "7"}', 1, 7),
        (b'{"prompt": "a", "n": "1_000"}', 1, 1000),
        (b'{"prompt": "a", "n": " +40 "}', 1, 40),
        (b'{"prompt": "a", "n": "5%b"}' % (b" " * 99), 1, 10**9),
        (b'{"prompt": "a", "n": "nan"}', 1, 1),
        (b'{"prompt": "a", "n": "inf"}', 1, 10**9),
        (b'{"prompt": "a", "n": "many"}', 1, 1),
        (b'{"prompt": "a", "n": -4}', 1, 1),
        (b'{"prompt": "a", "n": 1e300}', 1, 10**9),
        (b'{"prompt": "a", "\\u006e": 9}', 1, 9),
        (b'{"prompt": ["a", "b", "c"], "n": 2}', 3, 2),
        (b'{"prompt": [1, 2, 3]}', 1, 1),
        (b'{"prompt": [[1, 2], [3]]}', 2, 1),
    ],
)
def test_answers_of_a_request_are_counted_as_workers_read_them(
    body: bytes, prompts: int, choices: int
) -> None:
    view = parse_request(body)
    assert count_prompts(view.prompt, 100) == prompts
    assert count_candidates(view, "") == choices


def test_best_of_is_computed_and_not_answered() -> None:
    view = parse_request(b'{"prompt": "a", "n": 2, "best_of": 5}')
    assert (count_choices(view, ""), count_candidates(view, "")) == (2, 5)


@pytest.mark.parametrize(
    ("sampling", "choices"),
    [
        (b'{"n": 4}', 4),
        (b"null", 1),
        (b'[{"n": 2}, null, {"n": 6}]', 6),
        (b'{"temperature": 1}', 1),
        (b"7", 1),
    ],
)
def test_answers_are_counted_in_sampling_parameters_too(sampling: bytes, choices: int) -> None:
    view = parse_request(b'{"text": "a", "n": 99, "sampling_params": %b}' % sampling)
    assert count_choices(view, "sampling_params") == count_candidates(view, "sampling_params") == choices


def test_an_image_counts_nothing_until_the_worker_says() -> None:
    text = "what is this? " * 10
    image = "data:image/png;base64," + "A" * 1_400_000
    parts = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": image}}]
    messages = msgspec.json.encode([{"role": "user", "content": parts}])
    assert estimate_prompt_tokens(messages) < 100
    assert estimate_prompt_tokens(messages.replace(image.encode(), b"")) <= estimate_prompt_tokens(messages)


@pytest.mark.parametrize(
    "prompt",
    [
        b"[" + b"[]," * 100_000 + b"[]]",
        b'["a"' + b',""' * 100_000 + b"]",
        b"[" + b"[1,2]," * 100_000 + b"[3]]",
    ],
)
def test_of_too_many_prompts_no_more_are_looked_at_than_needed(prompt: bytes) -> None:
    assert count_prompts(prompt, 50) == 51


def test_prompts_with_quotes_and_brackets_in_them_are_counted_right() -> None:
    texts = ['a "quoted" [text], with ] and , in it', "\\", '\\"', "[", "ä\n"]
    assert count_prompts(msgspec.json.encode(texts), 50) == len(texts)


def test_marks_of_media_without_end_cost_no_more_than_their_length() -> None:
    for text in (b";base64," * 200_000, b'";base64,"' * 200_000, b"data:" * 200_000 + b";base64,"):
        assert 0 <= estimate_prompt_tokens(b'[{"content": "%b"}]' % text) <= len(text)


def test_objects_to_embed_are_prompts_and_messages_are_none() -> None:
    objects = b'[{"text": "a {"}, {"text": "b"}, {"image": "c"}]'
    assert count_prompts(objects, 50, may_be_objects=True) == 3
    assert count_prompts(objects, 50) == 1
    assert count_prompts(b"[" + b"{}," * 300_000 + b"{}]", 50, may_be_objects=True) == 51


def test_a_text_of_escapes_takes_no_more_memory_than_its_length() -> None:
    prompt = b'["' + b"\\n" * 1_000_000 + b'"]'
    assert peak_bytes(lambda: count_prompts(prompt, 50)) < 2 * len(prompt)


@pytest.mark.parametrize(
    ("body", "has"),
    [
        ({"messages": [{"content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}]}, True),
        ({"messages": [{"content": [{"type": "input_audio", "input_audio": {"data": "x"}}]}]}, True),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "input_image": "x"}]}]}, True),
        ({"text": "x", "image_data": ["x"]}, True),
        ({"text": "x", "image_data": [], "video_data": None}, False),
        ({"messages": [{"role": "user", "content": 'write {"image_url": 1}'}]}, False),
        ({"messages": [{"role": "user", "content": "an image_url"}]}, False),
    ],
)
def test_images_and_the_like_are_known_by_the_members_that_hold_them(
    body: dict[str, object], has: bool
) -> None:
    assert has_media(parse_request(json.dumps(body).encode())) is has


# --- Which requests need a worker that computes their prompt


PLAIN = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"echo": False, "logprobs": True, "top_logprobs": 5},
        {"return_logprob": True, "logprob_start_len": -1},
        {"session_id": None, "return_hidden_states": False, "image_data": None},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": '"image_url": "a"'}]}]},
        {"tools": [{"function": {"parameters": {"image_url": {}}}}]},
    ],
)
def test_ordinary_requests_do_not(more: dict[str, Any]) -> None:
    assert not asks_about_prompt(parse_request(json.dumps(PLAIN | more).encode()))


@pytest.mark.parametrize(
    "more",
    [
        {"echo": True},
        {"logprob_start_len": 0},
        {"logprob_start_len": [-1]},
        {"return_hidden_states": "last"},
        {"session_params": {"id": "x"}},
        {"input_embeds": [[0.5]]},
        {"image_data": "x.png"},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": ""}}]}]},
    ],
)
def test_those_about_the_prompt_and_with_media_do(more: dict[str, Any]) -> None:
    assert asks_about_prompt(parse_request(json.dumps(PLAIN | more).encode()))
