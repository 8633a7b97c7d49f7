"""NVIDIA Dynamo over pdserve's pool, started by launch/dynamo.sh as a user does it, and asked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.up.claims import is_free
from tests.support.e2e.cluster import Process, free_port, http

DYNAMO_PORTS: Final = (0, 100, 101, 200, 201, 300, 301)
"""Ports that launch/dynamo.sh listens on, from the one it is given."""
ROOT: Final = Path(__file__).parents[3]
PYTHON: Final = ROOT / ".venv-dynamo/bin/python"
"""The interpreter with Dynamo; where there is none, the tests that need it are skipped."""
MODEL: Final = "demo-small"
START_S: Final = 660.0  # as the script, and a little more
FLAGS: Final = ["--dtype", "float32", "--max-total-tokens", "8192"]


@dataclass(frozen=True)
class Completion:
    tokens: tuple[int, ...]
    cached_tokens: int
    worker: int
    """That answered."""


class Dynamo:
    """A frontend, its workers, and the pool node below them."""

    def __init__(self, script: Process, run_dir: Path, port: int) -> None:
        self.script = script
        self.run_dir = run_dir
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def workers(self) -> list[int]:
        """Instances, as the frontend names them."""
        said = http.get(f"{self.url}/health").text
        return [
            int(one)
            for one in re.findall(r'"endpoint":"generate","namespace":"[^"]*","instance_id":(\d+)', said)
        ]

    def complete(self, prompt: Sequence[int], tokens: int = 4, worker: int | None = None) -> Completion:
        """`worker`: that shall answer; none: the router chooses."""
        headers = {} if worker is None else {"x-worker-instance-id": str(worker)}
        body = {
            "model": MODEL,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "nvext": {"extra_fields": ["completion_token_ids", "worker_id"]},
        }
        response = http.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=120.0)
        assert response.status_code == 200, response.text
        return _completion(response.json())

    def pool_pages(self) -> int:
        """Pages in the pool node's memory."""
        address = f"unix:{self.run_dir}/pool.sock"
        config = PoolClientConfig(nodes=[PoolNodeRef(node="pool", address=address)])
        with closing(PoolClient(config, "of-the-test", {})) as client:
            return client.status()["pool"].pages

    def events_heard(self) -> int:
        """That workers stored blocks, as the router has heard."""
        said = http.get(f"{self.url}/metrics").text
        found = re.findall(r'kv_cache_events_applied\{.*event_type="stored",status="ok".*\} (\d+)', said)
        return sum(map(int, found))

    def answers(self, workers: Sequence[int]) -> bool:
        """All of these, through the frontend."""
        body = {"model": MODEL, "prompt": [1], "max_tokens": 1}
        headers = [{"x-worker-instance-id": str(worker)} for worker in workers]
        asked = (http.post(f"{self.url}/v1/completions", json=body, headers=one) for one in headers)
        return all(response.status_code == 200 for response in asked)

    def another_worker(self) -> Process:
        """Started as the script starts those of `agg`, with nothing in its memory."""
        words = ["--config", f"{self.run_dir}/worker.toml", "--engine.port", str(free_port())]
        events = f"tcp://127.0.0.1:{free_port()}"
        argv = [str(PYTHON), "-m", "pdserve", "dynamo", "agg", *words, "--kv-events", events, "--", *FLAGS]
        environment = {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": f"{self.run_dir}/discovery",
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "HF_HUB_OFFLINE": "1",
        }
        return Process("another", argv, self.run_dir / "another.log", environment).start()


def _completion(body: dict[str, Any]) -> Completion:
    extension = body["nvext"]
    details = body["usage"]["prompt_tokens_details"] or {}
    return Completion(
        tuple(extension["completion_token_ids"]),
        details.get("cached_tokens") or 0,
        extension["worker_id"]["decode_worker_id"],
    )


@contextmanager
def dynamo(mode: str, model: Path, run_dir: Path) -> Iterator[Dynamo]:
    """`mode`: of launch/dynamo.sh."""
    ports = iter(free_port, 0)
    port = next(port for port in ports if all(is_free("127.0.0.1", port + more) for more in DYNAMO_PORTS))
    words = ["--port", str(port), "--model", str(model), "--run-dir", str(run_dir)]
    arena = ["--arena-dir", str(run_dir / "arena"), "--pool-capacity", "512MiB"]
    run_dir.mkdir()
    argv = [str(ROOT / "launch/dynamo.sh"), mode, *words, *arena, "--", *FLAGS]
    script = Process("dynamo.sh", argv, run_dir / "script.log").start()
    try:
        script.wait_ready(lambda: "ready: http" in script.log.read_text(), START_S)
        yield Dynamo(script, run_dir, port)
    finally:
        script.stop()
