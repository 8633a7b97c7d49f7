"""Several models behind one router: what a request means, and that nothing of one touches another."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdserve.errors import ConfigError, RequestError
from pdserve.router.api.endpoints import ENDPOINTS
from pdserve.router.config.limits import Probe
from pdserve.router.config.router import RouterConfig, Session
from pdserve.router.fleet.registry import ANY, MAX_ADAPTER_CHARS, Models
from pdserve.settings.config_file import load_config
from tests.support.router.harness import CHAT, Harness, before, chat_body
from tests.support.router.mock_worker import MockWorker, workers

GENERATES = frozenset({"generate"})


@pytest.mark.parametrize(
    ("models", "served", "named"),
    [
        (Models(), "ab", {"a": "a", "a:adapter": "a", "a:" + "x" * MAX_ADAPTER_CHARS: "a"}),
        (
            Models(),
            "ab",
            {"x": 404, ":x": 404, None: 400, "default": 400, "a:" + "x" * (MAX_ADAPTER_CHARS + 1): 400},
        ),
        (Models(), "a", {None: "a", "": "a", "default": "a"}),
        (Models(), ["a:7b", "a"], {"a:7b": "a:7b"}),
        (Models(), "", {"x": 503, None: 503}),
        (Models(default="b"), "ab", {None: "b", "": "b", "default": "b", "a": "a"}),
        (Models(default="b"), "a", {None: 503, "b": 503, "c": 404}),  # not another model in its place
        (Models(["a", "b"]), "a", {"b": 503, "b:adapter": 503, "c": 404}),
        (Models(["a", "a:7b"]), "a", {"a:7b": "a"}),
        (Models(default="a:x"), "a", {"a:x": "a", None: 503}),  # nor without its adapter
    ],
)
def test_what_names_of_models_mean(models: Models, served: Any, named: dict[str | None, str | int]) -> None:
    tasks = dict.fromkeys(served, GENERATES)
    for requested, meant in named.items():
        if isinstance(meant, str):
            assert models.resolve(requested, ENDPOINTS[CHAT], tasks) == meant
            continue
        with pytest.raises(RequestError) as caught:
            models.resolve(requested, ENDPOINTS[CHAT], tasks)
        assert (caught.value.status, caught.value.param) == (meant, None if meant == 503 else "model")
        assert caught.value.code == {404: "model_not_found", 400: None, 503: "no_healthy_worker"}[meant]


@pytest.mark.parametrize(
    ("served", "known", "named"),
    [
        ("", "", {None: ANY, "x": ANY, "b": "b"}),  # whoever comes says whether it serves that
        ("", "a", {"a": "a", "a:adapter": "a", "b": "b", "x": 404}),
        ("c", "a", {"a": "a", "c:adapter": "c", None: "c", "x": 404}),
    ],
)
def test_a_request_waits_for_the_model_that_it_means(
    served: str, known: str, named: dict[str | None, str | int]
) -> None:
    for requested, meant in named.items():
        if isinstance(meant, str):
            assert Models(["b"]).awaited(requested, dict.fromkeys(served, GENERATES), known) == meant
            continue
        with pytest.raises(RequestError) as caught:
            Models(["b"]).awaited(requested, dict.fromkeys(served, GENERATES), known)
        assert (caught.value.status, caught.value.code) == (meant, "model_not_found")


def test_what_a_model_cannot_do_is_refused() -> None:
    served = {"writer": GENERATES, "vectors": frozenset({"embed"})}
    for path in ("/v1/embeddings", "/tokenize"):
        assert Models().resolve("vectors", ENDPOINTS[path], served) == "vectors"
    for name, path in (("writer", "/v1/embeddings"), ("vectors", CHAT), ("vectors", "/generate")):
        with pytest.raises(RequestError, match=f"{name}.*{path}") as caught:
            Models().resolve(name, ENDPOINTS[path], served)
        assert (caught.value.status, caught.value.code) == (400, "unsupported_endpoint")


# --- over real connections


def group(model: str, decodes: int = 2) -> list[MockWorker]:
    made = [MockWorker("prefill", model, namespace=f"ns-{model}")]
    return made + [MockWorker("decode", model, namespace=f"ns-{model}") for _ in range(decodes)]


async def served_by(harness: Harness, model: str, **headers: str) -> tuple[str, str]:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    response = await harness.post(CHAT, chat_body(model=model), given)
    assert response.status == 200, response.body
    return response.headers["x-pdserve-prefill"], response.headers["x-pdserve-decode"]


async def test_requests_and_sessions_go_to_their_models_workers_which_take_turns_within_each_model() -> None:
    first, second = group("a"), group("b")
    stay = Session(when_gone="refuse", mode="hard", without_key="round_robin")
    probe = Probe(interval_s=0.02)
    async with before(*first, *second, session=stay, decode_policy="affinity", probe=probe) as harness:
        listed = (await harness.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["a", "b"]
        met: dict[str, set[str]] = {"a": set(), "b": set()}
        for _ in range(4):  # requests that alternate between models must not always meet the same worker
            for model, own in (("a", first), ("b", second)):
                prefill, decode = await served_by(harness, model)
                assert prefill == own[0].id
                met[model].add(decode)
        assert met == {"a": {one.id for one in first[1:]}, "b": {one.id for one in second[1:]}}
        unknown = await harness.post(CHAT, chat_body(model="c"))
        assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")
        unnamed = await harness.post(CHAT, {"messages": []})
        assert (unnamed.status, unnamed.error["param"]) == (400, "model")
        assert (await harness.get("/v1/models/c")).error["code"] == "model_not_found"

        for _ in range(2):
            for model, own in (("a", first), ("b", second)):
                assert (await served_by(harness, model, x_session_id="s"))[1] in {one.id for one in own}
        settled = [asked.json()["request_id"] for w in (*first, *second) for asked in w.got("/pd/settled")]
        assert len(settled) == len(set(settled)) == 2, "the second turn of each waited for its own first one"
        assert len(harness.router.proxy.placer.sessions) == 2

        state = (await harness.get("/ready")).json()
        assert (state["models"], state["degraded"]) == ({"a": True, "b": True}, [])
        for worker in second[1:]:
            worker.ready = False
        while (state := (await harness.get("/ready")).json())["models"]["b"]:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.005)
        assert state["ready"]
        assert state["degraded"] == ["1 of 2 models have no worker that is ready"]
        assert (await harness.post(CHAT, chat_body(model="b"))).status == 503


async def test_a_worker_of_a_model_that_is_not_configured_is_refused() -> None:
    first, second = group("a", decodes=1), group("b", decodes=1)
    async with workers(*second), before(*first, models=("a",), probe=Probe(interval_s=0.02)) as harness:
        odd = harness.router.fleet.members.join(second[1].url, "decode")
        await harness.until(lambda: odd.refused is not None)
        assert "none of the configured models ('a')" in odd.refused
        assert (await harness.post(CHAT, chat_body(model="b"))).status == 404


# --- Aliases through a router before workers of two models


async def test_workers_and_metrics_see_the_model_behind_an_alias_which_may_be_the_default() -> None:
    old = MockWorker("decode", "old")
    new = MockWorker("decode", "new", context_length=2048, namespace="of-new", adapters=["legal"])
    aliases = {"latest": "new", "law": "new:legal"}
    async with before(old, new, aliases=aliases, default_model="latest") as harness:
        for name in ("latest", "law", "old", ""):
            assert (await harness.chat(model=name)).status == 200
        assert (models_asked(old), models_asked(new)) == (["old"], ["new", "new:legal", "new"])
        metrics = (await harness.get("/metrics")).body.decode()
        assert 'pdserve_router_model_request_seconds_count{model="new"} 3.0' in metrics
        assert 'model="latest"' not in metrics
        cards = {card["id"]: card for card in (await harness.get("/v1/models")).json()["data"]}
        assert cards["latest"]["max_model_len"] == 2048
        assert (await harness.get("/v1/models/law")).status == 200


def models_asked(worker: MockWorker) -> list[str]:
    return [request.json()["model"] for request in worker.got(CHAT)]


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
