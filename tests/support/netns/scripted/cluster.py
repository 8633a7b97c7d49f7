"""A cluster over three hosts with scripted workers, and a fourth host for those who use it.

a   router, pool node, prefill worker
b   router, pool node, decode worker
c   pool node, prefill worker, decode worker, etcd
desk   the supervisor, the clients
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pdserve.up.launchers.launcher import SHELL_VARIABLE
from tests.support.netns.machines import Machines, machines
from tests.support.netns.scripted.talk import TalkConfig
from tests.support.netns.scripted.worker import MODEL
from tests.support.processes import Child, HarnessError, client

HOSTS: Final = ("a", "b", "c", "desk")
DESK: Final = HOSTS[-1]
ROUTER_PORT, ETCD_PORT = 8000, 2379
START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 60.0
UPGRADE_TIMEOUT_S: Final = 300.0
FAKETIME: Final = tuple(Path(f"/usr/lib/{os.uname().machine}-linux-gnu/faketime").glob("libfaketime.so.1"))
FILE: Final = """
[cluster]
name = "hosts"
run_dir = "{run_dir}"
hosts = [{hosts}]
start_parallelism = 4
stop_grace_s = 20
max_restarts = 1000

[router]
count = 2
host = "0.0.0.0"
port = {router_port}
insecure = true
place.hosts = ["a", "b"]
decode_policy = "affinity"
min_prefill_tokens = 64

[worker.pool] # long, since all these hosts share one machine's processors
connect_timeout_s = 3.0
exists_timeout_s = 4.0
restart_wait_s = 4.9

[[pool]]
count = 3
place.hosts = ["a", "b", "c"]
capacity_bytes = "128MiB"
ucx.trusted_network = {ucx}
cluster.ping_timeout_s = 3.0
cluster.etcd.endpoints = ["{etcd}"]

[[prefill]]
place.hosts = ["a"]
[[prefill]]
place.hosts = ["c"]
[[decode]]
place.hosts = ["b"]
[[decode]]
place.hosts = ["c"]
"""


class HostsCluster:
    """It, while it runs."""

    def __init__(self, hosts: Machines, directory: Path) -> None:
        self.hosts = hosts
        self.network = hosts.network
        self._directory = directory
        self.etcd_url = f"http://{self.network.address('c')}:{ETCD_PORT}"
        self.turns_path = directory / "turns.jsonl"
        self._started: list[Child] = []
        self._etcd: Child

    def start(self, clients: int, *, ucx: bool) -> None:
        """Have all of it serve, and the clients ask. Raises HarnessError."""
        network = self.network
        self.start_etcd()
        named = ", ".join(f'"{host}={network.address(host)}"' for host in HOSTS[:-1])
        values = {"hosts": named, "router_port": ROUTER_PORT, "etcd": self.etcd_url}
        file = self._directory / "cluster.toml"
        file.write_text(FILE.format(run_dir=self._directory / "run", ucx=str(ucx).lower(), **values))
        supervise = ["-m", "tests.support.netns.scripted.supervise", str(file)]
        self._supervisor = self._start("supervisor", DESK, sys.executable, *supervise)
        self._supervisor.await_true(lambda: "hosts is ready at" in self.log(), START_TIMEOUT_S, last_lines=20)
        config = TalkConfig(
            name="talk",
            urls=[f"http://{network.address(host)}:{ROUTER_PORT}" for host in ("a", "b")],
            out=str(self.turns_path),
            model=MODEL,
            clients=clients,
            words=48,
            answer_words=24,
            most_words=900,
            think_s=0.5,
            seed=21,
        )
        talk = client(config, self._directory, "tests.support.netns.scripted.talk")
        self._start("talk", DESK, *map(str, talk.command))

    def log(self) -> str:
        """All that its processes said."""
        return self._supervisor.log()

    def start_etcd(self) -> None:
        """On its host, with the data that it had. Raises HarnessError."""
        program = shutil.which("etcd") or "/usr/bin/etcd"
        given = {
            "data-dir": f"{self._directory}/etcd",
            "listen-client-urls": self.etcd_url,
            "advertise-client-urls": self.etcd_url,
            "listen-peer-urls": "http://127.0.0.1:2380",
        }
        words = [f"--{key}={value}" for key, value in given.items()]
        self._etcd = self._start("etcd", "c", program, *words, "--unsafe-no-fsync")
        self._etcd.await_true(lambda: "ready to serve client requests" in self._etcd.log(), START_TIMEOUT_S)

    def set_clock(self, host: str, ahead_s: int) -> None:
        """Set the wall clock of a host; its processes see it within a second."""
        clock = self._directory / f"{host}.clock"
        new = clock.with_suffix(".new")
        new.write_text(f"{ahead_s:+d}\n")
        new.replace(clock)

    def upgrade(self) -> None:
        """Restart everything, one process after the other, host by host. Raises HarnessError."""
        words = (sys.executable, "-m", "pdserve", "up", "restart", str(self._directory / "cluster.toml"))
        command = list(map(str, self.hosts.words(DESK, words)))
        done = subprocess.run(command, capture_output=True, text=True, timeout=UPGRADE_TIMEOUT_S, check=False)
        if done.returncode:
            raise HarnessError(done.stderr)

    def stop(self) -> None:
        """Clients first. Raises HarnessError where the supervisor does not end well."""
        for child in reversed(self._started):
            is_clean = child.stop(STOP_TIMEOUT_S)
            if child is self._supervisor and not is_clean:
                raise HarnessError(f"the supervisor did not stop its cluster: {child.log_path}")

    def kill(self) -> None:
        for child in self._started:
            child.kill()

    def _start(self, name: str, host: str, *words: str) -> Child:
        command = self.hosts.words(host, words)
        child = Child(name, command, self._directory / f"{name}.log")
        child.spawn(dies_with_parent=True, env={**os.environ, SHELL_VARIABLE: str(self.hosts.shell)})
        self._started.append(child)
        return child


@contextmanager
def cluster(directory: Path, clients: int, *, ucx: bool) -> Iterator[HostsCluster]:
    """Running, with clients that talk. `ucx`: pages go between hosts by UCX, else by TCP. Raises
    HarnessError.
    """
    environment = {}
    if FAKETIME:
        variables = {
            "LD_PRELOAD": str(FAKETIME[0]),
            "FAKETIME_TIMESTAMP_FILE": f"{directory}/b.clock",
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
        environment["b"] = "".join(
            f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()
        )
        (directory / "b.clock").write_text("+0\n")
    with machines(HOSTS, directory, directory / "run", environment) as hosts:
        made = HostsCluster(hosts, directory)
        try:
            made.start(clients, ucx=ucx)
            yield made
        finally:
            made.kill()
