"""What a turn changed of the one before it, against a model that looks at the messages themselves."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.api.request_body import parse_request
from pdserve.router.sessions.canonical import chain_of
from pdserve.router.sessions.history import MAX_MESSAGES, Change, History, change_of, turn_of
from pdserve.router.sessions.keys import named
from tests.support.agents import CLIENTS, TURNS, Client
from tests.support.memory import peak_bytes

TTL_S = 3600.0


def change(before: dict[str, Any], now: dict[str, Any]) -> Change | None:
    one, two = (turn_of(parse_request(json.dumps(body).encode())) for body in (before, now))
    return change_of(one, two)


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


TOOLS = [{"name": "ls"}]
LONG = "word " * 400
BODY: dict[str, Any] = {"system": LONG, "tools": TOOLS, "messages": [user(LONG), user("b"), user("c")]}


@pytest.mark.parametrize(
    ("more", "reason", "tokens"),
    [
        ({}, None, 0),
        ({"messages": [*BODY["messages"], user("d")]}, None, 0),
        ({"system": [{"type": "text", "text": LONG}]}, None, 0),
        ({"system": f"{LONG}!"}, "system_changed", 1000),
        ({"tools": []}, "tools_changed", 500),
        ({"tools": [], "system": ""}, "tools_changed", 1000),
        ({"messages": [user("x"), *BODY["messages"][1:]]}, "messages_changed", 500),
        ({"messages": [BODY["messages"][0], user("x"), user("c")]}, "messages_changed", 0),
        ({"messages": BODY["messages"][:1]}, "messages_changed", 0),
    ],
)
def test_the_first_part_that_changed_is_named(more: dict[str, Any], reason: str | None, tokens: int) -> None:
    found = change(BODY, {**BODY, **more})
    assert (found and found.reason) == reason
    assert found is None or tokens <= found.tokens <= tokens + 20


MARKED = [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}]


def test_a_mark_that_moves_on_changes_nothing() -> None:
    plain = [{"type": "text", "text": LONG}]
    before = {"system": MARKED, "messages": [user(MARKED)]}
    assert change(before, {"system": plain, "messages": [user(LONG), user("b")]}) is None


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_agents_that_only_go_on_change_nothing_but_their_nonce(client: Client) -> None:
    answers = [f"Answer {number}" for number in range(TURNS)]
    for turn in range(1, TURNS):
        found = change(client.body(turn - 1, answers), client.body(turn, answers))
        assert (found and found.reason) == ("system_changed" if client.name == "Claude Code" else None)


TEXTS = st.lists(st.sampled_from("abc"), max_size=6)


@given(TEXTS, TEXTS)
def test_messages_are_compared_one_by_one(before: list[str], now: list[str]) -> None:
    found = change({"messages": [*map(user, before)]}, {"messages": [*map(user, now)]})
    assert (found is None) == (now[: len(before)] == before)


def test_only_the_first_messages_of_a_very_long_conversation_are_compared() -> None:
    many = [user(str(number)) for number in range(MAX_MESSAGES + 2)]
    assert change({"messages": many}, {"messages": [*many[:-1], user("x")]}) is None
    assert change({"messages": many}, {"messages": [user("x"), *many[1:]]}) is not None


@pytest.mark.parametrize("messages", ["hi", None, 5, [5], [{"role": 5}], {"a": 1}])
def test_what_is_no_list_of_messages_has_no_history(messages: object) -> None:
    assert change({"messages": messages}, {"messages": messages}) is None


def test_the_sessions_that_were_seen_last_are_followed() -> None:
    history, view = History(TTL_S, capacity=2), parse_request(json.dumps(BODY).encode())
    seen = [history.follow(named(name), view, 0.0)[0] for name in "abacb"]
    assert seen == [False, False, True, False, False]
    assert len(history) == 2


def test_sessions_are_forgotten_some_time_after_their_last_turn() -> None:
    history, view = History(TTL_S), parse_request(json.dumps(BODY).encode())

    def knew(name: str, now_s: float) -> bool:
        return history.follow(named(name), view, now_s)[0]

    assert not any(knew(f"old {number}", 0.0) for number in range(50))
    assert knew("old 7", TTL_S)
    assert not knew("old 8", TTL_S + 1)
    for number in range(50):
        knew(f"new {number}", TTL_S + 1)
    assert knew("old 7", TTL_S + 1)
    assert len(history) == 52  # no old one but these two


def test_what_an_agent_asks_in_between_is_no_change() -> None:
    history, name = History(TTL_S), named("s")
    title = {"system": "Give a title.", "messages": [user("What is this about?"), user(LONG)]}
    main = [BODY, {**BODY, "messages": [*BODY["messages"], user("d")]}]
    said = [BODY, title, main[1], title, {**main[1], "system": "x"}]
    views = [parse_request(json.dumps(body).encode()) for body in said]
    changes = [history.follow(name, view, 0.0)[1] for view in views]
    assert [change and change.reason for change in changes] == [None, None, None, None, "system_changed"]


MESSAGES = st.lists(
    st.one_of(
        st.builds(
            dict,
            role=st.sampled_from(["user", "system", "tool"]),
            content=st.sampled_from(["a", "b]", "é, {"]),
        ),
        st.builds(
            lambda text: user([{"type": "text", "text": text, "cache_control": {}}]), st.sampled_from("ab")
        ),
        st.just({"content": "a"}),
    ),
    max_size=12,
)


@given(MESSAGES, MESSAGES, st.integers(0, 12), st.sampled_from([None, 1, (",", ":")]), st.integers(1, 12))
def test_the_chain_of_the_turn_before_changes_nothing_but_the_time(
    before: list[Any], after: list[Any], common: int, form: Any, at_most: int
) -> None:
    said = [before, before[:common] + after]
    form = {"separators": form} if isinstance(form, tuple) else {"indent": form}
    one, two = (parse_request(json.dumps({"messages": of}, **form).encode()).messages for of in said)
    last, alone = chain_of(one, at_most), chain_of(two, at_most)
    known = chain_of(two, at_most, [chain_of(parse_request(b"{}").messages, 1), last])
    assert (known.hashes, known.sizes) == (alone.hashes, alone.sizes)
    assert (known.head, known.head_bytes) == (alone.head, alone.head_bytes)


@pytest.mark.parametrize("is_marked", [False, True])
def test_of_a_turn_that_goes_on_only_what_is_new_is_read(is_marked: bool) -> None:
    """A mark for caches that moves on makes the last messages new ones."""
    texts = [f"{number} " * 500 for number in range(100)]
    before = [*map(user, texts[:-1]), user(MARKED if is_marked else texts[-1])]
    after = [*map(user, texts[:-1]), user(LONG if is_marked else texts[-1]), user("new")]
    one, two = (parse_request(json.dumps({"messages": of}).encode()).messages for of in (before, after))
    last = chain_of(one, MAX_MESSAGES)
    assert peak_bytes(lambda: chain_of(two, MAX_MESSAGES, [last])) < len(two) / 8
    assert peak_bytes(lambda: chain_of(two, MAX_MESSAGES)) > len(two)
