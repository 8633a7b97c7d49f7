"""Slurm: the hosts of a job, where `srun` takes the launcher of `ssh`.

launch/slurm.sbatch is the job's script. It runs `pdserve up FILE --on slurm` on the job's first host, and
requeues the job when its time is up or it is preempted. Every host of the job sees pdserve and the model at
the same paths.

Signals go to the processes by agent.py, as on other hosts: `srun` that gets SIGTERM kills its task
instead of asking it to end. `srun` that is killed, or whose host is lost, leaves its task behind, which ends
by itself then.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from typing import Final

from pdserve.errors import StartupError
from pdserve.up.config import ClusterSettings
from pdserve.up.launchers.ssh import SshLauncher

COMMAND_TIMEOUT_S: Final = 30.0
# steps share the job's processors and GPUs: agent.py chooses the GPUs of each worker among the job's
STEP: Final = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--unbuffered", "--export=ALL")


class SlurmLauncher(SshLauncher):
    """See base.Launcher."""

    def __init__(self, environ: Mapping[str, str], settings: ClusterSettings) -> None:
        super().__init__(environ, settings)
        if shutil.which("srun") is None:
            raise StartupError("--on slurm: srun is missing: run this where Slurm's commands are installed")
        if "SLURM_JOB_ID" not in environ:
            raise StartupError("--on slurm: this is no job: submit `sbatch launch/slurm.sbatch FILE`")

    def hosts(self) -> dict[str, str]:
        """Of the job: the address of each by name. Raises StartupError."""
        listed = _output("scontrol", "show", "hostnames", self._environ.get("SLURM_JOB_NODELIST", "")).split()
        if not listed:
            raise StartupError("--on slurm: this job has no hosts (SLURM_JOB_NODELIST)")
        shown = _output("scontrol", "--oneliner", "show", "node", ",".join(listed))
        words = [
            dict(word.split("=", 1) for word in line.split() if "=" in word) for line in shown.splitlines()
        ]
        addresses = {
            one["NodeName"]: one["NodeAddr"] for one in words if "NodeName" in one and "NodeAddr" in one
        }
        return {name: addresses.get(name, name) for name in listed}

    def own(self, addresses: Mapping[str, str]) -> str:
        """The job's first host, where its script runs."""
        return self._environ.get("SLURMD_NODENAME", next(iter(addresses)))

    def shell(self, host: str) -> list[str]:
        """A step of this job on that host."""
        return [*STEP, f"--nodelist={host}", "sh", "-c"]


def _output(*words: str) -> str:
    """Raises StartupError: the command failed, or took too long."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartupError(f"--on slurm: {words[0]}: {error}") from None
    if done.returncode != 0:
        raise StartupError(f"--on slurm: {words[0]} says: {done.stderr.strip() or done.returncode}")
    return done.stdout.strip()
