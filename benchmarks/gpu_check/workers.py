"""Workers and a router of the check's own: `pdserve up` gives no GPU to two workers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.gpu_check.answers import Answer
from benchmarks.processes import Child
from benchmarks.stores import BenchError
from pdserve.settings.toml_text import to_toml
from pdserve.up.places.orphan_reaper import OrphanReaper

START_S: Final = 240.0
STOP_S: Final = 45.0
ASK_S: Final = 120.0
LAST_LINES: Final = 6


class Server(Child):
    """`pdserve ROLE --config FILE`, and its HTTP port."""

    def __init__(self, name: str, role: str, config: Mapping[str, Any], directory: Path, port: int) -> None:
        file = directory / f"{name}.toml"
        file.write_text(to_toml(config))
        command = [sys.executable, "-m", "pdserve", role, "--config", str(file)]
        super().__init__(name, command, directory / f"{name}.log")
        self.url = f"http://127.0.0.1:{port}"
        self._ready = f"{self.url}{'/ready' if role == 'router' else '/pd/ready'}"
        self._http = httpx.Client(trust_env=False, timeout=ASK_S)

    def await_ready(self) -> None:
        """Raises BenchError."""
        self.await_true(self._answers, START_S, poll_s=0.2, last_lines=LAST_LINES)

    def _answers(self) -> bool:
        try:
            return self._http.get(self._ready, timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def generate(self, prompt: list[int], new_tokens: int) -> Answer:
        """Raises BenchError."""
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        body = {
            "input_ids": prompt,
            "sampling_params": sampling,
            "return_logprob": True,
            "top_logprobs_num": 2,
        }
        try:
            answer = self._http.post(f"{self.url}/generate", json=body)
        except httpx.HTTPError as error:
            raise BenchError(f"{self.name} did not answer: {type(error).__name__} {error}") from None
        if answer.status_code != 200:
            raise BenchError(f"{self.name} answered {answer.status_code}: {answer.text[:300]}")
        return Answer.of(answer.json())

    def flush(self) -> bool:
        """Whether SGLang has emptied its own caches: not while pages are on their way."""
        return self._http.post(f"{self.url}/flush_cache").status_code == 200

    def close(self) -> None:
        """End it. Idempotent."""
        self._http.close()
        if self.runs:
            self.stop(STOP_S)


@contextmanager
def running(*servers: Server) -> Iterator[OrphanReaper]:
    """Start all and wait until they are ready; none of their processes is left behind. Raises BenchError."""
    reaper = OrphanReaper()
    try:
        for server in servers:
            start(server, reaper)
        for server in servers:
            server.await_ready()
        yield reaper
    finally:
        for server in reversed(servers):
            server.close()
        reaper.close()  # ends what is left of their sessions


def start(server: Server, reaper: OrphanReaper) -> None:
    """Without waiting."""
    server.spawn(stdin=subprocess.DEVNULL, start_new_session=True)
    reaper.watch(server.pid)
