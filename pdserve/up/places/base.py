"""The `Place` contract: starts one process, and tells of its end.

The supervisor decides when what is started, restarted and stopped (lifecycle.py). A place only carries that
out:

- `assign` says on which host each process will run; None: all on this one. It raises StartupError for what
  the place has no room for.
- `start` runs a process with its configuration file, which every host of the place can read.
- SIGTERM asks a process to finish its work and end: the drain of workers, nodes and routers. `kill` ends it
  and its children at once, whatever it does.
- Every line of output reaches the process's log, the console and `last_lines`.
- `finish` returns once nothing of the process is left. Its status is the process's own; where a signal or
  the place itself ended it, minus the signal's number.
- When the supervisor dies, the place ends all of its processes.

A place is found by the entry point group `pdserve.up.places`; the entry point's name is what `--on` says.
tests/contracts/test_place_contract.py holds every place to the above.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from pdserve.errors import StartupError
from pdserve.settings.plugins import load
from pdserve.up.config import ClusterSettings
from pdserve.up.console import Console
from pdserve.up.plan import ProcessSpec
from pdserve.up.site import Demand

GROUP: Final = "pdserve.up.places"


class HostLost(StartupError):
    """The host of a process is gone for good. A worker may be assigned to another one."""


class Running(Protocol):
    """A process that a place runs. Whoever started it must `kill` and `finish` it."""

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


class Place(Protocol):
    """Runs processes. `Kind(environ)` opens it; it raises StartupError where it cannot be used."""

    stop_signals: Sequence[signal.Signals]
    """Besides SIGINT, SIGTERM and SIGHUP: what the place sends the supervisor to take the machines away."""

    def submit(self, words: Sequence[str], settings: ClusterSettings) -> str | None:
        """Where the supervisor itself has to be started by the place's engine: have it run `words`, and give
        a line for the user. None: go on in this process. Raises StartupError.
        """

    def assign(self, demands: Sequence[Demand]) -> Mapping[str, str] | None:
        """The host of each process, by name; None: this host, by loopback. Raises StartupError.

        Asked again, in another thread, when a running cluster is scaled: with all processes that there are to
        be. Those named before keep their hosts, but for workers whose host is lost. What others hold is given
        back once they have ended.
        """

    async def start(self, spec: ProcessSpec, console: Console, *, again: bool) -> Running:
        """Start the process; its log is written anew, or with `again` continued. Raises StartupError, which
        may be HostLost.
        """

    def taken_away(self) -> None:
        """One of `stop_signals` came, and all processes have ended since: have the cluster started again,
        where the place's engine does not do so by itself. Not called where there are no such signals. Raises
        StartupError.
        """

    def close(self) -> None:
        """After the last process has finished."""


class PlaceKind(Protocol):
    """What an entry point names."""

    def __call__(self, environ: Mapping[str, str]) -> Place:
        """Open the place. Raises StartupError."""


def open_place(name: str, environ: Mapping[str, str]) -> Place:
    """The place of this name. Raises ConfigError: there is none, or what it needs is not installed;
    StartupError: it cannot be used here.
    """
    kind: PlaceKind = load(GROUP, name, "--on", "place")
    return kind(environ)
