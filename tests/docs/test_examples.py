"""The examples of docs/extending. tests/contracts runs the eviction policy and the tier."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from docs.examples.endpoint import CLASSIFY
from docs.examples.placement import MORE_REQUESTS, OwnHostFirst
from docs.generate.product import ROOT
from pdserve.router.api.endpoints import ENDPOINTS, Endpoint
from pdserve.router.fleet.worker import Worker
from pdserve.router.placement.policies import Ask, PolicySettings, make_policy
from pdserve.settings import plugins
from tests.support.router.harness import disagg, run
from tests.support.router.mock_worker import MockWorker, answer

EXAMPLES = sorted((ROOT / "docs" / "examples").glob("[!_]*.py"))


def workers(near: int, far: int) -> list[Worker]:
    found = [Worker("decode", "http://127.0.0.1:1"), Worker("decode", "http://10.0.0.1:1")]
    for worker, requests in zip(found, (near, far), strict=True):
        worker.in_flight = requests
    return found


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_every_example_stands_in_a_page(example: Path) -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "extending").glob("*.md"))
    assert f'--8<-- "examples/{example.name}"' in pages


def test_the_placement_example_prefers_its_own_host() -> None:
    policy = OwnHostFirst(PolicySettings())
    choice = policy.choose(Ask(), workers(near=MORE_REQUESTS, far=0))
    assert (choice.worker.host, str(choice)) == ("127.0.0.1", "own-host")
    choice = policy.choose(Ask(), workers(near=MORE_REQUESTS + 1, far=0))
    assert (choice.worker.host, str(choice)) == ("10.0.0.1", "least-loaded(requests=0)")


def test_the_placement_example_takes_others_where_its_own_host_has_none() -> None:
    choice = OwnHostFirst(PolicySettings()).choose(Ask(), workers(near=0, far=0)[1:])
    assert choice.worker.host == "10.0.0.1"


def test_the_placement_example_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("own_host_first", "docs.examples.placement:OwnHostFirst", "pdserve.router.policies")
    monkeypatch.setattr(plugins, "_found", lambda group, path: {"own_host_first": point})
    assert isinstance(make_policy("own_host_first", PolicySettings()), OwnHostFirst)


def test_the_endpoint_example_is_served_and_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENDPOINTS, CLASSIFY.path, CLASSIFY)

    async def main() -> None:
        async with disagg(make=lambda role: MockWorker(role, tasks=["embed"])) as (harness, _, (decode,)):
            said = {"data": [{"index": 0, "label": "good"}], "usage": {"prompt_tokens": 3}}
            decode.script(CLASSIFY.path, answer(200, said))
            assert (await harness.post(CLASSIFY.path, {"model": "m", "input": "x"}, {})).json() == said
            assert CLASSIFY.path in (await harness.get("/openapi.json")).json()["paths"]

    run(main())


def test_the_page_on_endpoints_tells_every_field_of_a_row() -> None:
    page = (ROOT / "docs" / "extending" / "endpoint.md").read_text()
    assert [name for name in Endpoint.__struct_fields__ if f"`{name}`" not in page] == []


def test_who_follows_the_example_keeps_tenants_caches_apart() -> None:
    assert CLASSIFY.salt == ENDPOINTS[CLASSIFY.path].salt != ""
