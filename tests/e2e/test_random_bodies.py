"""Random bodies at a real cluster: none is answered by a 5xx, ends a worker, or is felt by an honest client.

The first 200 run by default; `PDSERVE_RANDOM_BODIES` says another number, as at night, and another seed.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
import pytest

from tests.support.e2e.cluster import Router, Worker, http
from tests.support.e2e.random_bodies import Asked, random_body
from tests.support.e2e.site import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(7200)]

SEED: Final = int(os.environ.get("PDSERVE_RANDOM_SEED", "1"))
COUNT: Final = int(os.environ.get("PDSERVE_RANDOM_BODIES", "200"))
AT_A_TIME: Final = int(os.environ.get("PDSERVE_RANDOM_AT_A_TIME", "4"))
MODEL: Final = "demo-tiny"
ENOUGH: Final = 5
"""Wrong answers, after which nothing more is asked."""
ENOUGH_TO_MEASURE: Final = 2_000
"""Fewer bodies leave too few honest answers for a p99."""
MEASURED_S: Final = 30.0
MOST_FELT: Final = 1.5
"""How much longer an honest client's p99 may be beside random bodies than beside as many honest requests."""
LONG_TOKENS: Final = 4_000
"""What a body without `max_tokens` may cost; one or two of the random ones are answered at any time."""


def ask(url: str, asked: Asked) -> str:
    """What was wrong with the answer; empty: nothing."""
    headers = {"content-type": "application/json"}
    try:
        answer = http.post(f"{url}{asked.path}", content=asked.body, headers=headers, timeout=120.0)
    except httpx.HTTPError as error:
        return f"{type(error).__name__} {error}"
    if answer.status_code >= 500:
        return f"{answer.status_code} {answer.text[:300]}"
    if answer.status_code >= 400 and not is_error(answer.content):
        return f"{answer.status_code} without an error's form: {answer.text[:300]}"
    wrong = [
        line for line in answer.text.splitlines() if line.startswith("data:") and '"server_error"' in line
    ]
    return wrong[0][:300] if wrong else ""


def is_error(body: bytes) -> bool:
    said = json.loads(body)
    return (
        isinstance(said, dict) and isinstance(said.get("error"), dict) and bool(said["error"].get("message"))
    )


class Honest:
    """A client that asks the same small thing again and again in a thread; how long each answer took."""

    def __init__(self, router: Router) -> None:
        self._url = f"{router.url}/v1/completions"
        self._body = {"model": MODEL, "prompt": [7] * 70, "max_tokens": 4, "temperature": 0}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.seconds: list[float] = []
        self.wrong: list[str] = []
        self.texts: set[str] = set()

    def __enter__(self) -> Honest:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            began_s = time.monotonic()
            answer = http.post(self._url, json=self._body, timeout=120.0)
            self.seconds.append(time.monotonic() - began_s)
            if answer.status_code != 200:
                self.wrong.append(answer.text[:200])
            else:
                self.texts.add(answer.json()["choices"][0]["text"])


def lives(workers: list[Worker]) -> list[tuple[int, bool]]:
    """Which processes the workers are."""
    return [(worker.popen.pid, worker.is_running) for worker in workers]


def test_random_bodies_end_nothing_and_are_felt_by_nobody(cluster: Cluster) -> None:
    """Through the router, and each tenth straight at a worker: its own door is the same."""
    before = lives(cluster.workers)

    wrong: list[str] = []

    def one(number: int) -> None:
        if len(wrong) >= ENOUGH:
            return
        url = cluster.decode[0].url if number % 10 == 0 else cluster.router.url
        asked = random_body(SEED, number, MODEL)
        if said := ask(url, asked):
            wrong.append(f"body {number} of seed {SEED}: {said}; {asked.told}")

    is_measured = COUNT >= ENOUGH_TO_MEASURE
    beside_honest = beside_honest_ones(cluster.router) if is_measured else []
    with Honest(cluster.router) as honest, ThreadPoolExecutor(AT_A_TIME) as threads:
        list(threads.map(one, range(COUNT)))
    logs = [worker.process.tail(10) for worker in cluster.workers if wrong and worker.process is not None]
    assert wrong == [], "\n".join([*wrong, *logs])
    assert honest.wrong == []
    assert len(honest.texts) == 1, "it has one answer, whatever others ask"
    assert lives(cluster.workers) == before
    ready: dict[str, Any] = http.get(f"{cluster.router.url}/ready").json()
    assert all(worker["ready"] for worker in ready["workers"]), ready
    if is_measured:
        beside_honest += beside_honest_ones(cluster.router)
        print(f"beside {AT_A_TIME} honest ones: {told(beside_honest)}; beside these: {told(honest.seconds)}")
        assert p99_s(honest.seconds) <= MOST_FELT * p99_s(beside_honest)


def beside_honest_ones(router: Router) -> list[float]:
    """Seconds of each answer to one client while as many honest ones ask as random bodies are sent at a time,
    half of them for long answers: what so many requests cost each other here, whatever is in them.
    """
    long = {"model": MODEL, "prompt": [7] * 70, "max_tokens": LONG_TOKENS, "ignore_eos": True, "stream": True}

    def ask_for_long(ended: threading.Event) -> None:
        while not ended.is_set():
            with http.stream("POST", f"{router.url}/v1/completions", json=long, timeout=120.0) as answer:
                for _ in answer.iter_lines():
                    if ended.is_set():
                        break

    ended = threading.Event()
    with ThreadPoolExecutor(AT_A_TIME) as threads, contextlib.ExitStack() as stack:
        stack.callback(ended.set)
        for _ in range(AT_A_TIME // 2):
            threads.submit(ask_for_long, ended)
        measured, *_ = [stack.enter_context(Honest(router)) for _ in range(1 + AT_A_TIME - AT_A_TIME // 2)]
        time.sleep(MEASURED_S)
    return measured.seconds


def p99_s(seconds: list[float]) -> float:
    return sorted(seconds)[int(0.99 * len(seconds))]


def told(seconds: list[float]) -> str:
    return f"{len(seconds)} answers, median {statistics.median(seconds):.3f} s, p99 {p99_s(seconds):.3f} s"
