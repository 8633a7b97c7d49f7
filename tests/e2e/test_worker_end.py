"""How workers end in the middle of a stream: asked to, asked twice, or killed outright.

No process is left of them.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from pdserve.pages import page_hashes
from tests.support.e2e.arena import page_offset
from tests.support.e2e.cluster import STOP_TIMEOUT_S, Worker, eventually, http
from tests.support.e2e.prompts import PAGE, token_ids
from tests.support.e2e.site import Site

PROMPT = token_ids(9300, 100)
SEGMENTS = [4 * 2 * 32 * PAGE * 4] * 2
"""K and V of one float32 page of the tiny model: 4 layers, 2 heads of 32."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]


@contextlib.contextmanager
def streaming(worker: Worker, tokens: int) -> Iterator[Iterator[str]]:
    """The lines of a stream, of which the first is there."""
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        "stream": True,
    }
    with http.stream("POST", f"{worker.url}/generate", json=body, timeout=120.0) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        yield lines


def ends(worker: Worker, tokens: int, stop: Callable[[psutil.Process], None]) -> tuple[int, list[str]]:
    """The worker's exit status when it is stopped so while it streams, and the rest of the stream; its
    children end with it.
    """
    popen = worker.popen
    rest = []
    with streaming(worker, tokens) as lines:
        process = psutil.Process(popen.pid)
        children = process.children(recursive=True)
        assert len(children) >= 2
        stop(process)
        with contextlib.suppress(httpx.HTTPError):  # cut off in the middle of a chunk
            rest += [line for line in lines if line]
    status = popen.wait(STOP_TIMEOUT_S)
    assert psutil.wait_procs(children, timeout=STOP_TIMEOUT_S)[1] == []
    assert "Traceback" not in worker.process.log.read_text()
    return status, rest


def readiness(worker: Worker) -> dict[str, Any]:
    answer = http.get(f"{worker.url}/pd/ready")
    return {**answer.json(), "status": answer.status_code}


def test_asked_to_end_it_finishes_what_it_has_and_publishes_its_pages(agg_worker: Worker, site: Site) -> None:
    namespace = agg_worker.namespace

    def stop(process: psutil.Process) -> None:
        process.terminate()
        eventually(lambda: readiness(agg_worker)["draining"], "it says that it stops", 10.0, 0.01)
        assert readiness(agg_worker)["status"] == 503
        # who has not heard yet is served
        assert agg_worker.generate(token_ids(9301, 20), 2)["meta_info"]["completion_tokens"] == 2

    status, rest = ends(agg_worker, 120, stop)
    assert status == 0
    assert site.etcd.keys("/pdserve/") == []
    assert rest[-1] == "data: [DONE]"
    last = json.loads(rest[-2].removeprefix("data: "))
    assert last["meta_info"]["finish_reason"]["type"] == "length"
    pages = page_hashes([*PROMPT, *last["output_ids"][:-1]], PAGE)
    assert len(pages) == 3
    page_offset(site.pools["aggpool"], *namespace, pages[-1], SEGMENTS)


def test_asked_twice_it_ends_at_once(elastic_workers: list[Worker]) -> None:
    worker = elastic_workers[0]

    def stop(process: psutil.Process) -> None:
        process.terminate()
        eventually(lambda: readiness(worker)["draining"], "it says that it stops", 10.0, 0.01)
        process.terminate()

    status, rest = ends(worker, 3900, stop)  # its stop_grace_s is minutes
    assert status == 0
    assert "data: [DONE]" not in rest


def test_killed_it_leaves_no_process(elastic_workers: list[Worker]) -> None:
    status, _ = ends(elastic_workers[1], 3900, lambda process: process.send_signal(signal.SIGKILL))
    assert status == -signal.SIGKILL
