"""Slurm: the supervisor is the job's batch script, and each process is a step that it starts with `srun`.

Outside of a job, `pdserve up FILE --on slurm` submits such a job. Inside, it runs on the job's first node.
Every host of the job must see the run directory and pdserve at the same paths, as is usual with Slurm.

- A step's output and status come through its `srun`, which is a child of the supervisor.
- Signals go to the step by `scancel`. `srun` that gets SIGTERM kills its tasks instead of asking them to end,
  and `srun` that is killed leaves them behind.
- Slurm sends the supervisor SIGUSR2 some time before the job's time is up, and when it is preempted. The
  supervisor then stops all processes in order, and requeues the job: the same script starts the same cluster
  again, on whatever hosts it gets.
- When a host of the job is lost, Slurm ends the job and requeues it.
"""

from __future__ import annotations

import asyncio
import math
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from pdserve.errors import StartupError
from pdserve.up.config import ClusterSettings
from pdserve.up.console import Console
from pdserve.up.places.orphan_reaper import OrphanReaper
from pdserve.up.places.process import Child
from pdserve.up.places.spread import spread
from pdserve.up.plan import ProcessSpec
from pdserve.up.site import Demand

END: Final = signal.SIGUSR2
"""What Slurm sends before it takes the job's hosts away. SIGTERM is a user's, and requeues nothing."""
COMMAND_TIMEOUT_S: Final = 30.0
SIGNALLED: Final = 128
"""srun's status for a task that a signal ended is this much more than the signal's number."""
SUBMIT_SLACK_S: Final = 20.0
"""Between the signal to a job that must end and its end, beyond the processes' grace."""


class Step(Child):
    """A process that srun watches."""

    def signal(self, number: signal.Signals) -> None:
        """To the task, by a thread that does not hold up the others."""
        asyncio.get_running_loop().run_in_executor(None, _signal, self.spec.name, number)

    async def kill(self) -> None:
        """End the step, then srun."""
        await asyncio.to_thread(_signal, self.spec.name, signal.SIGKILL)
        await super().kill()

    async def finish(self) -> int:
        """srun's status, as if it were the process's own."""
        status = await super().finish()
        return SIGNALLED - status if status > SIGNALLED else status


class SlurmPlace:
    """See base.Place."""

    stop_signals: Sequence[signal.Signals] = (END,)

    def __init__(self, environ: Mapping[str, str]) -> None:
        if shutil.which("srun") is None:
            raise StartupError("--on slurm: srun is missing: run this where Slurm's commands are installed")
        self._environ = environ
        self._reaper: OrphanReaper | None = None
        self._nodes: dict[str, str] = {}
        """Name of the node of each process. Others reach it by the node's address."""

    def submit(self, words: Sequence[str], settings: ClusterSettings) -> str | None:
        """Outside of a job: make one that runs `words`. Raises StartupError: sbatch refuses."""
        if "SLURM_JOB_ID" in self._environ:
            return None
        settings.run_dir.mkdir(parents=True, exist_ok=True)
        log = settings.run_dir.absolute() / "slurm-%j.log"
        ends_s = math.ceil(settings.stop_grace_s * 3 + SUBMIT_SLACK_S)
        job = _output(
            "sbatch", "--parsable", f"--job-name={settings.name}", "--requeue", "--open-mode=append",
            f"--signal=B:{END.name.removeprefix('SIG')}@{ends_s}", f"--output={log}", *settings.slurm_options,
            # ignored until the supervisor listens, or it would end a job that has only begun
            "--wrap", f"trap '' {END.name.removeprefix('SIG')}; exec {shlex.join(words)}",
        ).partition(";")[0]  # fmt: skip
        shown = str(log).replace("%j", job)
        stop = f"scancel --signal=TERM --batch {job}"
        return f"job {job} starts {settings.name}; its output: {shown}; {stop} stops it"

    def assign(self, demands: Sequence[Demand]) -> Mapping[str, str]:
        """Over the job's hosts. Raises StartupError."""
        listed = _output("scontrol", "show", "hostnames", self._environ.get("SLURM_JOB_NODELIST", ""))
        hosts = listed.split()
        if not hosts:
            raise StartupError("--on slurm: this job has no hosts (SLURM_JOB_NODELIST)")
        gpus = int(self._environ.get("SLURM_GPUS_ON_NODE", "0") or 0)
        own = self._environ.get("SLURMD_NODENAME", hosts[0])
        self._nodes = spread(demands, dict.fromkeys(hosts, gpus), own, self._nodes)
        addresses = _addresses(_output("scontrol", "--oneliner", "show", "node", ",".join(hosts)))
        return {name: addresses.get(node, node) for name, node in self._nodes.items()}

    async def start(self, spec: ProcessSpec, console: Console, *, again: bool) -> Step:
        """Start it as a step of this job. Raises StartupError."""
        if self._reaper is None:
            self._reaper = OrphanReaper()
        step = replace(spec, argv=(*step_words(spec, self._nodes[spec.name]), *spec.argv))
        return await Step.start(step, self._reaper, console, again=again)

    def taken_away(self) -> None:
        """Requeue the job, which ends it here. Raises StartupError."""
        _output("scontrol", "requeue", self._environ["SLURM_JOB_ID"])

    def close(self) -> None:
        """The reaper has nothing more to do."""
        if self._reaper is not None:
            self._reaper.close()


def step_words(spec: ProcessSpec, node: str) -> list[str]:
    """srun and its options, for this node. Steps share the job's processors, unless the process says how many
    it needs.
    """
    needs = spec.needs
    words = ["srun", f"--job-name={spec.name}", "--nodes=1", "--ntasks=1", f"--nodelist={node}"]
    words += ["--input=none", "--unbuffered", "--export=ALL"]
    if needs.gpus or needs.cpus:
        words += ["--exact", f"--cpus-per-task={max(1, math.ceil(needs.cpus))}"]
        words += [f"--gpus={needs.gpus}"] if needs.gpus else []
    else:
        words.append("--overlap")
    if needs.memory_bytes:
        words.append(f"--mem={math.ceil(needs.memory_bytes / (1 << 20))}M")
    return words


def _addresses(shown: str) -> dict[str, str]:
    """Of nodes, by name, from what scontrol shows of them in one line each."""
    lines = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in shown.splitlines()]
    return {line["NodeName"]: line["NodeAddr"] for line in lines if "NodeName" in line and "NodeAddr" in line}


def _signal(name: str, number: signal.Signals) -> None:
    """To the steps of this name in this job. One that cannot be reached ends by the next kill, or the job."""
    job = f"--jobs={os.environ['SLURM_JOB_ID']}"
    try:
        for line in _output("squeue", "--steps", job, "--noheader", "--format=%i %j").splitlines():
            step, _, found = line.strip().partition(" ")
            if found == name:
                _output("scancel", f"--signal={number.name}", step)
    except StartupError:
        return


def _output(*words: str) -> str:
    """Raises StartupError: the command failed, or took too long."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartupError(f"--on slurm: {words[0]}: {error}") from None
    if done.returncode != 0:
        raise StartupError(f"--on slurm: {words[0]} says: {done.stderr.strip() or done.returncode}")
    return done.stdout.strip()
