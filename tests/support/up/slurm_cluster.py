"""A Slurm cluster of a controller and two nodes on this machine, from Debian's packages, and an allocation of
both nodes.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.processes import free_ports

TIMEOUT_S = 60.0
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={directory}/munge.sock
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=30
KillWait=2
InactiveLimit=0
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs={cpus} State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.2 Port={second} CPUs={cpus} State=UNKNOWN
PartitionName=low Nodes=n1,n2 Default=YES State=UP PriorityTier=1 GraceTime=30
PartitionName=high Nodes=n1,n2 State=UP PriorityTier=9 PreemptMode=OFF
"""


class SlurmServers:
    """munged, slurmctld and two slurmd, for as long as a test module runs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.conf = directory / "slurm.conf"
        self.variables = {"SLURM_CONF": str(self.conf)}
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        """`slurmd` of each node, by the node's name."""
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        directory = self.directory
        for name in ("state", "spool-n1", "spool-n2"):
            (directory / name).mkdir()
        key = directory / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        ports = free_ports(3)
        self.conf.write_text(
            CONF.format(
                host=socket.gethostname(),
                directory=directory,
                controller=ports[0],
                first=ports[1],
                second=ports[2],
                cpus=os.cpu_count(),
            )
        )
        self._run(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={directory}/munge.sock",
            f"--pid-file={directory}/munged.pid", f"--seed-file={directory}/munge.seed",
            f"--log-file={directory}/munged.log",
        )  # fmt: skip
        _until(lambda: (directory / "munge.sock").exists(), self)
        self._run("slurmctld", "-D", "-i")
        for node in ("n1", "n2"):
            self.daemons[node] = self._run("slurmd", "-D", "-N", node)
        _until(lambda: self.output("sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D").strip() == "2", self)

    def output(self, *words: str, **variables: str) -> str:
        """Of a command of Slurm; empty where it fails."""
        env = {**os.environ, **self.variables, **variables}
        return subprocess.run(words, capture_output=True, text=True, env=env, timeout=30, check=False).stdout

    def allocate(self) -> dict[str, str]:
        """Both nodes, as variables of a job's processes."""
        done = subprocess.run(
            ["salloc", "--no-shell", "--nodes=2", "--exclusive", "--job-name=contract"],
            capture_output=True, text=True, timeout=60, check=True, env={**os.environ, **self.variables},
        )  # fmt: skip
        job = done.stderr.split("job allocation ")[1].split()[0].strip()
        return {**self.variables, "SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "n[1-2]"}

    def stop(self) -> None:
        for process in reversed(self._started):
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @property
    def run(self) -> bool:
        """None has ended."""
        return all(process.poll() is None for process in self._started)

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in self.directory.glob("*.log"))

    def _run(self, *words: str) -> subprocess.Popen[bytes]:
        log = (self.directory / f"{words[0]}-{len(self._started)}.out.log").open("wb")
        with log:
            self._started.append(
                subprocess.Popen(
                    words,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **self.variables},
                    start_new_session=True,
                )
            )
        return self._started[-1]


@contextmanager
def slurm_servers(directory: Path) -> Iterator[SlurmServers]:
    """Skips the test, with the reason, where Slurm is missing."""
    missing = [name for name in ("slurmctld", "slurmd", "munged", "srun") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        what = (
            f"{', '.join(missing)} missing (apt-get install slurm-wlm munge)" if missing else "it takes root"
        )
        pytest.skip(f"Slurm cannot be started, so --on slurm is NOT tested: {what}")
    directory.chmod(0o755)
    servers = SlurmServers(directory)
    try:
        servers.start()
        yield servers
        servers.output("scancel", "--user=root")
        _until(lambda: not servers.output("squeue", "-h"), servers)  # what ends a step tells the controller
    finally:
        servers.stop()


@contextmanager
def slurm_cluster(directory: Path) -> Iterator[dict[str, str]]:
    """Variables of an allocation of two nodes."""
    with slurm_servers(directory) as servers:
        yield servers.allocate()


def _until(holds, servers: SlurmServers) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert servers.run, servers.logs()
        assert time.monotonic() < deadline, servers.logs()
        time.sleep(0.1)
