"""Every launcher of `pdserve.up.launchers` keeps its contract: the supervisor over stand-ins, for real.

Ray and sshd are not installed everywhere. Where one is missing, its tests are skipped, with its name. Slurm's
commands are stand-ins, which run a step on this host.
"""

from __future__ import annotations

import http.client
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.up.cluster import Cluster, processes_that_mention, running, wait_until
from tests.support.up.ray_cluster import ray_cluster
from tests.support.up.slurm_commands import slurm_commands
from tests.support.up.ssh_hosts import ssh_hosts

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]

DISAGG = """
[cluster]
name = "stand-in"
hosts = ["n1=127.0.0.1", "n2=127.0.0.2"]
start_parallelism = 3
stop_grace_s = 5
[router]
journal = "JOURNAL"
[worker.engine]
journal = "JOURNAL"
[worker.env]
OF_THE_TABLE = "yes"
[[pool]]
journal = "JOURNAL"
count = 2
[[prefill]]
[[decode]]
"""


class Where(NamedTuple):
    """A place, and the variables that lead to it."""

    on: str
    variables: dict[str, str]
    hosts: int


EXTENDED = [pytest.param(name, marks=pytest.mark.extended) for name in ("slurm", "ray")]


@pytest.fixture(scope="module", params=["local", "ssh", *EXTENDED])
def where(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Where]:
    if request.param == "local":
        yield Where("local", {}, 1)
        return
    starts = {"ssh": ssh_hosts, "slurm": slurm_commands, "ray": ray_cluster}
    with starts[request.param](tmp_path_factory.mktemp(request.param)) as variables:
        yield Where(request.param, variables, 2)


def ask(cluster: Cluster, name: str, path: str) -> None:
    config = tomllib.loads((cluster.run_dir / f"{name}.toml").read_text())
    home = config.get("engine", config)
    connection = http.client.HTTPConnection(home["host"], home["port"], timeout=10)
    with suppress(http.client.HTTPException, ConnectionError):
        connection.request("GET", path)
        connection.getresponse()
    connection.close()


def start(where: Where, tmp_path: Path, toml: str = DISAGG):  # type: ignore[no-untyped-def]
    return running(tmp_path, toml, on=where.on, variables=where.variables)


def nothing_is_left(tmp_path: Path) -> None:
    wait_until(lambda: not processes_that_mention(str(tmp_path)), "all processes have ended")


GRACEFUL = DISAGG.replace("[worker.engine]", '[worker.engine]\nbehave = "graceful"')


def test_stages_start_in_order_and_stop_in_reverse_and_processes_drain(where: Where, tmp_path: Path) -> None:
    with start(where, tmp_path, GRACEFUL) as cluster:
        cluster.wait_for(r"stand-in is ready at http://127.0.0.1:\d+")
        notes = [(entry["role"], entry["what"]) for entry in cluster.journal()]
        assert [role for role, what in notes if what == "start"][:2] == ["pool", "pool"]
        for role in ("prefill", "decode"):
            assert notes.index((role, "ready")) < notes.index(("router", "start"))
        cluster.process.send_signal(signal.SIGINT)
        assert cluster.finish() == 0
        stopped = [line.split()[2] for line in cluster.lines if line.endswith("has stopped")]
        assert stopped == ["router", "prefill0", "decode0", "pool0", "pool1"]
        drained = {entry["role"] for entry in cluster.journal() if entry["what"] == "drain"}
        assert drained == {"prefill", "decode"}
        assert not any("killed" in line for line in cluster.lines)
    nothing_is_left(tmp_path)


class TestOneCluster:
    """Tests that leave it as ready as it was."""

    @pytest.fixture(scope="class")
    def shared(self, where: Where, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
        with start(where, tmp_path_factory.mktemp("shared")) as cluster:
            cluster.wait_for(r"stand-in is ready at")
            yield cluster

    def test_processes_are_spread_over_the_hosts_and_wired_by_their_names(
        self, where: Where, shared: Cluster
    ) -> None:
        configs = [(entry["role"], entry["config"]) for entry in shared.journal() if entry["what"] == "start"]
        pools = [config for role, config in configs if role == "pool"]
        router = next(config for role, config in configs if role == "router")
        if where.hosts == 1:
            assert all("cluster" in pool for pool in pools)
            return
        addresses = {pool["cluster"]["advertise"] for pool in pools}
        assert len(addresses) == 2
        assert all(set(pool["cluster"]["peers"]) == addresses for pool in pools)
        for role in ("prefill", "decode"):
            worker = next(config for found, config in configs if found == role)
            assert router[role] == [worker["advertise"]]
            assert worker["engine"]["host"] == "0.0.0.0"

    def test_a_process_that_dies_is_started_again(self, shared: Cluster) -> None:
        ask(shared, "decode0", "/die")
        shared.wait_for(r"error: decode0 exited with status 4")
        shared.wait_for(r"asked to die")
        shared.wait_for(r"decode0 is ready after")
        starts = [
            entry for entry in shared.journal() if (entry["role"], entry["what"]) == ("decode", "start")
        ]
        assert [entry["again"] for entry in starts] == [False, True]

    def test_all_output_reaches_the_log_and_the_console(self, shared: Cluster) -> None:
        ask(shared, "decode0", "/talk")
        log = shared.run_dir / "decode0.log"
        wait_until(lambda: log.stat().st_size >= 1 << 20, "a mebibyte of output")
        assert log.read_text().startswith("decode listens\n")
        assert sum(line == "x" * 1023 for line in log.read_text().splitlines()) == 1024
        shared.wait_for(r"decode0 +\| x{1023}$")


def test_one_that_dies_before_it_is_ready_stops_the_rest_and_its_last_lines_are_shown(
    where: Where, tmp_path: Path
) -> None:
    toml = DISAGG.replace("[[decode]]", '[[decode]]\nengine.behave = "die_at_start"')
    with start(where, tmp_path, toml) as cluster:
        assert cluster.finish() == 1
        text = "\n".join(cluster.lines)
        assert "error: decode0 exited with status 3 before it was ready" in text
        shown = [line.split("|     ")[1] for line in cluster.lines if "|     line" in line]
        assert shown == [f"line {i}" for i in range(10, 30)]
        assert not any("starting router" in line for line in cluster.lines)
    nothing_is_left(tmp_path)


def test_what_ignores_the_request_is_killed_with_its_children(where: Where, tmp_path: Path) -> None:
    toml = DISAGG.replace("stop_grace_s = 5", "stop_grace_s = 0.3")
    toml = toml.replace("[[prefill]]", '[[prefill]]\nengine.behave = "stubborn"')
    toml = toml.replace("[[decode]]", '[[decode]]\nengine.behave = "parent"')
    with start(where, tmp_path, toml) as cluster:
        cluster.wait_for(r"child up")
        cluster.wait_for(r"stand-in is ready at")
        cluster.process.send_signal(signal.SIGINT)
        assert cluster.finish() == 0
    nothing_is_left(tmp_path)


def scale(cluster: Cluster, where: Where, *numbers: str) -> str:
    python = where.variables.get("PYTHON", sys.executable)
    words = ["up", "scale", str(cluster.run_dir.parent / "cluster.toml"), *numbers]
    done = subprocess.run(
        [python, "-m", "pdserve", *words, "--run-dir", str(cluster.run_dir)],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def decodes_of_the_router(cluster: Cluster) -> list[str]:
    listed: list[str] = tomllib.loads((cluster.run_dir / "router.toml").read_text())["decode"]
    return listed


def test_a_running_cluster_is_scaled_and_workers_that_leave_drain(where: Where, tmp_path: Path) -> None:
    with start(where, tmp_path, GRACEFUL) as cluster:
        cluster.wait_for(r"stand-in is ready at")
        (before,) = decodes_of_the_router(cluster)
        assert scale(cluster, where, "decode=2") == "decode=2: done\n"
        assert decodes_of_the_router(cluster)[0] == before
        assert len(set(decodes_of_the_router(cluster))) == 2
        cluster.wait_for_note("router", "reload")
        notes = [(entry["role"], entry["what"]) for entry in cluster.journal()]
        assert notes.count(("decode", "start")) == 2
        assert notes.count(("pool", "start")) == 2
        nodes = [entry["config"]["pool"] for entry in cluster.journal() if entry["role"] == "decode"]
        assert nodes.count(nodes[0]) == len(nodes) or where.hosts > 1
        assert scale(cluster, where, "decode=1") == "decode=1: done\n"
        assert decodes_of_the_router(cluster) == [before]
        assert [entry["role"] for entry in cluster.journal() if entry["what"] == "drain"] == ["decode"]
        assert scale(cluster, where, "decode=2") == "decode=2: done\n"
        assert "decode is not ROLE=N" in scale(cluster, where, "decode").replace("'", "")
        assert "need a [[decode]] or [[agg]] worker" in scale(cluster, where, "decode=0")
        cluster.process.send_signal(signal.SIGINT)
        assert cluster.finish() == 0
        stopped = [line.split()[2] for line in cluster.lines if line.endswith("has stopped")]
        assert stopped == ["decode1", "router", "prefill0", "decode0", "decode1", "pool0", "pool1"]
    nothing_is_left(tmp_path)


def test_nothing_is_left_when_the_supervisor_is_killed(where: Where, tmp_path: Path) -> None:
    with start(where, tmp_path) as cluster:
        cluster.wait_for(r"stand-in is ready at")
        cluster.process.kill()
        cluster.process.wait()
        nothing_is_left(tmp_path)
