"""A worker by its own command, as users start it: what its start costs, and that it serves as those do that
the warm server starts for the other tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.e2e import warm
from tests.support.e2e.cluster import Worker, eventually
from tests.support.e2e.prompts import NEW_TOKENS, PAGE, Answer, differences, token_ids
from tests.support.e2e.site import Site, ask_cold, engine_settings

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

IMPORTS = 1.8
"""Processor time of a start until the worker is ready, in imports of torch, SGLang and pdserve. One import in
each of the worker's three processes would be more than three.
"""


@pytest.fixture
def cold_worker(site: Site, model: Path, run_dir: Path) -> Iterator[Worker]:
    """Beside it the warm server starts, which imports the same once."""
    pages = {"nodes": [site.pools["pool0"].ref]}
    worker = Worker("decode", "cold", run_dir, engine_settings(model), pages, is_cold=True)
    try:
        yield worker.start().wait_ready()
    finally:
        worker.end()


def processor_s(pid: int) -> float:
    """Of a process and its children, those that have ended among them."""
    root = psutil.Process(pid)
    return sum(sum(process.cpu_times()[:4]) for process in (root, *root.children(recursive=True)))


def test_a_start_costs_little_more_than_one_import_and_the_worker_finds_its_pages(
    cold_worker: Worker,
) -> None:
    used_s, import_s = processor_s(cold_worker.popen.pid), warm.import_s()
    print(f"a start takes {used_s:.1f} s of a core, one import {import_s:.1f} s")
    assert used_s <= IMPORTS * import_s
    prompt = token_ids(9400, 5 * PAGE + 7)
    [cold] = ask_cold(cold_worker, [prompt])

    def comes_from_the_pool() -> bool:
        cold_worker.flush()
        body = cold_worker.generate(prompt, NEW_TOKENS)
        assert differences([cold], [Answer.of(body)], str) == []
        return (body["meta_info"]["cached_tokens_details"] or {}).get("storage", 0) == 5 * PAGE

    eventually(comes_from_the_pool, "the prompt comes from the pool", 60.0)
