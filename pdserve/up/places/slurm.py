"""Slurm: the supervisor is the job's batch script, and each process is a step that it starts with `srun`.

Outside of a job, `pdserve up FILE --on slurm` submits such a job. Inside, it runs on the job's first node.
Every host of the job must see the run directory and pdserve at the same paths, as is usual with Slurm.

- A step is remote_process.py. Its `srun` is a child of the supervisor and connects both. By this way come
  signals too: `srun` that gets SIGTERM kills its tasks instead of asking them to end.
- `srun` that is killed, or whose host is lost, leaves its task behind. That ends by itself then. One of the
  same name that a later run of the job starts on that host waits for this.
- Slurm sends the supervisor SIGUSR2 some time before the job's time is up, and when it is preempted. The
  supervisor then stops all processes in order, and requeues the job: the same script starts the same cluster
  again, on whatever hosts it gets.
- When a host of the job is lost, Slurm ends the job and requeues it.
"""

from __future__ import annotations

import math
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

from pdserve.errors import StartupError
from pdserve.up.config import ClusterSettings
from pdserve.up.console import Console
from pdserve.up.places.orphan_reaper import OrphanReaper
from pdserve.up.places.remote import AGENT, Remote, order_for
from pdserve.up.places.spread import spread
from pdserve.up.plan import ProcessSpec, grace_s
from pdserve.up.site import Demand

END: Final = signal.SIGUSR2
"""What Slurm sends before it takes the job's hosts away. SIGTERM is a user's, and requeues nothing."""
COMMAND_TIMEOUT_S: Final = 30.0
SUBMIT_SLACK_S: Final = 20.0
"""Between the signal to a job that must end and its end, beyond the processes' grace."""


class SlurmPlace:
    """See base.Place."""

    stop_signals: Sequence[signal.Signals] = (END,)

    def __init__(self, environ: Mapping[str, str]) -> None:
        if shutil.which("srun") is None:
            raise StartupError("--on slurm: srun is missing: run this where Slurm's commands are installed")
        self._environ = environ
        self._reaper: OrphanReaper | None = None
        self._settings = ClusterSettings()
        self._nodes: dict[str, str] = {}
        """Name of the node of each process. Others reach it by the node's address."""

    def submit(self, words: Sequence[str], settings: ClusterSettings) -> str | None:
        """Outside of a job: make one that runs `words`. Raises StartupError: sbatch refuses."""
        self._settings = settings
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

    async def start(self, spec: ProcessSpec, console: Console, *, again: bool) -> Remote:
        """Start it as a step of this job. Raises StartupError."""
        if self._reaper is None:
            self._reaper = OrphanReaper()
        words = [*step_words(spec, self._nodes[spec.name]), *AGENT]
        order = order_for(spec, grace_s(spec, self._settings), again=again)
        return await Remote.order(spec, words, order, self._reaper, console, again=again)

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
    words += ["--unbuffered", "--export=ALL"]
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


def _output(*words: str) -> str:
    """Raises StartupError: the command failed, or took too long."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartupError(f"--on slurm: {words[0]}: {error}") from None
    if done.returncode != 0:
        raise StartupError(f"--on slurm: {words[0]} says: {done.stderr.strip() or done.returncode}")
    return done.stdout.strip()
