"""A whole cluster on one host of a network, as `docs/cluster.md` sets it up: two pool nodes, a worker with
real SGLang, and a router; tokens and API keys everywhere.
"""

from __future__ import annotations

import ipaddress
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psutil

from pdserve.kvpool.admin.node_client import NodeClient
from pdserve.kvpool.protocol.messages import StatusReport
from pdserve.security.tokens import Secret
from pdserve.settings.config_file import to_toml
from tests.support.netns.lab import Lab, last_lines
from tests.support.netns.program import Program

ROOT: Final = Path(__file__).resolve().parents[3]

START_TIMEOUT_S: Final = 600.0  # a machine may have more to do
ADMIN: Final = "operators-token-of-this-pool"
MEMBER: Final = "nodes-token-of-this-pool"
READERS: Final = "workers-token-of-this-pool"
ALPHA: Final = "token-of-the-tenant-alpha"
ALPHA_READER: Final = "token-to-read-what-alpha-has"
BETA: Final = "token-of-the-tenant-beta"
GAMMA: Final = "token-of-the-tenant-gamma"
CLUSTER: Final = "routers-token-at-the-workers"
SECRETS: Final = (ADMIN, MEMBER, READERS, ALPHA, ALPHA_READER, BETA, GAMMA, CLUSTER)
POOL_PORTS: Final = (7700, 7701)
DATA_PORTS: Final = (7710, 7711)
WORKER_PORT: Final = 8001
ROUTER_PORT: Final = 8000
OPEN: Final = {
    **dict.fromkeys(POOL_PORTS, "the pool's control port"),
    **dict.fromkeys(DATA_PORTS, "the pool's port for pages"),
    WORKER_PORT: "the worker",
    ROUTER_PORT: "the router",
}
"""What other hosts may reach, and nothing else."""


class GuardedCluster:
    """On the host `far`."""

    def __init__(self, network: Lab, directory: Path, model: Path) -> None:
        self.network = network
        self.host = network.address("far")
        self.directory = directory
        directory.chmod(0o755)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.tried: set[tuple[str, str, str]] = set()
        """Who, which attack, where: see attacks.py."""
        for number in (0, 1):
            self._start(f"pool{number}", ("pool", "serve"), self._node(number))
        for name in ("pool0", "pool1"):
            self._await(name, f"pool node {name} is ready")
        self._start("worker", ("agg",), self._worker(model))
        self._start("router", ("router",), self._router())
        visitor = ("-m", "tests.support.netns.visitor", self.host)
        self.client = Program(network, "far", directory / "honest.log", *visitor)
        until(self.answers, lambda: last_lines(self.directory / "worker.log"), START_TIMEOUT_S)

    def answers(self) -> bool:
        """The router answers an honest client."""
        body = {"model": "demo-tiny", "prompt": "hello", "max_tokens": 2}
        request = {"port": ROUTER_PORT, "method": "POST", "path": "/v1/completions", "body": body}
        return bool(self.client.do("request", key=self.api_key, **request)["status"] == 200)

    def _node(self, number: int) -> dict[str, Any]:
        return {
            "name": f"pool{number}",
            "listen": [f"tcp:{self.host}:{POOL_PORTS[number]}", f"unix:{self.socket(number)}"],
            "arena_dir": f"/dev/shm/pdserve-hostile-{self.directory.name}",
            "capacity_bytes": "64MiB",
            "keep": False,
            "admin_token": ADMIN,
            "cluster": {
                "token": MEMBER,
                "peers": [f"tcp:{self.host}:{port}" for port in POOL_PORTS],
            },
            "tcp": {"port": DATA_PORTS[number]},
            "namespace_defaults": {"read_token": READERS},
            "namespaces": [
                {"name": "alpha", "read_token": ALPHA_READER, "write_token": ALPHA},
                {"name": "beta", "read_token": BETA, "write_token": BETA},
                {"name": "gamma", "read_token": GAMMA, "write_token": GAMMA},
            ],
        }

    def _worker(self, model: Path) -> dict[str, Any]:
        nodes = [
            {"node": f"pool{i}", "address": f"tcp:{self.host}:{port}"} for i, port in enumerate(POOL_PORTS)
        ]
        return {
            "cluster_token": CLUSTER,
            "engine": {
                "model_path": str(model),
                "served_model_name": "demo-tiny",
                "host": self.host,
                "port": WORKER_PORT,
                "page_size": 64,
            },
            "pool": {"nodes": nodes, "token": READERS, "page_key": "page-key-of-the-workers"},
        }

    def _router(self) -> dict[str, Any]:
        keys = self.directory / "keys"
        command = [sys.executable, "-m", "pdserve", "key", "acme", "--file", str(keys)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        self.api_key = said.split()[-1]
        return {
            "host": self.host,
            "port": ROUTER_PORT,
            "agg": [f"http://{self.host}:{WORKER_PORT}"],
            "access": {"keys_file": str(keys)},  # its token is in its environment
        }

    def _start(self, name: str, command: tuple[str, ...], config: dict[str, Any]) -> None:
        file = self.directory / f"{name}.toml"
        file.touch(mode=0o600)
        file.write_text(to_toml(config))
        with (self.directory / f"{name}.log").open("wb") as log:
            whole = ("-m", "pdserve", *command, "--config", str(file))
            variables = {"PDSERVE_CLUSTER_TOKEN": CLUSTER} if name == "router" else {}
            self.processes[name] = self.network.start("far", *whole, log=log, variables=variables)

    def _await(self, name: str, says: str) -> None:
        log = self.directory / f"{name}.log"
        until(lambda: says in log.read_text(), lambda: last_lines(log), START_TIMEOUT_S)

    def socket(self, number: int) -> Path:
        return self.directory / f"pool{number}.sock"

    # --- how it is

    def listening(self) -> dict[int, tuple[str, str]]:
        """Every TCP port of its processes: address, and the program that listens."""
        found = {}
        for name, process in self.processes.items():
            for each in family(process.pid):
                with suppress(psutil.NoSuchProcess):
                    for one in connections(each.pid):
                        found[one[1]] = (one[0], name)
        return found

    def pids(self) -> list[int]:
        """Of all its processes."""
        return [each.pid for process in self.processes.values() for each in family(process.pid)]

    def open_files(self) -> list[str]:
        """Files of shared memory and below /tmp that its processes have open, or mapped. Everybody may read
        those of the checkout: they do not count.
        """
        found = set()
        for pid in self.pids():
            with suppress(OSError):
                found |= {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}
            with suppress(psutil.NoSuchProcess):
                found |= {mapped.path for mapped in psutil.Process(pid).memory_maps()}
        places = ("/dev/shm/", "/tmp/")
        return sorted(path for path in found if path.startswith(places) and ROOT not in Path(path).parents)

    def alive(self) -> list[str]:
        """Processes that run."""
        return [name for name, process in self.processes.items() if process.poll() is None]

    def status(self, number: int) -> StatusReport:
        asked = NodeClient(f"unix:{self.socket(number)}", token=Secret(ADMIN))
        try:
            return asked.status()
        finally:
            asked.close()

    def memory_bytes(self) -> dict[str, int]:
        """Resident memory of each process, its children's too."""
        return {
            name: sum(each.memory_info().rss for each in family(process.pid))
            for name, process in self.processes.items()
        }

    def close(self) -> None:
        """Stop them as an operator does."""
        self.client.close()
        for process in reversed(self.processes.values()):
            process.terminate()
        for name, process in self.processes.items():
            try:
                assert process.wait(60) == 0, last_lines(self.directory / f"{name}.log")
            finally:
                process.kill()
                process.wait()


def family(pid: int) -> list[psutil.Process]:
    """The process and what it started."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def connections(pid: int) -> list[tuple[str, int]]:
    """Where a process listens, in its own network namespace (psutil reads that of its caller)."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            target = str(link.readlink())
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = []
    for table, width in (("tcp", 8), ("tcp6", 32)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            local, state, inode = (line.split()[i] for i in (1, 3, 9))
            if state == "0A" and inode in inodes:
                address, port = local.split(":")
                words = [address[i : i + 8] for i in range(0, width, 8)]
                packed = b"".join(bytes.fromhex(word)[::-1] for word in words)
                found.append((str(ipaddress.ip_address(packed)), int(port, 16)))
    return found


def until(holds: Callable[[], bool], why: Callable[[], object], within_s: float) -> None:
    deadline_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline_s, why()
        time.sleep(0.1)
