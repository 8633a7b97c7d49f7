"""Aliases through a router before workers of two models."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from pdserve.router.config.aliases import Alias
from tests.support.router.harness import CHAT, Harness, before
from tests.support.router.mock_worker import MockWorker

ALIAS = "latest"


@asynccontextmanager
async def canary(**models: float) -> AsyncIterator[tuple[Harness, MockWorker, MockWorker]]:
    """A router with an alias before a worker of `old` and one of `new`."""
    old, new = (
        MockWorker("decode", "old"),
        MockWorker("decode", "new", context_length=2048, namespace="of-new"),
    )
    aliases = (Alias(name=ALIAS, models=models),)
    async with before(old, new, aliases=aliases) as harness:
        yield harness, old, new


def reweigh(harness: Harness, **models: float) -> None:
    aliases = (Alias(name=ALIAS, models=models),)
    harness.router.config = msgspec.structs.replace(harness.router.config, aliases=aliases)
    harness.router.reload()


def leave(harness: Harness, worker: MockWorker) -> None:
    """The worker is not ready, and the router knows."""
    worker.ready = False
    harness.router.fleet.on_probe_not_ready(harness.router.fleet.by_id[worker.id])


async def ask(harness: Harness, session: str, **more: object) -> int:
    headers = {"x-session-id": session} if session else {}
    return (await harness.chat(headers, model=ALIAS, **more)).status


def models_asked(*workers: MockWorker) -> list[list[str]]:
    return [[json.loads(request.body)["model"] for request in worker.got(CHAT)] for worker in workers]


async def test_workers_and_metrics_see_the_model_that_was_chosen() -> None:
    async with canary(new=1) as (harness, old, new):
        assert await ask(harness, "s") == 200
        assert models_asked(old, new) == [[], ["new"]]
        metrics = (await harness.get("/metrics")).body.decode()
        assert f'pdserve_router_alias_requests_total{{alias="{ALIAS}",model="new"}} 1.0' in metrics
        assert 'pdserve_router_model_request_seconds_count{model="new"} 1.0' in metrics
        assert f'model="{ALIAS}"' not in metrics


async def test_a_conversation_keeps_its_model_when_weights_change_and_new_ones_follow_them() -> None:
    async with canary(old=1) as (harness, old, new):
        for number in range(4):
            assert await ask(harness, f"early-{number}") == 200
        reweigh(harness, old=0.001, new=1000)
        for number in range(4):
            assert await ask(harness, f"early-{number}") == 200
            assert await ask(harness, f"late-{number}") == 200
        assert models_asked(old, new) == [["old"] * 8, ["new"] * 4]
        reweigh(harness, old=0, new=1)
        assert await ask(harness, "early-0") == 200
        assert len(new.got(CHAT)) == 5


async def test_without_a_session_key_the_first_message_tells_the_conversation() -> None:
    async with canary(old=1, new=1) as (harness, old, new):
        for number in range(12):
            first = {"role": "user", "content": f"question {number}"}
            for turn in range(3):
                said = [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}] * turn
                assert await ask(harness, "", messages=[first, *said]) == 200
        firsts = [{r.json()["messages"][0]["content"] for r in worker.got(CHAT)} for worker in (old, new)]
        assert not firsts[0] & firsts[1]
        assert len(firsts[0]) + len(firsts[1]) == 12
        assert all(firsts)


async def test_a_model_whose_workers_are_away_leaves_its_conversations_to_the_others() -> None:
    async with canary(old=0.001, new=1000) as (harness, old, new):
        assert await ask(harness, "s") == 200
        leave(harness, new)
        assert await ask(harness, "s") == 200
        assert models_asked(old, new) == [["old"], ["new"]]
        leave(harness, old)
        assert await ask(harness, "s") == 503


async def test_aliases_are_listed_and_take_the_shortest_context_of_their_models() -> None:
    async with canary(old=1, new=1, unknown=1) as (harness, _, _):
        cards = {card["id"]: card for card in (await harness.get("/v1/models")).json()["data"]}
        assert set(cards) == {"old", "new", ALIAS}
        assert cards[ALIAS]["max_model_len"] == 2048
        assert (await harness.get(f"/v1/models/{ALIAS}")).json() == cards[ALIAS]
        reweigh(harness, unknown=1)
        assert (await harness.get(f"/v1/models/{ALIAS}")).status == 404
        assert await ask(harness, "s") == 503  # it is known by the alias, and may come


async def test_other_names_go_to_their_models_as_ever() -> None:
    async with canary(old=1) as (harness, old, new):
        assert (await harness.chat(model="new")).status == 200
        assert (await harness.chat(model="old")).status == 200
        assert (await harness.chat(model="none")).status == 404
        assert [len(worker.got(CHAT)) for worker in (old, new)] == [1, 1]


async def test_a_stored_response_goes_on_with_its_model_whatever_the_weights() -> None:
    async with canary(old=1) as (harness, old, _):
        stored = await harness.post("/v1/responses", {"model": ALIAS, "input": "hi"})
        assert stored.status == 200
        [request] = old.got("/v1/responses")
        id_ = request.json()["request_id"]
        reweigh(harness, new=1)
        again = {"model": ALIAS, "input": "more", "previous_response_id": id_}
        assert (await harness.post("/v1/responses", again)).status == 200
        assert [request.json()["model"] for request in old.got("/v1/responses")] == ["old", "old"]
