"""How workers end, in the middle of a stream: asked to, or killed outright; no process is left. The last
tests of the workers that stand alone.
"""

from __future__ import annotations

import contextlib
import signal

import httpx
import psutil
import pytest

from tests.e2e.cluster import STOP_TIMEOUT_S, Worker, http

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]


def ends(worker: Worker, number: int) -> int:
    """The worker's exit status when it is sent this signal while it streams; its children end with it."""
    assert worker.process is not None
    assert worker.process.popen is not None
    popen = worker.process.popen
    body = {"model": "demo-tiny", "prompt": "Go on.", "max_tokens": 4000, "stream": True, "ignore_eos": True}
    url = f"{worker.url}/v1/completions"
    with http.stream("POST", url, json=body, timeout=60.0) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        children = psutil.Process(popen.pid).children(recursive=True)
        assert len(children) >= 2
        popen.send_signal(number)
        with contextlib.suppress(httpx.HTTPError):  # cut off in the middle of a chunk
            for _ in lines:
                pass
    status = popen.wait(STOP_TIMEOUT_S)
    assert psutil.wait_procs(children, timeout=STOP_TIMEOUT_S)[1] == []
    assert "Traceback" not in worker.process.log.read_text()
    return status


def test_asked_to_end_it_ends_well(file_worker: Worker) -> None:
    assert ends(file_worker, signal.SIGTERM) == 0


def test_killed_it_leaves_no_process(ucx_worker: Worker) -> None:
    assert ends(ucx_worker, signal.SIGKILL) == -signal.SIGKILL
