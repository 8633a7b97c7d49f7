"""Real vLLM and LMCache, in an environment of their own (docs/other-engines.md), run by `pdserve up`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.settings.config_file import to_toml
from tests.support.e2e.cluster import free_port

ROOT: Final = Path(__file__).parents[3]
PYTHON: Final = Path(os.environ.get("PDSERVE_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
"""The interpreter with vLLM; where there is none, the tests that need it are skipped."""
START_S: Final = 480.0  # an engine on a busy machine
SOON_S: Final = 60.0
TOKEN: Final = "of-this-run-alone"
ARGUMENTS: Final = [
    *("--enforce-eager", "--dtype", "float32", "--max-model-len", "4096", "--max-num-seqs", "4"),
    *("--block-size", "64", "--gpu-memory-utilization", "0.1", "--no-enable-log-requests"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
]
ENVIRONMENT: Final = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
AUTHORIZED: Final = {"authorization": f"Bearer {TOKEN}"}


def until(condition: Any, limit_s: float = SOON_S) -> None:
    """For what other processes do in their own time."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not become true in time"
        time.sleep(0.2)  # between looks


def is_ok(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def ask(
    base_url: str, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> httpx.Response:
    """A whole answer, status 200."""
    response = httpx.post(base_url + path, json=dict(body), headers=headers, timeout=120.0, trust_env=False)
    assert response.status_code == 200, response.text
    return response


@contextmanager
def plain_vllm(model: Path, log: Path) -> Iterator[str]:
    """vLLM alone: no connector, no pool. Its URL."""
    port = free_port()
    argv = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "m"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*map(str, argv), "--port", str(port), *ARGUMENTS],
            env={**os.environ, **ENVIRONMENT},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        until(lambda: process.poll() is not None or is_ok(f"http://127.0.0.1:{port}/health"), START_S)
        assert process.poll() is None, log.read_text()[-4000:]
        yield f"http://127.0.0.1:{port}"
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Stop a process and its session."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)


class VllmCluster:
    """A running cluster: a pool node, a prefill and a decode worker of vLLM, each with an LMCache server of
    its own. So what the decode worker has of a prompt came through the pool.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], run_dir: Path, port: int, workers: Mapping[str, int]
    ) -> None:
        self.process = process
        self.run_dir = run_dir
        self.url = f"http://127.0.0.1:{port}"
        self.workers = {name: f"http://127.0.0.1:{number}" for name, number in workers.items()}

    def complete(self, prompt: str, tokens: int = 16, **more: Any) -> httpx.Response:
        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        headers = more.pop("headers", None)
        return ask(self.url, "/v1/completions", body | more, headers)

    def is_ready(self) -> bool:
        """All workers are at the router."""
        try:
            said = httpx.get(f"{self.url}/ready", timeout=5.0, trust_env=False).json()
        except httpx.HTTPError:
            return False
        return len(said["workers"]) == 2 and all(one["ready"] for one in said["workers"])

    def pool_pages(self) -> int:
        """Pages in the pool node's memory."""
        address = f"unix:{self.run_dir}/pool0.sock"
        config = PoolClientConfig(nodes=[PoolNodeRef(node="pool0", address=address)])
        with closing(PoolClient(config, "of-the-test", {})) as client:
            return client.status()["pool0"].pages

    def kill(self, name: str) -> None:
        """A process of the cluster, which leads a session, and all of its children, at once."""
        [leader] = [
            child
            for child in psutil.Process(self.process.pid).children()
            if child.status() != psutil.STATUS_ZOMBIE and self._is(name, child)
        ]
        os.killpg(leader.pid, signal.SIGKILL)
        until(lambda: not leader.is_running() or leader.status() == psutil.STATUS_ZOMBIE)

    def _is(self, name: str, child: psutil.Process) -> bool:
        argv = " ".join(child.cmdline())
        if name in self.workers:
            return f"--port {self.workers[name].rpartition(':')[2]} " in argv
        return f"/{name}.toml" in argv

    def log(self, name: str) -> str:
        return (self.run_dir / f"{name}.log").read_text(errors="replace")


def commands(ports: Mapping[str, int]) -> list[dict[str, Any]]:
    """Those of launch/vllm.toml, an LMCache server for each worker."""
    server, prefill, decode = tomllib.loads((ROOT / "launch/vllm.toml").read_text())["command"]
    servers = [server | {"name": name, "port": ports[name]} for name in ("lmcache0", "lmcache1")]
    workers = []
    for name, of, one in (("vllm0", "lmcache0", prefill), ("vllm1", "lmcache1", decode)):
        words = [word.replace(":lmcache}", f":{of}}}") for word in one["argv"]]
        words += ["--served-model-name", "m", *ARGUMENTS]
        env = {**one["env"], **ENVIRONMENT}
        workers.append(one | {"name": name, "port": ports[name], "argv": words, "env": env})
    made = [*servers, *workers]
    for one in made:
        one["argv"] = [str(PYTHON), *one["argv"][1:]]
    return made


@contextmanager
def vllm_cluster(model: Path, run_dir: Path) -> Iterator[VllmCluster]:
    """Started by `pdserve up`, as a user does it."""
    names = ("vllm0", "vllm1", "lmcache0", "lmcache1")
    ports = dict(zip((*names, "router"), (free_port() for _ in range(5)), strict=True))
    tables = {
        # two engines that start at once want more memory than they keep: one was killed for it
        "cluster": {"run_dir": str(run_dir), "start_timeout_s": START_S, "start_parallelism": 1},
        "router": {"port": ports["router"], "min_prefill_tokens": 0, "access": {"cluster_token": TOKEN}},
        "pool": [{"capacity_bytes": "512MiB", "restart": "never", "keep": False, "metrics": ""}],
        "worker": {"engine": {"model_path": str(model)}},
        "command": commands(ports),
    }
    file = run_dir.with_suffix(".toml")
    file.write_text(to_toml(tables))
    log = run_dir.with_suffix(".log")
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "pdserve", "up", str(file)],
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    cluster = VllmCluster(process, run_dir, ports["router"], {name: ports[name] for name in names})
    try:
        until(lambda: process.poll() is not None or cluster.is_ready(), 2 * START_S)
        assert process.poll() is None, log.read_text(errors="replace")[-6000:]
        yield cluster
    finally:
        end(process)
