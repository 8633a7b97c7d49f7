"""Jobs of Slurm: submitted, preempted, requeued when a host is lost. The contract of places has the steps."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdserve.up.config import ClusterSettings
from pdserve.up.places.slurm import SlurmPlace
from tests.support.up.cluster import RUN, STAND_INS, processes_that_mention, wait_until
from tests.support.up.slurm_cluster import SlurmServers, slurm_servers

pytestmark = [pytest.mark.timeout(180), pytest.mark.long, pytest.mark.extended]

IMPATIENT = f"""
from pdserve.up.places import remote
remote.BEAT_S, remote.PATIENCE_S = 1.0, 10.0
{RUN}"""
FILE = """
[cluster]
restart_backoff_s = 0.05
stop_grace_s = 2
[router]
journal = "JOURNAL"
[worker.engine]
journal = "JOURNAL"
behave = "graceful"
[[pool]]
journal = "JOURNAL"
[[prefill]]
[[decode]]
"""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmServers]:
    with slurm_servers(tmp_path_factory.mktemp("slurm")) as servers:
        yield servers


class Job:
    """A cluster of stand-ins that was submitted."""

    def __init__(self, servers: SlurmServers, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.servers = servers
        self.directory = directory
        self.run_dir = directory / "run"
        self._journal = directory / "journal"
        file = directory / "cluster.toml"
        file.write_text(FILE.replace("JOURNAL", str(self._journal)))
        monkeypatch.setenv("SLURM_CONF", servers.variables["SLURM_CONF"])
        settings = ClusterSettings(
            run_dir=self.run_dir,
            stop_grace_s=2,
            slurm_options=["--nodes=2", "--overcommit", "--partition=low"],
        )
        words = [sys.executable, "-c", IMPATIENT, str(file), str(self.run_dir), "slurm", *STAND_INS]
        self.said = SlurmPlace({}).submit(words, settings)
        assert self.said is not None
        self.number = self.said.split()[1]

    def notes(self, what: str) -> list[str]:
        """Roles of the stand-ins that have noted this, in order."""
        if not self._journal.exists():
            return []
        lines: list[dict[str, Any]] = [json.loads(line) for line in self._journal.read_text().splitlines()]
        return [line["role"] for line in lines if line["what"] == what]

    def processes(self) -> list[int]:
        """Ids of the stand-ins that have started."""
        return [
            json.loads(line)["pid"] for line in self._journal.read_text().splitlines() if '"start"' in line
        ]

    def wait_for(self, text: str, times: int = 1) -> None:
        log = self.run_dir / f"slurm-{self.number}.log"
        wait_until(lambda: log.exists() and log.read_text().count(text) >= times, f"{text} ({times})")

    def state(self) -> str:
        return self.servers.output("squeue", "-h", "-j", self.number, "-o", "%T %r").strip()

    def begin_now(self) -> None:
        """Slurm lets a requeued job wait two minutes. Steps of its first run end first: those of the second
        have their names, and slurmd would take the end of the one for that of the other.
        """
        wait_until(lambda: self.state().startswith("PENDING"), "the job is pending")
        wait_until(lambda: not processes_that_mention(f"slurmstepd: [{self.number}."), "its steps have ended")
        self.servers.output("scontrol", "update", f"JobId={self.number}", "StartTime=now")


@pytest.fixture
def job(servers: SlurmServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    made = Job(servers, tmp_path, monkeypatch)
    try:
        made.wait_for("is ready at")
        yield made
    finally:
        servers.output("scancel", made.number)
        wait_until(lambda: made.state() == "", "the job has gone")
        wait_until(lambda: not processes_that_mention(str(tmp_path)), "all processes have ended")


def test_a_submitted_cluster_stops_in_order_by_the_command_that_it_names(job: Job) -> None:
    assert job.said is not None
    command = job.said.partition("scancel")[1:]
    assert command[1].endswith(" stops it")
    job.servers.output("scancel", *command[1].removesuffix(" stops it").split())
    job.wait_for("pool0 has stopped")
    assert sorted(job.notes("drain")) == ["decode", "prefill"]
    wait_until(lambda: job.state() == "", "the job has gone")


def test_a_preempted_cluster_drains_and_starts_again_when_there_is_room(job: Job) -> None:
    urgent = job.servers.output(
        "sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null",
        "--wrap", "sleep 1",
    ).strip()  # fmt: skip
    job.wait_for("SIGUSR2: stopping all processes")
    job.wait_for("pool0 has stopped")
    assert sorted(job.notes("drain")) == ["decode", "prefill"]
    wait_until(lambda: job.servers.output("squeue", "-h", "-j", urgent) == "", "the urgent job has run")
    job.begin_now()
    job.wait_for("is ready at", times=2)
    assert job.notes("start").count("decode") == 2


def test_a_cluster_whose_host_is_lost_starts_again_on_others(job: Job) -> None:
    job.servers.output("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    try:
        wait_until(lambda: job.state().startswith("PENDING"), "the job is pending")
    finally:
        job.servers.output("scontrol", "update", "NodeName=n2", "State=RESUME")
    job.begin_now()
    job.wait_for("is ready at", times=2)
    assert job.notes("start").count("decode") == 2


def test_processes_of_a_run_that_was_lost_with_its_host_end_by_themselves(job: Job) -> None:
    """Its host cannot be told, and comes back with what ran there."""
    ran = [psutil.Process(pid) for pid in job.processes()]
    slurmd = job.servers.daemons["n2"]
    slurmd.send_signal(signal.SIGSTOP)
    try:
        job.servers.output("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
        wait_until(lambda: job.state().startswith("PENDING"), "the job is pending")
        wait_until(
            lambda: not any(one.is_running() for one in ran), "the processes of its first run have ended"
        )
    finally:
        slurmd.send_signal(signal.SIGCONT)
        job.servers.output("scontrol", "update", "NodeName=n2", "State=RESUME")
    job.begin_now()
    job.wait_for("is ready at", times=2)


def test_the_end_that_slurm_announces_is_not_a_users() -> None:
    assert SlurmPlace.stop_signals == (signal.SIGUSR2,)
