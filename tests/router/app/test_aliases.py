"""Aliases through a router before workers of two models."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from pdserve.errors import ConfigError
from pdserve.router.config.router import RouterConfig
from pdserve.settings.config_file import load_config
from tests.support.router.harness import CHAT, Harness, before
from tests.support.router.mock_worker import MockWorker


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
