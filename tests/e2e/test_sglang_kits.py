"""SGLang's own tests of its API, against plain SGLang and the router: none fails at the router only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.e2e.cluster import Router, Worker
from tests.support.e2e.site import NEEDS, Site
from tests.support.sglang_kits import PASSED, outcomes

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(1200)]

LIMIT_S = 400.0


@dataclass(frozen=True)
class Beside:
    """Plain SGLang, an aggregated worker, and a prefill and a decode worker, these behind routers."""

    plain: Worker
    routers: dict[str, Router]


@pytest.fixture(scope="module")
def beside_plain(site: Site, run_dir: Path) -> Iterator[Beside]:
    plain, agg, prefill, decode = (site.servers.workers[name] for name in NEEDS["beside_plain"])
    with (
        Router(run_dir, agg=[agg], name="router-kits-agg") as of_agg,
        Router(run_dir, prefill=[prefill], decode=[decode], name="router-kits-disagg") as of_pair,
    ):
        yield Beside(plain, {"agg": of_agg, "disagg": of_pair})


@pytest.fixture(scope="module")
def at_plain_sglang(beside_plain: Beside, model: Path) -> dict[str, str]:
    """Some fail: the model's weights are random."""
    return outcomes(beside_plain.plain.url, "demo-tiny", str(model), LIMIT_S)


@pytest.mark.parametrize("kind", ["agg", "disagg"])
def test_no_test_of_sglang_fails_at_the_router_only(
    beside_plain: Beside, at_plain_sglang: dict[str, str], kind: str, model: Path
) -> None:
    passed = {name for name, end in at_plain_sglang.items() if end == PASSED}
    assert len(passed) > len(at_plain_sglang) / 2
    at_router = outcomes(beside_plain.routers[kind].url, "demo-tiny", str(model), LIMIT_S)
    assert {name: end for name, end in at_router.items() if name in passed and end != PASSED} == {}
    assert at_router.keys() == at_plain_sglang.keys()
