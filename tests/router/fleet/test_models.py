"""Several models behind one router: what a request means, and that nothing of one touches another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from pdserve.errors import ConfigError, RequestError
from pdserve.router.api.endpoints import ENDPOINTS
from pdserve.router.config.limits import Probe
from pdserve.router.config.router import RouterConfig, Session
from pdserve.router.fleet.registry import MAX_ADAPTER_CHARS, Models
from pdserve.settings.config_file import load_config
from tests.support.router.harness import CHAT, Harness, before, chat_body
from tests.support.router.mock_worker import MockWorker, workers

GENERATES = frozenset({"generate"})


@pytest.mark.parametrize(
    ("requested", "served", "model"),
    [
        ("a", ["a", "b"], "a"),
        (None, ["a"], "a"),
        ("", ["a"], "a"),
        ("default", ["a"], "a"),
        ("a:adapter", ["a", "b"], "a"),
        ("a:7b", ["a:7b", "a"], "a:7b"),
    ],
)
def test_model_names(requested: str | None, served: list[str], model: str) -> None:
    assert Models().resolve(requested, ENDPOINTS[CHAT], dict.fromkeys(served, GENERATES)) == model


@pytest.mark.parametrize(
    ("requested", "served", "status"),
    [("x", ["a"], 404), (None, ["a", "b"], 400), ("x", [], 503), ("default", ["a", "b"], 400)],
)
def test_models_that_are_not_served(requested: str | None, served: list[str], status: int) -> None:
    with pytest.raises(RequestError) as caught:
        Models().resolve(requested, ENDPOINTS[CHAT], dict.fromkeys(served, GENERATES))
    assert caught.value.status == status
    assert all(repr(name) in str(caught.value) for name in served)
    assert caught.value.code == {404: "model_not_found", 400: None, 503: "no_healthy_worker"}[status]


def test_a_default_model_is_meant_where_none_is_named() -> None:
    models = Models(default="b")
    both = dict.fromkeys("ab", GENERATES)
    assert [models.resolve(name, ENDPOINTS[CHAT], both) for name in (None, "", "default", "a")] == [
        "b",
        "b",
        "b",
        "a",
    ]
    with pytest.raises(RequestError) as caught:
        models.resolve(None, ENDPOINTS[CHAT], {"a": GENERATES})  # not another model in its place
    assert caught.value.status == 503


def test_a_configured_model_that_is_not_there_yet_is_no_unknown_one() -> None:
    models = Models(["a", "b"])
    for name, status in (("b", 503), ("b:adapter", 503), ("c", 404)):
        with pytest.raises(RequestError) as caught:
            models.resolve(name, ENDPOINTS[CHAT], {"a": GENERATES})
        assert caught.value.status == status


def test_what_a_model_cannot_do_is_refused() -> None:
    served = {"writer": GENERATES, "vectors": frozenset({"embed"})}
    assert Models().resolve("vectors", ENDPOINTS["/v1/embeddings"], served) == "vectors"
    assert Models().resolve("vectors", ENDPOINTS["/tokenize"], served) == "vectors"
    for name, path in (("writer", "/v1/embeddings"), ("vectors", CHAT), ("vectors", "/generate")):
        with pytest.raises(RequestError) as caught:
            Models().resolve(name, ENDPOINTS[path], served)
        assert (caught.value.status, caught.value.code) == (400, "unsupported_endpoint")
        assert name in str(caught.value)
        assert path in str(caught.value)


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_an_adapters_name_of_any_length_is_not_remembered(path: str) -> None:
    served = {"a": GENERATES}
    assert Models().resolve("a:" + "x" * MAX_ADAPTER_CHARS, ENDPOINTS[path], served) == "a"
    with pytest.raises(RequestError, match="at most 256 characters") as caught:
        Models().resolve("a:" + "x" * (MAX_ADAPTER_CHARS + 1), ENDPOINTS[path], served)
    assert (caught.value.status, caught.value.param) == (400, "model")


# --- over real connections


def group(model: str, decodes: int = 2) -> list[MockWorker]:
    made = [MockWorker("prefill", model, namespace=f"ns-{model}")]
    return made + [MockWorker("decode", model, namespace=f"ns-{model}") for _ in range(decodes)]


async def served_by(harness: Harness, model: str, **headers: str) -> tuple[str, str]:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    response = await harness.post(CHAT, chat_body(model=model), given)
    assert response.status == 200, response.body
    return response.headers["x-pdserve-prefill"], response.headers["x-pdserve-decode"]


async def test_requests_go_to_their_models_workers_and_the_list_has_all() -> None:
    first, second = group("a"), group("b")
    async with before(*first, *second) as harness:
        listed = (await harness.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["a", "b"]
        for model, own in (("a", first), ("b", second)):
            for _ in range(4):
                prefill, decode = await served_by(harness, model)
                assert prefill == own[0].id
                assert decode in (own[1].id, own[2].id)
        unknown = await harness.post(CHAT, chat_body(model="c"))
        assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")
        assert unknown.error["param"] == "model"
        unnamed = await harness.post(CHAT, {"messages": []})
        assert (unnamed.status, unnamed.error["param"]) == (400, "model")
        assert (await harness.get("/v1/models/c")).error["code"] == "model_not_found"


async def test_equals_take_turns_within_each_model() -> None:
    """Requests that alternate between two models of two workers must not always meet the same worker."""
    first, second = group("a"), group("b")
    async with before(*first, *second, decode_policy="round_robin") as harness:
        met: dict[str, set[str]] = {"a": set(), "b": set()}
        for _ in range(4):
            for model, seen in met.items():
                seen.add((await served_by(harness, model))[1])
        assert {model: len(seen) for model, seen in met.items()} == {"a": 2, "b": 2}


async def test_a_session_key_of_one_model_says_nothing_of_another() -> None:
    first, second = group("a", decodes=1), group("b", decodes=1)
    stay = Session(when_gone="refuse", mode="hard")
    async with before(*first, *second, session=stay) as harness:
        for _ in range(2):
            for model, own in (("a", first), ("b", second)):
                assert (await served_by(harness, model, x_session_id="s"))[1] == own[1].id
        settled = [
            request.json()["request_id"] for w in (first[1], second[1]) for request in w.got("/pd/settled")
        ]
        assert len(settled) == 2  # each model's second turn waited for its own first one
        assert len(set(settled)) == 2
        assert len(harness.router.proxy.placer.sessions) == 2


async def test_a_worker_of_a_model_that_is_not_configured_is_refused() -> None:
    first, second = group("a", decodes=1), group("b", decodes=1)
    async with workers(*second), before(*first, models=("a",), probe=Probe(interval_s=0.02)) as harness:
        odd = harness.router.fleet.members.join(second[1].url, "decode")
        await harness.until(lambda: odd.refused is not None)
        assert "none of the configured models ('a')" in odd.refused
        assert (await harness.post(CHAT, chat_body(model="b"))).status == 404


async def test_readiness_says_that_a_model_cannot_be_served() -> None:
    first, second = group("a", decodes=1), group("b", decodes=1)
    async with before(*first, *second, probe=Probe(interval_s=0.02)) as harness:
        state = (await harness.get("/ready")).json()
        assert (state["models"], state["degraded"]) == ({"a": True, "b": True}, [])
        second[1].ready = False
        while (state := (await harness.get("/ready")).json())["models"]["b"]:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.005)
        assert state["ready"]
        assert state["degraded"] == ["1 of 2 models have no worker that is ready"]
        answer = await harness.post(CHAT, chat_body(model="b"))
        assert answer.status == 503


# --- Aliases through a router before workers of two models


@asynccontextmanager
async def two_models(**config: Any) -> AsyncIterator[tuple[Harness, MockWorker, MockWorker]]:
    """A router before a worker of `old` and one of `new`."""
    old = MockWorker("decode", "old")
    new = MockWorker("decode", "new", context_length=2048, namespace="of-new", adapters=["legal"])
    async with before(old, new, **config) as harness:
        yield harness, old, new


def models_asked(worker: MockWorker) -> list[str]:
    return [request.json()["model"] for request in worker.got(CHAT)]


async def test_workers_answers_and_metrics_see_the_model_behind_an_alias() -> None:
    async with two_models(aliases={"latest": "new", "law": "new:legal"}) as (harness, old, new):
        for name in ("latest", "law", "old"):
            assert (await harness.chat(model=name)).status == 200
        assert (models_asked(old), models_asked(new)) == (["old"], ["new", "new:legal"])
        metrics = (await harness.get("/metrics")).body.decode()
        assert 'pdserve_router_model_request_seconds_count{model="new"} 2.0' in metrics
        assert 'model="latest"' not in metrics
        cards = {card["id"]: card for card in (await harness.get("/v1/models")).json()["data"]}
        assert cards["latest"]["max_model_len"] == 2048
        assert (await harness.get("/v1/models/law")).status == 200


async def test_an_alias_changes_without_a_restart_and_may_be_the_default() -> None:
    async with two_models(aliases={"latest": "old"}, default_model="latest") as (harness, old, new):
        assert (await harness.chat(model="")).status == 200
        router = harness.router
        router.config = msgspec.structs.replace(router.config, aliases={"latest": "new"})
        router.reload()
        assert (await harness.chat(model="latest")).status == 200
        assert (models_asked(old), models_asked(new)) == (["old"], ["new"])


@pytest.mark.parametrize(
    ("aliases", "said"),
    [
        ({"x": ""}, "none of 'models'"),
        ({"x": "c"}, "none of 'models'"),
        ({"": "a"}, "characters"),
        ({"x" * 257: "a"}, "characters"),
        ({"x": "y", "y": "a"}, "is an alias itself"),
    ],
)
def test_aliases_that_cannot_be_meant_are_refused(aliases: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(RouterConfig, None, {"models": ["a", "b"], "aliases": aliases})
