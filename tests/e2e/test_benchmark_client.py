"""The benchmarks' client against a real worker: what it counts is what SGLang says."""

from __future__ import annotations

import shutil

import pytest

from benchmarks.lib.figures import outcome_of
from benchmarks.lib.load import Shape, make_load
from benchmarks.lib.run import Server, run_load
from tests.support.e2e.cluster import Worker, eventually, http
from tests.support.e2e.prompts import PAGE
from tests.support.e2e.site import Site

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

SHAPE = Shape(users=2, rounds=2, turn_tokens=200, output_tokens=8)


def test_a_second_turn_finds_the_whole_pages_of_the_first(agg_worker: Worker) -> None:
    load = make_load(SHAPE, 71)
    outcome = outcome_of(run_load(Server(agg_worker.url), load, lambda line: None, lockstep=True))
    assert outcome.errors == {}
    first, second = outcome.turns
    assert (first.prompt_tokens, first.output_tokens, first.cached.total) == (400, 16, 0)
    assert second.prompt_tokens == 2 * (200 + 8 + 200)
    # the answer's last token was never computed
    assert second.cached.total == 2 * ((200 + 7) // PAGE * PAGE)
    assert second.cached.device is not None
    assert first.inter_token_ms.p50 is not None


def test_pages_come_from_the_pools_ssd_after_a_reboot_of_its_node(site: Site, agg_worker: Worker) -> None:
    load, pool = (
        make_load(Shape(users=1, rounds=1, turn_tokens=10 * PAGE + 7, output_tokens=1), 73),
        site.pools["aggpool"],
    )

    def cached() -> int | None:
        outcome = outcome_of(run_load(Server(agg_worker.url), load, lambda line: None))
        assert outcome.errors == {}
        return outcome.all.cached.storage

    def stored() -> bool:
        report = pool.status()
        return bool(report.pages and report.tiers[0].pages >= report.pages)

    assert not cached()
    eventually(stored, "all pages are on SSD", 60.0)
    agg_worker.flush()
    assert cached() == 10 * PAGE
    pool.kill()
    shutil.rmtree(pool.directory / "arena" / pool.name)  # as a reboot does
    pool.start()
    eventually(
        lambda: http.get(f"{agg_worker.url}/pd/ready").json()["pool"] == "up", "the pool is back", 60.0
    )
    agg_worker.flush()
    assert cached() == 10 * PAGE
