"""Where processes run: on this host, on hosts by `ssh`, on those of a job of Slurm, or on Ray's nodes.

The supervisor decides when what is started, restarted and stopped (lifecycle.py). A launcher says on which
host each process runs, and what starts an agent there (agent.py): that is all in which they differ.

- ssh: `cluster.hosts` lists the hosts as `NAME` or `NAME=ADDRESS`: how the remote shell calls one, and how
  the others reach it. The supervisor may run on one of them or beside them, and must reach them by their
  addresses. PDSERVE_REMOTE_SHELL names another remote shell, which is called with the name of a host and one
  string, that a shell there runs.
- Slurm: launch/slurm.sbatch is the job's script. It runs `pdserve up FILE --on slurm` on the job's first
  host, and requeues the job when its time is up or it is preempted. Each process is a step of the job; steps
  share the job's processors and GPUs.
- Ray: ray.py.

pdserve is at the same path on all hosts, and the model too. The run directory is each one's own, or common.
What of our environment begins with PDSERVE_ goes along. A process stays where it was put: while its host is
lost it fails to start again, as often as the restart rules say. tests/contracts/test_launcher_contract.py
holds each launcher to this.
"""

from __future__ import annotations

import importlib
import shlex
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from pdserve.errors import ConfigError, StartupError
from pdserve.resources.machine import VISIBLE
from pdserve.settings.command_line import RESTARTED
from pdserve.settings.config_file import to_toml
from pdserve.up.config import ClusterSettings
from pdserve.up.console import Console
from pdserve.up.hosts import Demand, spread
from pdserve.up.launchers.agent import FOR_EVER_S, Order
from pdserve.up.launchers.running import AGENT, Running
from pdserve.up.locks import is_ours
from pdserve.up.spec import ProcessSpec, grace_s

KINDS: Final[Mapping[str, str]] = {
    "local": f"{__name__}:Launcher",
    "ssh": f"{__name__}:SshLauncher",
    "slurm": f"{__name__}:SlurmLauncher",
    "ray": "pdserve.up.launchers.ray:RayLauncher",
}
"""What `--on` may say. Imported when it is chosen: Ray takes seconds, and is not installed everywhere."""
SHELL: Final = (
    "ssh -T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=10 -o ServerAliveCountMax=6"
)
SHELL_VARIABLE: Final = "PDSERVE_REMOTE_SHELL"
OUR_VARIABLES: Final = "PDSERVE_"
STEP: Final = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--unbuffered", "--export=ALL")
COMMAND_TIMEOUT_S: Final = 30.0
PATIENCE_S: Final = 60.0
"""An agent on another host that has heard nothing for so long takes the supervisor for lost."""
LOCAL_GRACE_S: Final = 3.0
"""Of processes on this host whose supervisor has died."""


class Launcher:
    """This host, by loopback; and what the others have in common."""

    def __init__(self, environ: Mapping[str, str], settings: ClusterSettings) -> None:
        """Raises StartupError: it cannot be used here."""
        self._environ = environ
        self._settings = settings
        self._names: dict[str, str] = {}
        """Of the host of each process; empty: all on this one."""

    def assign(self, demands: Sequence[Demand]) -> Mapping[str, str] | None:
        """The host of each process, as others reach it; None: this host, by loopback. Raises StartupError for
        what there is no room for.

        Asked again, in another thread, when a running cluster is scaled: with all processes that there are to
        be. Those named before keep their hosts.
        """
        own = socket.gethostname()
        for one in demands:
            if one.hosts and not {own, own.partition(".")[0], "localhost"} & set(one.hosts):
                hosts = ", ".join(one.hosts)
                raise StartupError(f"{one.name} may run on {hosts} only, and this is {own}: give --on")
        return None

    def command(self, spec: ProcessSpec) -> list[str]:
        """What starts the process's agent."""
        return list(AGENT)

    async def start(self, spec: ProcessSpec, console: Console, *, again: bool) -> Running:
        """Start the process; its log is written anew, or with `again` continued. Raises StartupError."""
        is_far = bool(self._names)
        ours = {name: value for name, value in self._environ.items() if name.startswith(OUR_VARIABLES)}
        restarted = {RESTARTED: "1"} if again else {}
        order = Order(
            argv=list(spec.argv),
            environment={**ours, "PYTHONUNBUFFERED": "1", **restarted, **spec.env},
            config_path=str(spec.config_path),
            config=to_toml(spec.config),
            grace_s=grace_s(spec, self._settings) if is_far else LOCAL_GRACE_S,
            patience_s=PATIENCE_S if is_far else FOR_EVER_S,
            gpu_count=0 if VISIBLE in spec.env and not spec.gpu_numbers else spec.gpu_count,
            gpu_numbers=list(spec.gpu_numbers),
            gpus_of_others=list(spec.gpus_of_others),
            needs_gpus=spec.needs_gpus,
        )
        return await Running.start(spec, self.command(spec), msgspec.json.encode(order), console, again=again)


class SshLauncher(Launcher):
    """Hosts by a remote shell."""

    def hosts(self) -> dict[str, str]:
        """The address of each host by name, at least one. Raises StartupError."""
        found: dict[str, str] = {}
        for host in self._settings.hosts:
            name, _, address = host.partition("=")
            if not name or name in found:
                raise StartupError(f"cluster.hosts: {host!r} is not a host's own name")
            found[name] = address or name
        if not found:
            raise StartupError('--on ssh: there are no hosts: give cluster.hosts = ["NAME", "NAME=ADDRESS"]')
        return found

    def own(self, addresses: Mapping[str, str]) -> str:
        """The name of the host that the first router goes to."""
        return next((name for name, address in addresses.items() if is_ours(address)), next(iter(addresses)))

    def assign(self, demands: Sequence[Demand]) -> Mapping[str, str]:
        """Over the hosts."""
        addresses = self.hosts()
        self._names = spread(demands, list(addresses), self.own(addresses), self._names)
        return {process: addresses[name] for process, name in self._names.items()}

    def command(self, spec: ProcessSpec) -> list[str]:
        """A remote shell with the agent's command line."""
        words = self._environ.get(SHELL_VARIABLE) or SHELL
        return [*shlex.split(words), self._names[spec.name], shlex.join(AGENT)]


class SlurmLauncher(SshLauncher):
    """The hosts of a job. Signals go to the processes by their agents: `srun` that gets SIGTERM kills its
    task instead of asking it to end. `srun` that is killed, or whose host is lost, leaves its task behind,
    which ends by itself then.
    """

    def __init__(self, environ: Mapping[str, str], settings: ClusterSettings) -> None:
        super().__init__(environ, settings)
        if shutil.which("srun") is None:
            raise StartupError("--on slurm: srun is missing: run this where Slurm's commands are installed")
        if "SLURM_JOB_ID" not in environ:
            raise StartupError("--on slurm: this is no job: submit `sbatch launch/slurm.sbatch FILE`")

    def hosts(self) -> dict[str, str]:
        """Of the job."""
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

    def command(self, spec: ProcessSpec) -> list[str]:
        """A step of this job."""
        return [*STEP, f"--nodelist={self._names[spec.name]}", *AGENT]


def _output(*words: str) -> str:
    """Raises StartupError: the command failed, or took too long."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartupError(f"--on slurm: {words[0]}: {error}") from None
    if done.returncode != 0:
        raise StartupError(f"--on slurm: {words[0]} says: {done.stderr.strip() or done.returncode}")
    return done.stdout.strip()


def open_launcher(name: str, environ: Mapping[str, str], settings: ClusterSettings) -> Launcher:
    """What `--on` says. Raises ConfigError: there is no such launcher, or what it needs is not installed;
    StartupError: it cannot be used here.
    """
    if name not in KINDS:
        raise ConfigError(f"--on {name}: no such launcher; it is one of {', '.join(KINDS)}")
    module, _, kind = KINDS[name].partition(":")
    try:
        opened: Launcher = getattr(importlib.import_module(module), kind)(environ, settings)
    except ModuleNotFoundError as error:
        raise ConfigError(f"--on {name}: {error.name} is not installed") from None
    return opened
