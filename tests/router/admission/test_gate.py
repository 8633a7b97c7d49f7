"""Keys, limits, queue and cache isolation, through a router on a real port."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from pdserve.errors import ConfigError
from pdserve.router.app.lifespan import open_router
from pdserve.router.config.limits import Limits
from pdserve.router.config.router import Admin, RouterConfig
from pdserve.router.config.tenants import Access, Admission, Tenant
from pdserve.router.tenants.api_keys import key_line
from pdserve.security.failed_logins import BURST
from tests.support.router import mock_worker as mock
from tests.support.router.harness import CHAT, PATIENT, Connection, Harness, Response, chat_body, disagg
from tests.support.router.mock_worker import (
    ANSWER,
    EVENTS,
    STREAM,
    Gate,
    MockWorker,
)
from tests.support.router.streams import telling
from tests.support.router.tenants import ALICE, BOB, by, keyed

ONE_SLOT = Admission(running_per_worker=1, queue_length=2, queue_s=20.0)


@pytest.fixture
def access(tmp_path: Path) -> Access:
    return keyed(tmp_path)


@pytest.fixture(autouse=True)
def no_keys_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PDSERVE_API_KEYS", "PDSERVE_CLUSTER_TOKEN", "PDSERVE_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)


def used(harness: Harness) -> tuple[float, float]:
    """Alice's tokens: of prompts, and of answers."""
    use = harness.router.gate.tenants.all[0].use
    return use.prompt_tokens, use.output_tokens


# --- keys


async def test_without_keys_everybody_may_ask_and_bodies_stay_as_they_are() -> None:
    async with disagg() as (harness, _, [decode]):
        body = b'{"model":"m","messages":[],"cache_salt":"tenant/alice"} '
        assert (await harness.post(CHAT, body)).status == 200
        assert (await harness.post(CHAT, body, by("whatever"))).status == 200
        assert [request.body for request in decode.got(CHAT)] == [body, body]


async def test_with_keys_nobody_gets_in_without_one_and_what_is_open_tells_nothing_of_workers(
    access: Access,
) -> None:
    admin = Admin(key="the-administrator's")
    async with disagg(access=access, admin=admin) as (harness, [prefill], [decode]):
        for headers in ({}, by("nobody's key at all"), by(""), {"authorization": f"Basic {ALICE}"}):
            refused = await harness.chat(headers)
            assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
            assert refused.headers["www-authenticate"] == "Bearer"
        for path in ("/v1/models", "/v1/models/m", "/metrics", "/v1/nothing"):
            assert (await harness.get(path)).status == 401
        unread = await harness.post(CHAT, b"", {"content-length": "33554432"})
        assert (unread.status, unread.headers["connection"]) == (401, "close")
        assert decode.requests == prefill.requests == []
        assert (await harness.chat(by(ALICE))).body == ANSWER
        ready = await harness.get("/ready")
        assert (ready.status, set(ready.json())) == (200, {"ready", "degraded", "mode"})
        for path in ("/health", "/openapi.json"):
            assert (await harness.get(path)).status == 200
        for key, status in ((ALICE, 401), (admin.key, 200)):
            assert (await harness.get("/metrics", by(key))).status == status


async def test_each_request_of_a_connection_is_of_the_tenant_whose_key_it_shows(access: Access) -> None:
    async with disagg(access=access) as (harness, _, _):
        gate, body = harness.router.gate, json.dumps(chat_body()).encode()

        async def statuses(*shown: dict[str, str]) -> list[int]:
            client, found = await harness.connect(), []
            for headers in shown:
                await client.send(CHAT, body, headers)
                found.append((await client.response()).status)
            return found

        assert await statuses(by(ALICE), by(ALICE), by(BOB), {"x-api-key": BOB}, by(ALICE)) == [200] * 5
        assert [tenant.use.requests for tenant in gate.tenants.all] == [3, 2]
        for wrong in ({}, by(ALICE + "a"), {"authorization": ALICE}, {"x-api-key": f"Bearer {ALICE}"}):
            assert await statuses(by(ALICE), wrong) == [200, 401]
        assert access.keys_file is not None
        client = await harness.connect()
        for status in (200, 401):
            await client.send(CHAT, body, by(ALICE))
            assert (await client.response()).status == status
            access.keys_file.write_text(key_line("bob", BOB))
            gate.read_keys()


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
async def test_a_keys_file_that_cannot_be_used_ends_the_start(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    config = RouterConfig(decode=("http://127.0.0.1:1",), access=Access(keys_file=file))
    with pytest.raises(ConfigError, match=said) as caught:
        async with open_router(config):
            pass
    assert "plain" not in str(caught.value)


# --- cache isolation


async def test_both_workers_get_the_tenants_salt_and_tenants_share_no_session(access: Access) -> None:
    tenants = (Tenant(name="bob", cache="shared"),)
    async with disagg(access=access, tenants=tenants) as (harness, [prefill], [decode]):
        await harness.chat(by(ALICE), user="u")
        await harness.chat(by(ALICE), cache_salt="mine")
        await harness.chat(by(BOB), user="u")
        await harness.chat(by(BOB), cache_salt="tenant/alice")
        salts = [request.json().get("cache_salt") for request in decode.got(CHAT)]
        assert salts == ["tenant/alice", "tenant/alice/mine", None, "shared/tenant/alice"]
        assert [r.body for r in prefill.got("/pd/prefill")] == [r.body for r in decode.got(CHAT)]
        assert len(harness.router.proxy.placer.sessions) == 2


# --- what a tenant may ask for


async def test_every_answer_counts_as_a_request_and_their_number_is_bounded(access: Access) -> None:
    tenants = (Tenant(name="alice", requests_s=4.0),)
    limits = Limits(prompts=8, choices=4)
    async with disagg(access=access, tenants=tenants, limits=limits) as (harness, _, [decode]):
        for body in ({"n": 5}, {"best_of": 5}):
            refused = await harness.chat(by(ALICE), **body)
            assert (refused.status, refused.error["param"]) == (400, "n")
        many = {"model": "m", "prompt": ["a"] * 9}
        assert (await harness.post("/v1/completions", many, by(ALICE))).status == 400
        assert decode.requests == []
        assert (await harness.chat(by(ALICE), n=4)).status == 200
        assert (await harness.chat(by(ALICE))).status == 429


async def test_what_a_tenant_may_not_set_or_have_fetched_reaches_no_worker(access: Access) -> None:
    def picture(url: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}

    cdn, data = picture("https://cdn.example.com/a"), picture("data:image/png;base64,AAAA")
    tenants = (Tenant(name="bob", controls_engine=True, media_domains=("cdn.example.com",)),)
    async with disagg(access=access, tenants=tenants) as (harness, [prefill], [decode]):
        for key, body, param in (
            (ALICE, {"priority": 9}, "priority"),
            (ALICE, {"rid": "x"}, "rid"),
            (ALICE, cdn, "messages"),
            (BOB, picture("http://127.0.0.1/a"), "messages"),
            (BOB, picture("file:///a"), "messages"),
        ):
            refused = await harness.chat(by(key), **body)
            assert (refused.status, refused.error["param"]) == (400, param)
        assert decode.requests == prefill.requests == []
        for key, body in ((BOB, {"priority": 9}), (ALICE, {"temperature": 0.5}), (ALICE, data), (BOB, cdn)):
            assert (await harness.chat(by(key), **body)).status == 200
    async with disagg() as (harness, _, [decode]):
        assert (await harness.chat(priority=9)).status == 200, "without keys the operator is the only user"


# --- limits


@pytest.mark.parametrize(
    ("limits", "code", "retry_after_s"),
    [({"requests_s": 0.1}, "rate_limit_exceeded", (8, 10)), ({"tokens_min": 60}, None, (55, 70))],
)
async def test_too_much_is_answered_429_with_retry_after(
    access: Access, limits: dict[str, float], code: str | None, retry_after_s: tuple[int, int]
) -> None:
    tenants = (Tenant(name="alice", **limits),)  # type: ignore[arg-type]
    async with disagg(access=access, tenants=tenants) as (harness, _, [decode]):
        usage = {"prompt_tokens": 40, "completion_tokens": 80}
        decode.script(CHAT, mock.answer(200, {"usage": usage}))
        assert (await harness.chat(by(ALICE))).status == 200
        refused = await harness.chat(by(ALICE))
        assert (refused.status, refused.error["type"]) == (429, "rate_limit_error")
        assert code in (None, refused.error["code"])
        assert retry_after_s[0] <= int(refused.headers["retry-after"]) <= retry_after_s[1]
        (kind,) = (name.partition("_")[0] for name in limits)
        assert refused.headers[f"x-ratelimit-remaining-{kind}"] == "0"
        assert used(harness) == (40, 80)
        assert (await harness.chat(by(BOB))).status == 200


LONG: dict[str, Any] = {"messages": [{"role": "user", "content": "x" * 400}]}


class Charge(NamedTuple):
    """What is asked of a decode worker that does so; what is charged: at least, at most, of the answer."""

    script: mock.Script
    status: int
    prompt: tuple[int, int]
    output: int
    path: str = CHAT
    body: dict[str, Any] = LONG
    prefill: int = 0
    deadline: str = ""
    """What passes soon."""


HALF = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{"
TOKENS = mock.answer(200, {"tokens": [1, 2], "count": 2})
TOKENIZED = {"prompt": "x" * 4000, "tokens": [1, 2]}
TELLS = telling("x-pdserve-cached: device=8, host=0, pool=16, computed=16\r\n")
"""In a stream of several prompts it speaks of the first: they stay charged by estimate."""
CHARGES = {
    "a prompt that prefill computed": Charge(mock.close(), 502, (40, 40), 0, prefill=1),
    "tokenizing by a worker that says no count": Charge(
        mock.answer(200, {"tokens": [1, 2]}), 200, (1000, 1001), 0, "/tokenize", TOKENIZED, prefill=1
    ),
    "detokenizing": Charge(TOKENS, 200, (0, 0), 0, "/v1/detokenize", TOKENIZED, prefill=1),
    "no head in time": Charge(mock.hang(), 504, (100, 120), 0, deadline="whole_answer_s"),
    "no end in time": Charge(mock.raw_answer(HALF), 504, (100, 120), 0, deadline="between_chunks_s"),
    "several prompts": Charge(
        TELLS, 200, (999, 1001), 4, "/v1/completions", {"stream": True, "prompt": ["x" * 2000, "x" * 1992]}
    ),
    "several prompts of tokens": Charge(
        TELLS, 200, (999, 1001), 4, "/generate", {"stream": True, "input_ids": [[1234] * 500, [5678] * 500]}
    ),
}


@pytest.mark.parametrize("name", CHARGES)
async def test_a_tenant_is_charged_what_was_computed_or_may_have_been(access: Access, name: str) -> None:
    charge = CHARGES[name]
    deadlines = msgspec.structs.replace(PATIENT, **{charge.deadline: 0.2}) if charge.deadline else PATIENT
    async with disagg(prefill=charge.prefill, access=access, deadlines=deadlines) as (harness, _, [decode]):
        decode.script(charge.path, charge.script)
        body = {"model": "m", "messages": []} | charge.body
        assert (await harness.post(charge.path, body, by(ALICE))).status == charge.status
        prompt, output = used(harness)
        assert charge.prompt[0] <= prompt <= charge.prompt[1]
        assert output == charge.output


TOO_LONG = mock.answer(400, {"message": "The input is longer than the model's context length"})


@pytest.mark.parametrize(
    ("at", "script", "status"),
    [
        ("prefill", TOO_LONG, 400),
        ("decode", TOO_LONG, 400),
        ("decode", mock.answer(500, {"message": "out of memory"}), 500),
        ("decode", mock.close(), 502),
    ],
)
async def test_a_request_that_computed_nothing_is_not_charged(
    access: Access, at: str, script: mock.Script, status: int
) -> None:
    tenants = (Tenant(name="alice", tokens_min=60),)
    direct = {"min_prefill_tokens": 1_000_000} if at == "decode" else {}
    async with disagg(access=access, tenants=tenants, **direct) as (harness, [prefill], [decode]):
        prefill.script("/pd/prefill", script)
        decode.script(CHAT, script)
        long = [{"role": "user", "content": "x" * 40_000}]
        assert (await harness.chat(by(ALICE), messages=long)).status == status
        decode.scripts.clear()
        assert (await harness.chat(by(ALICE))).status == 200
        assert used(harness) == (3, 2)


# --- the queue


@asynccontextmanager
async def full(
    access: Access, admission: Admission = ONE_SLOT, **config: Any
) -> AsyncIterator[tuple[Harness, MockWorker, Connection, Gate]]:
    """A router whose only slot is taken by a stream of Alice's until the gate is opened."""
    async with disagg(access=access, admission=admission, **config) as (harness, _, [decode]):
        gate = Gate()
        decode.script(CHAT, mock.stream(EVENTS, gate, 1))
        first = await harness.asking(by(ALICE), stream=True)
        await gate.reached.wait()
        yield harness, decode, first, gate
        gate.open.set()
        assert (await first.response()).body == STREAM


async def until_waiting(harness: Harness, count: int) -> None:
    await harness.until(lambda: harness.router.gate.queue.waiting == count)


async def test_a_full_queue_is_answered_429_and_a_flood_does_not_keep_others_out(access: Access) -> None:
    async with full(access) as (harness, _, _, gate):
        flood = [await harness.asking(by(ALICE)) for _ in range(2)]
        await until_waiting(harness, 2)
        refused = await harness.chat(by(ALICE))
        assert (refused.status, refused.error["code"]) == (429, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        polite = await harness.asking(by(BOB))
        assert (await flood[1].response()).status == 429  # the newest makes room
        gate.open.set()
        for waited in (polite, flood[0]):
            assert (await waited.response()).body == ANSWER
    assert sum(harness.router.gate.queue_wait.counts) == 3


async def test_by_default_as_many_run_as_keep_the_workers_busy(access: Access) -> None:
    """Twice what a worker computes at a time: then shares of tenants count, not the queue of SGLang."""
    async with full(access, Admission(queue_length=8)) as (harness, decode, _, gate):
        decode.load = {"max_running_requests": 2}
        (worker,) = harness.router.fleet.snapshot("m", 0.0).decode
        await harness.until(lambda: worker.max_running == 2)
        assert harness.router.fleet.snapshot("m", 0.0).slots == 4
        decode.script(CHAT, *[mock.stream(EVENTS, gate, 0)] * 5)
        asking = [await harness.asking(by(ALICE), stream=True) for _ in range(5)]  # one runs already
        await until_waiting(harness, 2)
        gate.open.set()
        for waited in asking:
            assert (await waited.response()).body == STREAM


async def test_what_waits_too_long_is_answered_429(access: Access) -> None:
    short = Admission(running_per_worker=1, queue_s=0.05)
    async with full(access, short) as (harness, _, _, _):
        assert (await harness.chat(by(BOB))).status == 429
        [alice, bob] = harness.router.gate.tenants.all
        assert (alice.running, bob.running, bob.use.refused) == (1, 0, 1)


DEADLINE = "x-request-deadline-ms"


async def test_the_earliest_deadline_comes_first_and_what_cannot_begin_by_its_own_is_refused_at_once(
    access: Access,
) -> None:
    async with full(access, Admission(running_per_worker=1, queue_s=30.0)) as (harness, decode, _, gate):
        for header in (DEADLINE, "x-llm-d-slo-ttft-ms"):
            refused = await harness.chat(by(ALICE) | {header: "1"})
            assert (refused.status, refused.error["code"]) == (429, "deadline_unmet")
            assert "retry-after" in refused.headers
        assert (await harness.chat(by(ALICE) | {DEADLINE: "soon"})).status == 400
        assert (len(decode.requests), harness.router.gate.queue.waiting) == (1, 0)
        asking = []
        for number, deadline_ms in enumerate((None, "20000", "10000", "90000")):
            named = {"x-request-id": str(number)} | ({DEADLINE: deadline_ms} if deadline_ms else {})
            asking.append(await harness.asking(by(ALICE) | named))
            await until_waiting(harness, number + 1)
        gate.open.set()
        for waited in asking:
            assert (await waited.response()).body == ANSWER
        order = [request.headers["x-request-id"].removeprefix("alice:") for request in decode.requests[1:]]
        assert order == ["2", "1", "0", "3"]
        assert (await harness.chat(by(ALICE) | {DEADLINE: "60000"})).body == ANSWER, "a slot is free"


# --- the cluster's token


async def test_workers_see_the_clusters_token_no_key_and_no_tenants_request_as_anothers(
    access: Access,
) -> None:
    """Both chose the same id. The worker follows pages by it, and SGLang names the request so."""
    token = "cluster-token-cluster-token"
    with_token = Access(keys_file=access.keys_file, cluster_token=token)
    async with disagg(access=with_token) as (harness, [prefill], [decode]):
        same = {"x-request-id": "mine", "x-session-id": "s"}
        for key in (ALICE, BOB, ALICE):
            answer = await harness.chat(headers=by(key) | same)
            assert answer.headers["x-request-id"] == "mine"
        for worker, path in ((prefill, "/pd/prefill"), (decode, CHAT)):
            ids = [request.headers["x-request-id"] for request in worker.got(path)]
            assert ids == ["alice:mine", "bob:mine", "alice:mine"]
        [settled] = decode.got("/pd/settled")
        assert settled.json()["request_id"] == "alice:mine"
        requests = [*prefill.requests, *decode.requests]
        assert {r.headers.get("authorization") for r in requests} == {f"Bearer {token}"}


@pytest.mark.parametrize("shown", [False, True])
async def test_where_workers_are_is_no_tenants_business_unless_configured(
    access: Access, shown: bool
) -> None:
    settings = msgspec.structs.replace(access, show_load=shown)
    async with disagg(prefill_policy="cache_aware", access=settings) as (harness, [prefill], [decode]):
        answers = [await harness.chat(headers=by(ALICE))]
        decode.script(CHAT, *[mock.close()] * 9)
        answers.append(await harness.chat(headers=by(ALICE)))
        assert [answer.status for answer in answers] == [200, 502]
        told = [str(answer.headers) + answer.body.decode() for answer in answers]
        for worker in (prefill, decode):
            assert (worker.id in told[0]) is shown
        assert (decode.id in told[1]) is shown
        plan = answers[0].headers["x-pdserve-plan"]
        assert ("requests=" in plan) is shown  # how much they have to do
        assert shown or plan == "decode=least-loaded, prefill=cache-aware, stage=ok"


# --- How many wrong keys one address may try at a router, on each of its ports


FORGIVEN_S = 1e-3


@pytest.fixture(autouse=True)
def forgives_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is, nothing is forgiven within a test."""
    monkeypatch.setattr("pdserve.security.failed_logins.FORGIVEN_S", FORGIVEN_S)


async def guess(harness: Harness, times: int, path: str = "") -> list[Response]:
    """`path`: empty for a chat."""
    keys = [by(f"a key that is wrong {number}") for number in range(times)]
    return [await (harness.get(path, key) if path else harness.chat(key)) for key in keys]


@pytest.mark.parametrize("path", ["", "/v1/models", "/metrics", "/v1/responses/resp_1"])
async def test_an_address_tries_so_many_keys_and_then_waits_whatever_route_it_asks(
    access: Access, path: str
) -> None:
    async with disagg(access=access) as (harness, _, [decode]):
        answers = await guess(harness, BURST + 8, path)
        assert {answer.status for answer in answers[:BURST]} == {401}
        assert {answer.status for answer in answers[BURST:]} == {429}
        last = answers[-1]
        assert (last.error["type"], last.error["code"]) == ("rate_limit_error", "too_many_wrong_keys")
        assert 0 < int(last.headers["retry-after"]) <= 1 / FORGIVEN_S
        assert "www-authenticate" not in last.headers
        assert decode.requests == []
        counted = harness.router.own_metrics()
        assert (counted.value("unknown_keys"), counted.value("unread_keys")) == (BURST, 8)


async def test_a_right_key_that_was_used_from_there_before_is_not_locked_out(access: Access) -> None:
    async with disagg(access=access) as (harness, _, _):
        for _ in range(BURST + 8):  # no key at all is no guess
            assert (await harness.get("/v1/models")).status == 401
        assert (await harness.chat(by(ALICE))).status == 200
        await guess(harness, BURST + 8)
        assert (await harness.chat(by(ALICE))).body == ANSWER
        assert (await harness.get("/v1/models", by(ALICE))).status == 200
        new = await harness.chat(by(BOB))
        assert new.status == 429, "else the answer would tell a guess from a hit"
        in_its_form = await harness.post("/v1/messages", b"{}", {"x-api-key": BOB})
        assert (in_its_form.status, in_its_form.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(in_its_form.headers["retry-after"]) > 0
    async with disagg(access=msgspec.structs.replace(access, proxies=("127.0.0.1",))) as (harness, _, _):
        assert {answer.status for answer in await guess(harness, BURST + 8)} == {401}
        assert (await harness.chat(by(BOB))).status == 200, "what comes by a proxy is not bound here"
