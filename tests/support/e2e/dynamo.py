"""NVIDIA Dynamo over pdserve's pool, started by `pdserve up` as a user does it, and asked."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.settings.config_file import to_toml
from tests.support.e2e.cluster import Process, free_port, http

ROOT: Final = Path(__file__).parents[3]
PYTHON: Final = ROOT / ".venv-dynamo/bin/python"
"""The interpreter with Dynamo; where there is none, the tests that need it are skipped."""
MODEL: Final = "demo-small"
START_S: Final = 660.0  # two engines on a busy machine
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
        address = f"unix:{self.run_dir}/pool0.sock"
        config = PoolClientConfig(nodes=[PoolNodeRef(node="pool0", address=address)])
        with closing(PoolClient(config, "of-the-test", {})) as client:
            return client.status()["pool0"].pages

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
        """Started as the file starts those of `agg`, with nothing in its memory."""
        words = ["--config", f"{self.run_dir}/worker-0.toml", "--engine.port", str(free_port())]
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
    """launch/dynamo.toml with ports of its own. `mode`: agg, or disagg with a worker of each role."""
    port, events = free_port(), f"tcp://127.0.0.1:{free_port()}"
    tables = tomllib.loads((ROOT / "launch/dynamo.toml").read_text())
    tables["cluster"] |= {"run_dir": str(run_dir), "start_timeout_s": START_S}
    tables["worker"]["engine"]["model_path"] = str(model)
    arena = {"capacity_bytes": "512MiB", "arena_dir": str(run_dir / "arena")}
    tables["pool"] = [arena | {"events": {"address": events, "format": "objects"}}]
    worker, frontend = tables["command"]
    frontend["port"] = port
    worker["config"]["pool_events"] = events
    worker["argv"] += ["--", *FLAGS]
    if mode == "disagg":
        # Mooncake listens on all interfaces, for everybody
        worker["config"]["direct"] = {"trusted_network": True, "bootstrap_port": free_port()}
        del worker["count"]
        roles = ("prefill", "decode")
        argv = worker["argv"]
        workers = [
            worker | {"name": role, "argv": [role if w == "agg" else w for w in argv]} for role in roles
        ]
        tables["command"] = [*workers, frontend]
    for one in tables["command"]:
        one["argv"] = [str(PYTHON), *one["argv"][1:]]
    file = run_dir.with_suffix(".toml")
    file.write_text(to_toml(tables))
    argv = [sys.executable, "-m", "pdserve", "up", str(file)]
    script = Process("dynamo", argv, run_dir.with_suffix(".log")).start()
    try:
        served = Dynamo(script, run_dir, port)
        script.wait_ready(lambda: "is ready at http" in script.log.read_text(), START_S)
        script.wait_ready(lambda: bool(served.workers()) and served.answers(served.workers()), START_S)
        yield served
    finally:
        script.stop()
