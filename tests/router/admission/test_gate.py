"""Keys, limits, queue and cache isolation, through a router on a real port."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdserve.errors import ConfigError
from pdserve.router.app.lifespan import open_router
from pdserve.router.config.router import Admin, RouterConfig
from pdserve.router.config.tenants import Access, Admission, Tenant
from pdserve.router.tenants.api_keys import key_line
from tests.support.router.harness import FAST, Connection, Harness, chat_body, disagg, routed, run
from tests.support.router.mock_worker import (
    ANSWER,
    EVENTS,
    STREAM,
    Gate,
    MockWorker,
    Received,
    Script,
    Wire,
    answer,
    close,
    hang,
    raw_answer,
    stream,
    workers,
)

CHAT = "/v1/chat/completions"
ALICE, BOB = "alice-" + "a" * 20, "bob-" + "b" * 20
ONE_SLOT = Admission(running_per_worker=1, queue_length=2, queue_s=20.0)


@pytest.fixture
def access(tmp_path: Path) -> Access:
    file = tmp_path / "keys"
    file.write_text("# tenants\n" + key_line("alice", ALICE) + key_line("bob", BOB))
    return Access(keys_file=file)


@pytest.fixture(autouse=True)
def no_keys_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PDSERVE_API_KEYS", "PDSERVE_CLUSTER_TOKEN", "PDSERVE_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)


def by(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def asking(harness: Harness, key: str, **more: Any) -> Connection:
    """A chat that was sent, its answer not read."""
    connection = await harness.connect()
    await connection.send(CHAT, json.dumps(chat_body(**more)).encode(), by(key))
    return connection


async def until_waiting(harness: Harness, count: int) -> None:
    while harness.router.gate.queue.waiting != count:  # noqa: ASYNC110 - nobody announces it
        await asyncio.sleep(0)


# --- keys


def test_without_keys_everybody_may_ask() -> None:
    async def main() -> None:
        async with disagg() as (harness, _, _):
            assert (await harness.chat()).status == 200
            assert (await harness.chat(by("whatever"))).status == 200

    run(main())


@pytest.mark.parametrize(
    "headers", [{}, by("nobody's key at all"), by(""), {"authorization": f"Basic {ALICE}"}]
)
def test_with_keys_nobody_gets_in_without_one(access: Access, headers: dict[str, str]) -> None:
    async def main() -> None:
        async with disagg(access=access) as (harness, [prefill], [decode]):
            refused = await harness.chat(headers)
            assert refused.status == 401
            assert refused.error["code"] == "invalid_api_key"
            assert refused.headers["www-authenticate"] == "Bearer"
            for path in ("/v1/models", "/v1/models/m", "/metrics", "/v1/nothing"):
                assert (await harness.get(path)).status == 401
            assert decode.requests == prefill.requests == []
            assert (await harness.chat(by(ALICE))).body == ANSWER

    run(main())


def test_a_body_of_a_client_without_key_is_not_read(access: Access) -> None:
    async def main() -> None:
        async with disagg(access=access) as (harness, _, _):
            connection = await harness.connect()
            await connection.send(CHAT, b"", {"content-length": "33554432"})
            response = await connection.response()
            assert response.status == 401
            assert response.headers["connection"] == "close"
            connection.leave()

    run(main())


def test_health_and_readiness_need_no_key_and_tell_nothing_of_the_workers(access: Access) -> None:
    async def main() -> None:
        async with disagg(access=access) as (harness, _, _):
            assert (await harness.get("/health")).status == 200
            ready = await harness.get("/ready")
            assert ready.status == 200
            assert set(ready.json()) == {"ready", "degraded", "mode"}
            assert (await harness.get("/openapi.json")).status == 200

    run(main())


def test_metrics_need_the_administrators_key_where_there_are_tenants(access: Access) -> None:
    async def main() -> None:
        admin = Admin(key="the administrator's".replace(" ", "-"))
        async with disagg(access=access, admin=admin) as (harness, _, _):
            for headers, status in ((by(ALICE), 401), (by(admin.key), 200)):
                connection = await harness.connect()
                await connection.send("/metrics", b"", headers, method="GET")
                assert (await connection.response()).status == status
                connection.leave()

    run(main())


def test_keys_come_from_the_environment_too(access: Access, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setenv("PDSERVE_API_KEYS", f" carol={'c' * 20}, alice={'z' * 20},")
        async with disagg(access=access) as (harness, _, _):
            for key in (ALICE, BOB, "c" * 20, "z" * 20):
                assert (await harness.chat(by(key))).status == 200
            assert [t.name for t in harness.router.gate.tenants.all] == ["alice", "bob", "carol"]

    run(main())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no keys"),
        ("alice", "line 1: a line is"),
        ("\nalice sk-plain-key-plain-key", "line 2: a line is"),
        ("alice sha256:12", "64 hexadecimal"),
        ("shared sha256:" + "a" * 64, "cannot name a tenant"),
        ("a/b sha256:" + "a" * 64, "cannot name a tenant"),
        ("a sha256:" + "a" * 64 + "\nb sha256:" + "a" * 64, "tenant b has the key of tenant a"),
    ],
)
def test_a_keys_file_that_cannot_be_used_ends_the_start(tmp_path: Path, text: str, said: str) -> None:
    async def main() -> None:
        file = tmp_path / "keys"
        file.write_text(text)
        config = RouterConfig(decode=("http://127.0.0.1:1",), access=Access(keys_file=file))
        with pytest.raises(ConfigError, match=said) as caught:
            async with open_router(config):
                pass
        assert "plain" not in str(caught.value)

    run(main())


# --- cache isolation


def test_both_workers_get_the_tenants_salt(access: Access) -> None:
    async def main() -> None:
        tenants = (Tenant(name="bob", cache="shared"),)
        async with disagg(access=access, tenants=tenants) as (harness, [prefill], [decode]):
            await harness.chat(by(ALICE))
            await harness.chat(by(ALICE), cache_salt="mine")
            await harness.chat(by(BOB))
            await harness.chat(by(BOB), cache_salt="tenant/alice")
            salts = [None if (s := r.json().get("cache_salt")) is None else s for r in decode.got(CHAT)]
            assert salts == ["tenant/alice", "tenant/alice/mine", None, "shared/tenant/alice"]
            assert [r.body for r in prefill.got("/pd/prefill")] == [r.body for r in decode.got(CHAT)]

    run(main())


def test_without_keys_the_body_stays_as_it_is() -> None:
    async def main() -> None:
        async with disagg() as (harness, _, [decode]):
            body = b'{"model":"m","messages":[],"cache_salt":"tenant/alice"} '
            await harness.post(CHAT, body)
            assert decode.got(CHAT)[0].body == body

    run(main())


def test_tenants_do_not_share_sessions(access: Access) -> None:
    async def main() -> None:
        async with disagg(access=access) as (harness, _, _):
            await harness.chat(by(ALICE), user="u")
            await harness.chat(by(BOB), user="u")
            assert len(harness.router.dispatcher.placer.sessions) == 2

    run(main())


# --- limits


def test_too_many_requests_are_answered_429_with_retry_after(access: Access) -> None:
    async def main() -> None:
        tenants = (Tenant(name="alice", requests_s=0.1),)
        async with disagg(access=access, tenants=tenants) as (harness, _, _):
            assert (await harness.chat(by(ALICE))).status == 200
            refused = await harness.chat(by(ALICE))
            assert refused.status == 429
            assert refused.error["type"] == "rate_limit_error"
            assert refused.error["code"] == "rate_limit_exceeded"
            assert 8 <= int(refused.headers["retry-after"]) <= 10
            assert (await harness.chat(by(BOB))).status == 200

    run(main())


def test_tokens_of_answers_and_prompts_count(access: Access) -> None:
    async def main() -> None:
        tenants = (Tenant(name="alice", tokens_min=60),)
        async with disagg(access=access, tenants=tenants) as (harness, _, [decode]):
            decode.script(CHAT, answer(200, {"usage": {"prompt_tokens": 40, "completion_tokens": 80}}))
            assert (await harness.chat(by(ALICE))).status == 200
            refused = await harness.chat(by(ALICE))
            assert refused.status == 429
            assert 55 <= int(refused.headers["retry-after"]) <= 70
            [alice, _] = harness.router.gate.tenants.all
            assert (alice.use.prompt_tokens, alice.use.output_tokens) == (40, 80)

    run(main())


def test_a_stream_without_usage_is_counted_by_its_events(access: Access) -> None:
    async def main() -> None:
        async with disagg(access=access) as (harness, _, _):
            assert (await harness.chat(by(ALICE), stream=True)).body == STREAM
            [alice, _] = harness.router.gate.tenants.all
            # the prompt's 40 are the prefill worker's word
            assert (alice.use.prompt_tokens, alice.use.output_tokens) == (40, len(EVENTS))

    run(main())


TOO_LONG = answer(400, {"message": "The input is longer than the model's context length"})


@pytest.mark.parametrize(
    ("at", "script", "status"),
    [
        ("prefill", TOO_LONG, 400),
        ("decode", TOO_LONG, 400),
        ("decode", answer(500, {"message": "out of memory"}), 500),
        ("decode", close(), 502),
    ],
)
def test_a_request_that_computed_nothing_is_not_charged(
    access: Access, at: str, script: Script, status: int
) -> None:
    async def main() -> None:
        tenants = (Tenant(name="alice", tokens_min=60),)
        direct = {"min_prefill_tokens": 1_000_000} if at == "decode" else {}
        async with disagg(access=access, tenants=tenants, **direct) as (harness, [prefill], [decode]):
            prefill.script("/pd/prefill", script)
            decode.script(CHAT, script)
            long = [{"role": "user", "content": "x" * 40_000}]
            assert (await harness.chat(by(ALICE), messages=long)).status == status
            decode.scripts.clear()
            assert (await harness.chat(by(ALICE))).status == 200
            [alice, _] = harness.router.gate.tenants.all
            assert (alice.use.prompt_tokens, alice.use.output_tokens) == (3, 2)

    run(main())


@pytest.mark.parametrize("path", ["/tokenize", "/v1/detokenize"])
def test_tokenizing_is_not_charged(access: Access, path: str) -> None:
    async def main() -> None:
        async with disagg(access=access) as (harness, _, [decode]):
            decode.script(path, answer(200, {"tokens": [1, 2], "count": 2}))
            body = {"model": "m", "prompt": "x" * 4000, "tokens": [1, 2]}
            assert (await harness.post(path, body, by(ALICE))).status == 200
            [alice, _] = harness.router.gate.tenants.all
            assert (alice.use.prompt_tokens, alice.use.output_tokens) == (0, 0)

    run(main())


HALF = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{"


@pytest.mark.parametrize("deadline", ["first_byte_s", "between_chunks_s", "total_s"])
def test_a_request_whose_deadline_passes_before_the_answer_is_charged_what_may_have_been_computed(
    access: Access, deadline: str
) -> None:
    async def main() -> None:
        soon = msgspec.structs.replace(FAST, **{deadline: 0.2})
        async with disagg(prefill=0, access=access, deadlines=soon) as (harness, _, [decode]):
            decode.script(CHAT, raw_answer(HALF) if deadline == "between_chunks_s" else hang(Gate()))
            messages = [{"role": "user", "content": "x" * 400}]
            assert (await harness.chat(by(ALICE), messages=messages)).status == 504
            [alice, _] = harness.router.gate.tenants.all
            assert 100 <= alice.use.prompt_tokens <= 120
            assert alice.use.output_tokens == 0

    run(main())


def test_a_prompt_that_prefill_computed_is_charged_whatever_becomes_of_it(access: Access) -> None:
    async def main() -> None:
        async with disagg(access=access) as (harness, _, [decode]):
            decode.script(CHAT, close())
            assert (await harness.chat(by(ALICE))).status == 502
            [alice, _] = harness.router.gate.tenants.all
            assert (alice.use.prompt_tokens, alice.use.output_tokens) == (40, 0)

    run(main())


def test_a_client_that_leaves_before_the_answer_is_charged_what_may_have_been_computed(
    access: Access,
) -> None:
    async def main() -> None:
        async with disagg(prefill=0, access=access) as (harness, _, [decode]):
            gate = Gate()
            decode.script(CHAT, hang(gate))
            connection = await asking(harness, ALICE, messages=[{"role": "user", "content": "x" * 400}])
            await gate.reached.wait()
            connection.leave()
            await decode.wait_until(lambda: decode.disconnected == 1)
            await harness.settle()
            [alice, _] = harness.router.gate.tenants.all
            assert 100 <= alice.use.prompt_tokens <= 120

    run(main())


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        ("/v1/completions", {"prompt": "x" * 4000}, 40),
        ("/v1/completions", {"prompt": ["x" * 2000, "x" * 1992]}, 1000),
        ("/generate", {"text": None, "input_ids": [[1234] * 500, [5678] * 500]}, 1000),
    ],
)
def test_the_worker_that_answers_alone_says_how_long_one_prompt_is(
    access: Access, path: str, body: dict[str, Any], tokens: int
) -> None:
    """In a stream of several it speaks of the first: they stay charged by estimate."""

    async def main() -> None:
        async def streamed(wire: Wire, request: Received) -> None:
            said = "x-pdserve-cached: device=8, host=0, pool=16, ssd=0, computed=16\r\n"
            await wire.head(200, "text/event-stream", extra=said)
            await wire.chunk(STREAM)
            await wire.end()

        async with disagg(prefill=0, access=access) as (harness, _, [decode]):
            decode.script(path, streamed)
            sent = {"model": "m", "stream": True} | body
            assert (await harness.post(path, sent, by(ALICE))).body == STREAM
            [alice, _] = harness.router.gate.tenants.all
            assert alice.use.prompt_tokens == pytest.approx(tokens, abs=1)

    run(main())


# --- the queue


def test_what_finds_no_slot_waits_and_is_then_served(access: Access) -> None:
    async def main() -> None:
        async with disagg(access=access, admission=ONE_SLOT) as (harness, _, [decode]):
            gate = Gate()
            decode.script(CHAT, stream(EVENTS, gate, 1))
            first = await asking(harness, ALICE, stream=True)
            await gate.reached.wait()
            second = await asking(harness, ALICE)
            await until_waiting(harness, 1)
            gate.open.set()
            assert (await first.response()).body == STREAM
            assert (await second.response()).body == ANSWER
            first.leave()
            second.leave()
        assert sum(harness.router.gate.queue_wait.counts) == 1

    run(main())


def test_a_full_queue_is_answered_429_and_a_flood_does_not_keep_others_out(access: Access) -> None:
    async def main() -> None:
        async with disagg(access=access, admission=ONE_SLOT) as (harness, _, [decode]):
            gate = Gate()
            decode.script(CHAT, stream(EVENTS, gate, 1))
            first = await asking(harness, ALICE, stream=True)
            await gate.reached.wait()
            flood = [await asking(harness, ALICE) for _ in range(2)]
            await until_waiting(harness, 2)
            refused = await harness.chat(by(ALICE))
            assert refused.status == 429
            assert refused.error["code"] == "overloaded"
            assert int(refused.headers["retry-after"]) >= 1
            polite = await asking(harness, BOB)
            assert (await flood[1].response()).status == 429  # the newest makes room
            gate.open.set()
            assert (await polite.response()).body == ANSWER
            assert (await flood[0].response()).body == ANSWER
            for connection in (first, *flood, polite):
                connection.leave()

    run(main())


def test_what_waits_too_long_is_answered_429(access: Access) -> None:
    async def main() -> None:
        short = Admission(running_per_worker=1, queue_s=0.05)
        async with disagg(access=access, admission=short) as (harness, _, [decode]):
            gate = Gate()
            decode.script(CHAT, hang(gate))
            first = await asking(harness, ALICE)
            await gate.reached.wait()
            assert (await harness.chat(by(BOB))).status == 429
            [alice, bob] = harness.router.gate.tenants.all
            assert (alice.running, bob.running, bob.use.refused) == (1, 0, 1)
            first.leave()

    run(main())


def test_a_client_that_leaves_the_queue_is_forgotten(access: Access) -> None:
    async def main() -> None:
        async with disagg(access=access, admission=ONE_SLOT) as (harness, _, [decode]):
            gate = Gate()
            decode.script(CHAT, stream(EVENTS, gate, 1))
            first = await asking(harness, ALICE, stream=True)
            await gate.reached.wait()
            (await asking(harness, BOB)).leave()
            (await asking(harness, BOB)).leave()
            third = await asking(harness, BOB)
            third.leave()
            await until_waiting(harness, 0)
            gate.open.set()
            await first.response()
            first.leave()
            await harness.settle()
            assert len(decode.got(CHAT)) == 1
            assert harness.stats.client_aborts["queue"] >= 1

    run(main())


def test_a_worker_that_joins_lets_in_what_waits(access: Access) -> None:
    async def main() -> None:
        async with disagg(access=access, admission=ONE_SLOT, decode=2) as (harness, _, [one, two]):
            fleet = harness.router.fleet
            fleet.members.leave(two.id)
            gate = Gate()
            one.script(CHAT, stream(EVENTS, gate, 1))
            first = await asking(harness, ALICE, stream=True)
            await gate.reached.wait()
            second = await asking(harness, ALICE)
            await until_waiting(harness, 1)
            fleet.members.join(two.url, "decode")
            assert (await second.response()).headers["x-pdserve-decode"] == two.id
            gate.open.set()
            await first.response()
            first.leave()
            second.leave()

    run(main())


def test_a_tenants_concurrency_holds_only_that_tenant(access: Access) -> None:
    async def main() -> None:
        tenants = (Tenant(name="alice", concurrency=1),)
        async with disagg(access=access, tenants=tenants) as (harness, _, [decode]):
            gate = Gate()
            decode.script(CHAT, stream(EVENTS, gate, 1))
            first = await asking(harness, ALICE, stream=True)
            await gate.reached.wait()
            second = await asking(harness, ALICE)
            await until_waiting(harness, 1)
            assert (await harness.chat(by(BOB))).status == 200
            gate.open.set()
            assert (await second.response()).body == ANSWER
            first.leave()
            second.leave()

    run(main())


# --- the cluster's token


def test_workers_are_shown_the_clusters_token_and_never_the_clients_key(access: Access) -> None:
    async def main() -> None:
        token = "cluster-token-cluster-token"
        with_token = Access(keys_file=access.keys_file, cluster_token=token)
        async with disagg(access=with_token) as (harness, [prefill], [decode]):
            await harness.chat(by(ALICE), user="u")
            await harness.chat(by(ALICE), user="u")
            requests = [*prefill.requests, *decode.requests]
            assert {r.path for r in requests} == {CHAT, "/pd/prefill", "/pd/settled"}
            assert {r.headers.get("authorization") for r in requests} == {f"Bearer {token}"}

    run(main())


def test_a_worker_that_asks_for_the_token_joins_a_router_that_has_it() -> None:
    async def main() -> None:
        worker = MockWorker("decode")
        worker.token = "cluster-token-cluster-token"
        async with workers(worker):
            config = RouterConfig(decode=(worker.url,), access=Access(cluster_token=worker.token))
            async with routed(config) as harness:
                assert (await harness.chat()).body == ANSWER
            async with routed(RouterConfig(decode=(worker.url,))) as harness:
                assert (await harness.chat()).status == 503

    run(main())


@pytest.mark.parametrize("shown", [False, True])
def test_how_much_workers_have_to_do_is_no_tenants_business_unless_configured(
    access: Access, shown: bool
) -> None:
    async def main() -> None:
        settings = msgspec.structs.replace(access, show_load=shown)
        async with disagg(prefill_policy="cache_aware", access=settings) as (harness, _, _):
            plan = (await harness.chat(headers=by(ALICE))).headers["x-pdserve-plan"]
            assert ("requests=" in plan) is shown
            if not shown:
                assert plan == "decode=least-loaded, prefill=cache-aware, stage=ok"

    run(main())
