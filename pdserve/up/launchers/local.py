"""This host: each process is a child of the supervisor, in a session of its own."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from pdserve.errors import StartupError
from pdserve.up.config import ClusterSettings
from pdserve.up.console import Console
from pdserve.up.hosts import Demand
from pdserve.up.launchers.process import Child
from pdserve.up.launchers.sessions import OrphanReaper
from pdserve.up.plan import ProcessSpec


class LocalLauncher:
    """See base.Launcher."""

    def __init__(self, environ: Mapping[str, str], settings: ClusterSettings) -> None:
        self._reaper: OrphanReaper | None = None

    def assign(self, demands: Sequence[Demand]) -> Mapping[str, str] | None:
        """None: all on this host. Raises StartupError where a process may not run on it."""
        own = socket.gethostname()
        for one in demands:
            if one.needs.hosts and not {own, own.partition(".")[0], "localhost"} & set(one.needs.hosts):
                hosts = ", ".join(one.needs.hosts)
                raise StartupError(f"{one.name} may run on {hosts} only, and this is {own}: give --on")
        return None

    async def start(self, spec: ProcessSpec, console: Console, *, again: bool) -> Child:
        """Start it as a child. Raises StartupError."""
        if self._reaper is None:
            self._reaper = OrphanReaper()
        return await Child.start(spec, self._reaper, console, again=again)

    def close(self) -> None:
        """The reaper has nothing more to do."""
        if self._reaper is not None:
            self._reaper.close()
