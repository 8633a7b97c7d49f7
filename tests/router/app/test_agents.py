"""Agents at the router's door, before scripted workers: names of sessions, parents, ends, nonces."""

from __future__ import annotations

from tests.support.router.harness import CHAT, disagg
from tests.support.router.mock_worker import REPORT, answer

MESSAGES = "/v1/messages"
LINE = "x-anthropic-billing-header: cc_version=2.1.114.76c; cc_entrypoint=cli; cch=ea6aa;"


async def test_a_child_starts_where_its_parent_is_and_has_turns_of_its_own() -> None:
    async with disagg(decode=3) as (harness, _, decodes):
        parent = await harness.chat(headers={"x-session-id": "p"})
        home = next(one for one in decodes if one.id == parent.headers["x-pdserve-decode"])
        for name in "abcd":
            headers = {"x-session-id": name, "x-parent-session-id": "p"}
            child = await harness.chat(headers=headers)
            assert child.headers["x-pdserve-decode"] == home.id
            assert "decode=session" in child.headers["x-pdserve-plan"]
        again = await harness.chat(headers={"x-session-id": "a"})
        assert "decode=session" in again.headers["x-pdserve-plan"]
        turns = {labels[0] for labels, count in harness.stats.turn_tokens.items() if count}
        assert turns <= {"1", "2"}


async def test_the_last_request_of_a_session_frees_what_only_it_used() -> None:
    async with disagg() as (harness, [prefill], [decode]):
        session = {"x-session-id": "s"}
        await harness.chat(headers=session)
        prefill.script("/pd/prefill", answer(200, REPORT | {"cached": {"device": 640, "host": 0, "pool": 0}}))
        await harness.chat(headers={**session, "x-dynamo-session-final": "true"})
        first, last = decode.got(CHAT)
        assert "x-pdserve-final" not in first.headers
        assert last.headers["x-pdserve-final"] == str(sum(REPORT["cached"].values()))
        assert len(harness.router.proxy.placer.sessions) == 0


async def test_a_nonce_is_taken_out_told_and_counted_but_where_the_operator_wants_it() -> None:
    blocks = [{"type": "text", "text": text} for text in (LINE, "You are an agent.")]
    body = {"system": blocks, "max_tokens": 4}
    for keep in (False, True):
        async with disagg(prefill=0, keep_nonces=keep) as (harness, _, [decode]):
            got = await harness.post(MESSAGES, body)
            stripped = got.headers.get("x-pdserve-stripped")
            assert stripped == (None if keep else "x-anthropic-billing-header")
            assert decode.got(MESSAGES)[0].json() == (body if keep else {**body, "system": blocks[1:]})
            assert harness.stats.nonces == (not keep)


async def test_a_client_hears_what_it_changed_beside_what_became_of_pages() -> None:
    async with disagg() as (harness, [prefill], _):
        named = {"x-session-id": "s"}
        prefill.script("/pd/prefill", *[answer(200, REPORT | {"missed": "evicted=16"})] * 2)
        first = await harness.chat(named, tools=[])
        assert first.headers["x-pdserve-miss"] == "evicted=16"
        second = await harness.chat(named, tools=[{"type": "function", "function": {"name": "f"}}])
        assert second.headers["x-pdserve-miss"] == "tools_changed=2, evicted=16"
        other = await harness.chat({"x-session-id": "other"})
        assert "_changed" not in other.headers.get("x-pdserve-miss", "")


PREVIOUS = {"diagnostics": {"previous_message_id": "msg_1"}}


async def test_a_worker_is_told_what_its_client_asks_about() -> None:
    async with disagg(prefill=0) as (harness, _, [decode]):
        named = {"x-claude-code-session-id": "s"}
        asks = (
            {"diagnostics": {"previous_message_id": None}},
            PREVIOUS,
            {"system": "Be brief.", **PREVIOUS},
            {"system": "Be brief."},
        )
        for more in asks:
            await harness.post(MESSAGES, {"max_tokens": 4, "messages": [], **more}, named)
        await harness.post(MESSAGES, PREVIOUS, {"x-claude-code-session-id": "unknown"})
        told = [request.headers.get("x-pdserve-changed") for request in decode.got(MESSAGES)]
        assert told == ["none", "none", "system_changed=0", None, "previous_message_not_found"]
