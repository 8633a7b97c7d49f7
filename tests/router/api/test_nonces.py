"""Lines at the start of agents' prompts that change with each request are taken out, and nothing else is."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.api.nonces import MARK, without_nonce
from pdserve.router.api.request_body import parse_request

NAME = b"x-anthropic-billing-header"
LINE = "x-anthropic-billing-header: cc_version=2.1.114.76c; cc_entrypoint=cli; cch=ea6aa;"
REST = "You are a coding agent; cch=1; is not a secret."
MARKED = {"cache_control": {"type": "ephemeral"}}


def block(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def stripped(body: Any) -> tuple[Any, bytes]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    made, name = without_nonce(data, parse_request(data))
    if not name:
        assert made is data
    return json.loads(made), name


def system(text: Any) -> dict[str, Any]:
    return {"role": "system", "content": text}


USER = {"role": "user", "content": LINE}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"system": [block(LINE), block(REST, **MARKED)]}, {"system": [block(REST, **MARKED)]}),
        ({"system": [block(LINE)]}, {"system": []}),
        ({"system": [block(f"{LINE}\n{REST}")]}, {"system": [block(REST)]}),
        ({"system": f"{LINE}\n{REST}", "messages": [USER]}, {"system": REST, "messages": [USER]}),
        ({"system": f"{LINE}\r\n{REST}"}, {"system": REST}),
        ({"system": LINE}, {"system": ""}),
        ({"instructions": f"{LINE}\n{REST}", "input": "hi"}, {"instructions": REST, "input": "hi"}),
        ({"messages": [system(f"{LINE}\n{REST}"), USER]}, {"messages": [system(REST), USER]}),
        ({"messages": [system([block(LINE), block(REST)])]}, {"messages": [system([block(REST)])]}),
        ({"input": [system(LINE)]}, {"input": [system("")]}),
        (b'{"system": "x", "system" :[ {"text":"%b","type":"text"} ]}' % LINE.encode(), {"system": []}),
    ],
)  # fmt: skip
def test_the_line_is_taken_out_wherever_the_system_begins(body: Any, expected: Any) -> None:
    assert stripped(body) == (expected, NAME)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [USER]},
        {"messages": [system(REST), USER]},
        {"system": [block(REST), block(LINE)]},
        {"system": f"{REST}\n{LINE}"},
        {"system": f" {LINE}"},
        {"system": "x-anthropic-billing-header: read this first"},
        {"system": f"{LINE} and more"},
        {"system": "x-anthropic-billing-header: a=b; c"},
        {"system": {"text": LINE}},
        {"system": [LINE]},
        {"system": [[block(LINE)]]},
        {"system": [{"type": "text", "text": [LINE]}]},
        {"metadata": {"system": LINE}, "input": LINE},
        {"messages": [system({"text": LINE})], "prompt": LINE},
        {"messages": [{"role": ["system"], "content": LINE}]},
    ],
)
def test_what_is_content_stays_byte_for_byte(body: Any) -> None:
    assert stripped(body) == (body, b"")


def test_a_copy_of_the_system_elsewhere_stays() -> None:
    text = f"{LINE}\n{REST}"
    assert stripped({"metadata": {"note": text}, "system": text}) == (
        {"metadata": {"note": text}, "system": REST},
        NAME,
    )


TEXTS = st.sampled_from([LINE, REST, f"{LINE}\n{REST}", "", "\ud83d\ude00", '"', "x-anthropic-"]) | st.text()
VALUES = st.recursive(
    TEXTS | st.none() | st.integers(0, 9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "text", "type"]), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["system", "instructions", "messages", "input", "x"]), VALUES))
def test_whatever_the_body_is_at_most_the_start_of_the_system_changes(body: dict[str, Any]) -> None:
    body = json.loads(json.dumps(body))  # halves of a surrogate pair find each other
    made, name = stripped(body)
    if not name:
        assert made == body
        return
    [changed] = [member for member in body if made[member] != body[member]]
    assert changed != "x"
    assert made.keys() == body.keys()
    before, after = json.dumps(body[changed]), json.dumps(made[changed])
    assert before.count(LINE) == after.count(LINE) + 1


def test_a_body_made_to_cost_time_costs_little() -> None:
    text = "x-anthropic-a:" + " a=b;" * 200_000
    many = b'{"system":[' + b'{"text":"x-anthropic-"},' * 100_000 + b"{}]}"
    begun_s = time.process_time()
    assert stripped({"system": text})[1] == b""
    assert stripped(many)[1] == b""
    assert MARK in many
    assert time.process_time() - begun_s < 2.0
