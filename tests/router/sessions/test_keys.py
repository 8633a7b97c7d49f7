"""Session keys, and the table of sessions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdserve.errors import ConfigError
from pdserve.router.api.request_body import RequestView, parse_request
from pdserve.router.config.placement import Session
from pdserve.router.sessions.canonical import Chains
from pdserve.router.sessions.keys import (
    MAX_LINKS,
    MAX_SESSION_KEY_CHARS,
    SessionKey,
    find_session_key,
    is_final,
    named,
    parse_sources,
)
from pdserve.router.sessions.table import MAX_WORKERS, OTHERS, SessionEntry, SessionTable
from tests.support.memory import peak_bytes

CHAINS = Chains(capacity=2)
"""Of all requests here, whatever they have to do with each other."""


def links_of(messages: Any) -> tuple[str, ...]:
    view = RequestView(messages=messages)
    key = find_session_key(parse_sources(["messages"]), {}, view, b"", Chains())
    return () if key is None else key.links


def find_key(body: dict[str, object], *sources: str, **headers: str) -> SessionKey | None:
    data = json.dumps(body).encode()
    said = {name.encode(): value.encode() for name, value in headers.items()}
    return find_session_key(parse_sources(sources), said, parse_request(data), data, CHAINS)


def find(body: dict[str, object], *sources: str, **headers: str) -> str | None:
    key = find_key(body, *sources, **headers)
    return None if key is None else key.name


def test_session_key_sources_are_tried_in_order() -> None:
    body: dict[str, object] = {"user": "u", "metadata": {"session": {"id": 7}}}
    sources = ("header:Sid", "body:metadata.session.id", "user")
    assert find(body, *sources, sid="s") == "s"
    assert find(body, *sources) == "7"
    assert find({"user": "u"}, *sources) == "u"
    assert find({}, *sources) is None
    assert find({"metadata": ["x"], "user": ""}, *sources) is None


def test_without_configuration_a_session_wins_over_its_user() -> None:
    sources, user = Session().sources, {"x-user-id": "ada"}
    assert find({"user": "u"}, *sources, **user, **{"x-session-id": "s"}) == "s"
    assert find({"user": "u"}, *sources, **user) == "ada"
    assert find({"user": "u"}, *sources) is None


def test_conversations_under_one_constant_user_are_sessions_of_their_own() -> None:
    sources = Session().sources

    def key(user: str, *said: str) -> SessionKey | None:
        messages = [{"role": "user", "content": text} for text in said]
        return find_key({"user": user, "messages": messages}, *sources)

    one, other, next_turn = key("app", "a"), key("app", "b"), key("app", "a", "c")
    assert one is not None
    assert other is not None
    assert next_turn is not None
    assert one.name == next_turn.name != other.name
    assert one.links[-1] in next_turn.links
    assert not set(one.links) & set(other.links)
    somebody = key("app2", "a")
    assert somebody is not None
    assert not set(one.links) & set(somebody.links)
    assert key("", "a") is None
    long = key("u" * (MAX_SESSION_KEY_CHARS + 1), "a")
    assert long is not None
    assert len(long.name) < MAX_SESSION_KEY_CHARS


def test_a_long_session_key_is_digested_and_still_exact() -> None:
    long = "k" * (MAX_SESSION_KEY_CHARS + 1)
    first, second = find({"user": long}, "user"), find({"user": long + "x"}, "user")
    assert first is not None
    assert second is not None
    assert first != second
    assert len(first) <= MAX_SESSION_KEY_CHARS


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("sid=a", "a"),
        ("x=1; sid=a; y=2", "a"),
        ('sid="a b"', "a b"),
        ("xsid=1", None),
        ("sid", None),
        ("", None),
    ],
)
def test_a_cookie_is_found_by_its_exact_name(header: str, value: str | None) -> None:
    assert find({}, "cookie:sid", cookie=header) == value


@pytest.mark.parametrize(
    "text",
    ["header:", "cookie:", "cookie:a b", "user:x", "body:", "body:a..b", "header:a b", "messages:1", ""],
)
def test_unknown_session_sources_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"session\.sources"):
        parse_sources([text])


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def links(*messages: Any) -> tuple[str, ...]:
    key = find_key({"messages": list(messages)}, "messages")
    return () if key is None else key.links


SYSTEM, HI = said("system", "be kind"), said("user", "hi")


def test_a_conversation_keeps_its_name_and_its_links_as_it_grows() -> None:
    first = links(SYSTEM, HI)
    second = links(SYSTEM, HI, said("assistant", "hello"), said("user", "more"))
    assert len(first) == 1
    assert len(second) == 3
    assert second[0] == first[0]


def test_system_prompts_do_not_make_a_session() -> None:
    other = said("developer", "be short")
    assert links(SYSTEM, HI) == links(other, HI) == links(HI)
    assert links(SYSTEM) == ()
    assert links(SYSTEM, HI) != links(SYSTEM, said("user", "ho"))
    assert links(HI, SYSTEM)[1] != links(HI)[0]  # one that comes later belongs to the conversation


def test_a_long_conversation_is_known_by_its_first_messages() -> None:
    many = [said("user", str(i)) for i in range(MAX_LINKS + 9)]
    assert links(*many) == links(*many[:MAX_LINKS])


@given(st.binary())
@example(b'[{"role":"\xff"}]')
@example(b'[{"role":' + b"[" * 100_000)
def test_whatever_the_messages_are_no_key_is_the_worst(data: bytes) -> None:
    assert isinstance(links_of(data), tuple)


@pytest.mark.parametrize("metadata", [b'{"s":"\xff"}', b'{"\xff":"s"}', b'{"s":[[]]}'])
def test_a_field_that_cannot_be_read_gives_no_key(metadata: bytes) -> None:
    body = b'{"metadata":%b}' % metadata
    sources = parse_sources(["body:metadata.s"])
    assert find_session_key(sources, {}, parse_request(body), body, CHAINS) is None


@pytest.mark.parametrize("messages", ["hi", 3, None, {"role": "user"}, ["hi"], [{"role": 3}]])
def test_messages_of_another_form_give_no_key(messages: object) -> None:
    assert find_key({"messages": messages}, "messages") is None


@pytest.mark.parametrize("member", [b"0", b"{}", b'""'])
def test_messages_by_the_hundred_thousand_give_no_key_and_take_no_memory(member: bytes) -> None:
    body = b'{"messages":[' + (member + b",") * 300_000 + member + b"]}"
    messages = parse_request(body).messages
    assert peak_bytes(lambda: links_of(messages)) < 4 * len(body)
    assert links_of(messages) == ()


def test_members_that_no_key_is_in_take_no_memory() -> None:
    many = b"".join(b'"%d":0,' % i for i in range(100_000))
    body = b'{%b"s":{%b"id":"x"}}' % (many, many)
    sources, view = parse_sources(["body:s.id"]), parse_request(body)
    assert peak_bytes(lambda: find_session_key(sources, {}, view, body, CHAINS)) < len(body)
    key = find_session_key(sources, {}, view, body, CHAINS)
    assert key is not None
    assert key.name == "x"


LONG = "Once upon a time. " * 40


def parts(role: str, *texts: str, is_marked: bool = False) -> dict[str, Any]:
    mark = {"cache_control": {"type": "ephemeral"}} if is_marked else {}
    return {"role": role, "content": [{"type": "text", "text": text, **mark} for text in texts]}


def call(arguments: str) -> dict[str, Any]:
    function = {"name": "ls", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function}]}


TURN = [said("user", LONG)]
MORE = [said("assistant", "Yes."), said("user", "Go on.")]
NEXT = [*TURN, *MORE]
CLAUDE = {"metadata": {"user_id": "user_1_account_2_session_5c0f-11"}}
CLAUDE_2 = {"metadata": {"user_id": json.dumps({"device_id": "d", "session_id": "5c0f-11"})}}
KEY: dict[str, object] = {"prompt_cache_key": "k"}
PAIRS: dict[str, tuple[dict[str, str], dict[str, object], dict[str, object]]] = {
    "x-session-id": ({"x-session-id": "s"}, {"messages": TURN}, {"messages": NEXT}),
    "user": ({}, {"user": "u", "messages": TURN}, {"user": "u", "messages": NEXT}),
    "members in another order": (
        {},
        {"user": "u", "messages": TURN},
        {"user": "u", "messages": [{"content": one["content"], "role": one["role"]} for one in NEXT]},
    ),
    "a mark for caches that moves on": (
        {},
        {"user": "u", "messages": [parts("user", LONG, is_marked=True)]},
        {"user": "u", "messages": [parts("user", LONG), MORE[0], parts("user", "Go on.", is_marked=True)]},
    ),
    "a text, then parts": (
        {},
        {"user": "u", "messages": TURN},
        {"user": "u", "messages": [parts(one["role"], one["content"]) for one in NEXT]},
    ),
    "arguments written anew": (
        {},
        {"user": "u", "messages": [*TURN, call('{"b": 1, "a": [2]}')]},
        {"user": "u", "messages": [*TURN, call('{"a":[2],"b":1}'), *MORE]},
    ),
    "prompt_cache_key": ({}, {**KEY, "messages": TURN}, {**KEY, "messages": NEXT}),
    "Codex": ({"session_id": "s"}, {**KEY, "input": TURN}, {**KEY, "input": NEXT}),
    "Codex by its key": ({}, {**KEY, "input": TURN}, {**KEY, "input": NEXT}),
    "Claude Code": ({"x-claude-code-session-id": "s"}, {"messages": TURN}, {"messages": NEXT}),
    "Claude Code by its user": ({}, {**CLAUDE, "messages": TURN}, {**CLAUDE, "messages": NEXT}),
    "Claude Code by its later user": ({}, {**CLAUDE_2, "messages": TURN}, {**CLAUDE_2, "messages": NEXT}),
    "OpenCode": ({"x-session-affinity": "s"}, {"messages": TURN}, {"messages": NEXT}),
    "OpenCode's own provider": ({"x-opencode-session": "s"}, {"messages": TURN}, {"messages": NEXT}),
    "Dynamo": ({"x-dynamo-session-id": "s"}, {"messages": TURN}, {"messages": NEXT}),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_two_turns_as_agents_send_them_are_one_session(pair: str) -> None:
    headers, first, second = PAIRS[pair]
    sources, table = Session().sources, SessionTable(9, ttl_s=9)
    one, two = find_key(first, *sources, **headers), find_key(second, *sources, **headers)
    assert one is not None
    assert two is not None
    assert one.name == two.name
    table.record(one, SessionEntry("r", "d", 0.0))
    assert table.get(two, 1.0) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([said("user", "a"), said("user", "b")], [said("user", "a\0b")]),
        ([parts("user", "a", "b")], [parts("user", "ab")]),
        ([said("user", "a")], [said("assistant", "a")]),
        ([call('{"a": 1}')], [call('{"a": 2}')]),
        ([call("{")], [call("{}")]),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
         [{"role": "user", "content": [{"type": "image_url", "image_url": "y"}]}]),
    ],
)  # fmt: skip
def test_other_conversations_are_other_sessions(one: list[Any], other: list[Any]) -> None:
    assert links(*one)[-1] != links(*other)[-1]


def test_conversations_under_one_cache_key_go_to_one_worker_and_are_told_apart() -> None:
    one, other = (find_key({**KEY, "messages": [said("user", text)]}, *Session().sources) for text in "ab")
    assert one is not None
    assert other is not None
    assert one.name == other.name == "k"
    assert one.links != other.links
    assert find_key({**KEY, "input": "a text"}, *Session().sources) == SessionKey("k", ("k",))


@pytest.mark.parametrize("user_id", ["user_1", "session", "my_session_is over", "", 5, {"session_id": "x"}])
def test_a_user_id_without_a_session_names_none(user_id: object) -> None:
    assert find({"metadata": {"user_id": user_id}}, "metadata.user_id") is None


@pytest.mark.parametrize(
    ("headers", "name", "parent"),
    [
        ({"x-session-id": "c", "x-parent-session-id": "p"}, "c", "p"),
        ({"x-session-id": "c", "x-parent-session-id": "c"}, "c", ""),
        ({"x-dynamo-session-id": "c", "x-dynamo-parent-session-id": "p"}, "c", "p"),
        ({"x-claude-code-agent-id": "c", "x-claude-code-session-id": "p"}, "c", "p"),
        ({"x-claude-code-agent-id": "c", "x-claude-code-parent-agent-id": "q"}, "c", "q"),
        ({"x-claude-code-session-id": "p"}, "p", ""),
    ],
)
def test_an_agent_below_another_has_a_session_of_its_own_and_names_its_parent(
    headers: dict[str, str], name: str, parent: str
) -> None:
    key = find_key({}, *Session().sources, **headers)
    assert key == named(name, parent)
    within = key.of_model("m", "t")
    assert within.parent == (f"t/m/{parent}" if parent else "")
    assert within.links == (f"t/m/{name}",)


@pytest.mark.parametrize(
    ("header", "value", "is_last"),
    [
        ("x-dynamo-session-final", "True", True),
        ("x-session-final", "true", True),
        ("x-session-final", "0", False),
    ],
)
def test_a_final_mark_is_read(header: str, value: str, *, is_last: bool) -> None:
    assert is_final({header.encode(): value.encode()}) is is_last


KEYS = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True).map(
    lambda links: SessionKey(links[0], tuple(links))
)
STEPS = st.lists(st.tuples(st.sampled_from(["record", "get"]), KEYS, st.floats(0, 5)), max_size=60)


@given(STEPS, st.integers(1, 5), st.floats(0.1, 10))
def test_the_table_agrees_with_a_model_of_it(
    steps: list[tuple[str, SessionKey, float]], capacity: int, ttl_s: float
) -> None:
    table, model, now_s = SessionTable(capacity, ttl_s), dict[str, SessionEntry](), 0.0
    for number, (what, key, passed_s) in enumerate(steps):
        now_s += passed_s
        fresh = {link: entry for link, entry in model.items() if now_s - entry.seen_s <= ttl_s}
        if what == "record":
            entry = SessionEntry(f"r{number}", f"d{number}", now_s)
            table.record(key, entry)
            for link in key.links:
                model.pop(link, None)
            model[key.links[-1]] = entry
            while len(model) > capacity:
                model.pop(next(iter(model)))
        else:
            known = [fresh[link] for link in reversed(key.links) if link in fresh]
            assert table.get(key, now_s) == (known[0] if known else None)
        assert len(table) <= capacity


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1), st.randoms())
def test_a_session_has_the_workers_of_all_processes_whatever_is_heard_first(turns: Any, rng: Any) -> None:
    news = [
        SessionEntry(f"r{n}", "d", float(n), turns=turn, workers=((f"w{worker}", turn),))
        for n, (worker, turn) in enumerate(turns)
    ]
    rng.shuffle(news)
    table, first = SessionTable(9, ttl_s=1000.0), dict[str, int]()
    for entry in news:
        table.merge("s", (), entry, entry.seen_s)
        for name, turn in entry.workers:
            first[name] = min(turn, first.get(name, turn))
    found = table.get(named("s"), 1000.0)
    assert found is not None
    assert found.request_id == f"r{len(turns) - 1}", "the latest turn counts"
    if len(first) < MAX_WORKERS:
        assert dict(found.workers) == first
    else:
        assert len(found.workers) == MAX_WORKERS
        assert found.workers[-1] == OTHERS


def test_recording_new_sessions_clears_out_old_ones() -> None:
    table = SessionTable(1000, ttl_s=10)
    for i in range(100):
        table.record(named(f"old{i}"), SessionEntry("r", "d", 0.0))
    for i in range(60):
        table.record(named(f"new{i}"), SessionEntry("r", "d", 20.0))
    assert len(table) == 60


def test_conversations_that_begin_alike_are_told_apart_from_their_second_turn_on() -> None:
    table = SessionTable(10, ttl_s=10)
    table.record(named("h1"), SessionEntry("a1", "d", 0.0))
    table.record(SessionKey("h1", ("h1", "a2", "a3")), SessionEntry("a2", "d", 1.0))
    table.record(named("h1"), SessionEntry("b1", "d", 2.0))
    table.record(SessionKey("h1", ("h1", "b2", "b3")), SessionEntry("b2", "d", 3.0))
    found = table.get(SessionKey("h1", ("h1", "a2", "a3", "a4", "a5")), 4.0)
    assert found is not None
    assert found.request_id == "a2"
