"""The `Launcher` contract: starts one process, and tells of its end.

The supervisor decides when what is started, restarted and stopped (lifecycle.py). A launcher only carries
that out:

- `assign` says on which host each process will run; None: all on this one. It raises StartupError for what
  the launcher has no room for.
- `start` runs a process with its configuration file, which its host can read.
- SIGTERM asks a process to finish its work and end: the drain of workers, nodes and routers. `kill` ends it
  and its children at once, whatever it does.
- Every line of output reaches the process's log, the console and `last_lines`.
- `finish` returns once nothing of the process is left. Its status is the process's own; where a signal or
  the launcher itself ended it, minus the signal's number.
- When the supervisor dies, the launcher ends all of its processes.

`KINDS` lists the launchers. tests/contracts/test_launcher_contract.py holds each of them to the above.
"""

from __future__ import annotations

import importlib
import signal
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from pdserve.errors import ConfigError
from pdserve.up.config import ClusterSettings
from pdserve.up.console import Console
from pdserve.up.hosts import Demand
from pdserve.up.plan import ProcessSpec

KINDS: Final[Mapping[str, str]] = {
    "local": "pdserve.up.launchers.process:LocalLauncher",
    "ssh": "pdserve.up.launchers.ssh:SshLauncher",
    "slurm": "pdserve.up.launchers.slurm:SlurmLauncher",
    "ray": "pdserve.up.launchers.ray:RayLauncher",
}
"""What `--on` may say. Imported when it is chosen: Ray takes seconds, and is not installed everywhere."""


class Running(Protocol):
    """A process that a launcher runs. Whoever started it must `kill` and `finish` it."""

    spec: ProcessSpec

    async def wait(self) -> None:
        """Wait for the end of the process itself, not of its children."""

    def signal(self, number: signal.Signals) -> None:
        """Send it SIGTERM or SIGHUP, if it is still there. Does not wait."""

    def configure(self, config: str) -> None:
        """Its configuration is this now, where its host does not see the run directory here. It reads it on
        the SIGHUP that follows. Does not wait.
        """

    async def kill(self) -> None:
        """End it and its children at once."""

    async def finish(self) -> int:
        """Wait for the end of it all, and read the rest of its output. Gives the exit status."""

    def last_lines(self) -> list[str]:
        """The last lines of its output, a few."""


class Launcher(Protocol):
    """Runs processes. `open_launcher` opens it."""

    def assign(self, demands: Sequence[Demand]) -> Mapping[str, str] | None:
        """The host of each process, by name; None: this host, by loopback. Raises StartupError.

        Asked again, in another thread, when a running cluster is scaled: with all processes that there are to
        be. Those named before keep their hosts.
        """

    async def start(self, spec: ProcessSpec, console: Console, *, again: bool) -> Running:
        """Start the process; its log is written anew, or with `again` continued. Raises StartupError."""

    def close(self) -> None:
        """After the last process has finished."""


def open_launcher(name: str, environ: Mapping[str, str], settings: ClusterSettings) -> Launcher:
    """The launcher of this name. Raises ConfigError: there is none, or what it needs is not installed;
    StartupError: it cannot be used here.
    """
    if name not in KINDS:
        raise ConfigError(f"--on {name}: no such launcher; it is one of {', '.join(KINDS)}")
    module, _, kind = KINDS[name].partition(":")
    try:
        opened: Launcher = _kind(module, kind)(environ, settings)
    except ModuleNotFoundError as error:
        raise ConfigError(f"--on {name}: {error.name} is not installed") from None
    return opened


def _kind(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
