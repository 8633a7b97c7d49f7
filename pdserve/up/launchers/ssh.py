"""Hosts by `ssh`: agent.py starts each process there; output and status come back by its connection.

`cluster.hosts` lists the hosts as `NAME` or `NAME=ADDRESS`: how the remote shell calls one, and how the other
hosts reach it. pdserve is at the same path on all of them; the run directory is each one's own. What of our
environment begins with PDSERVE_ goes along.

- A remote shell is called as `ssh` is: with the name of a host and one string, which a shell there runs.
  PDSERVE_REMOTE_SHELL names another.
- The supervisor may run on one of the hosts or beside them. It must reach them by their addresses.
- A process stays where it was put. While its host is lost it fails to start again, as often as
  `cluster.max_restarts` says.
- Which GPUs a worker gets is decided on its host, where it is known which are free.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Final

from pdserve.errors import StartupError
from pdserve.up.config import ClusterSettings
from pdserve.up.console import Console
from pdserve.up.hosts import Demand, spread
from pdserve.up.launchers.remote import AGENT, Remote, order_for
from pdserve.up.launchers.sessions import OrphanReaper
from pdserve.up.locks import is_ours
from pdserve.up.plan import ProcessSpec, grace_s

SHELL: Final = (
    "ssh -T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=10 -o ServerAliveCountMax=6"
)
SHELL_VARIABLE: Final = "PDSERVE_REMOTE_SHELL"
OUR_VARIABLES: Final = "PDSERVE_"


class SshLauncher:
    """See base.Launcher."""

    def __init__(self, environ: Mapping[str, str], settings: ClusterSettings) -> None:
        self._environ = environ
        self._settings = settings
        self._reaper: OrphanReaper | None = None
        self._names: dict[str, str] = {}
        """Of the host of each process."""

    def hosts(self) -> dict[str, str]:
        """The address of each host by name, at least one. Raises StartupError."""
        found = addresses_of(self._settings.hosts)
        if not found:
            raise StartupError('--on ssh: there are no hosts: give cluster.hosts = ["NAME", "NAME=ADDRESS"]')
        return found

    def own(self, addresses: Mapping[str, str]) -> str:
        """The name of the host that the first router goes to."""
        return next((name for name, address in addresses.items() if is_ours(address)), next(iter(addresses)))

    def shell(self, host: str) -> list[str]:
        """The words of a remote shell on this host, which one string for a shell there follows."""
        words = self._environ.get(SHELL_VARIABLE) or SHELL
        return [*shlex.split(words), host]

    def assign(self, demands: Sequence[Demand]) -> Mapping[str, str]:
        """Over the hosts. Raises StartupError."""
        addresses = self.hosts()
        self._names = spread(demands, list(addresses), self.own(addresses), self._names)
        return {process: addresses[name] for process, name in self._names.items()}

    async def start(self, spec: ProcessSpec, console: Console, *, again: bool) -> Remote:
        """Start it on its host. Raises StartupError."""
        if self._reaper is None:
            self._reaper = OrphanReaper()
        ours = {name: value for name, value in self._environ.items() if name.startswith(OUR_VARIABLES)}
        order = order_for(spec, grace_s(spec, self._settings), again=again, environment=ours)
        words = [*self.shell(self._names[spec.name]), shlex.join(AGENT)]
        return await Remote.order(spec, words, order, self._reaper, console, again=again)

    def close(self) -> None:
        """The reaper has nothing more to do."""
        if self._reaper is not None:
            self._reaper.close()


def addresses_of(hosts: Sequence[str]) -> dict[str, str]:
    """The address of each host by name. Raises StartupError: two of one name, or an empty one."""
    found: dict[str, str] = {}
    for host in hosts:
        name, _, address = host.partition("=")
        if not name or name in found:
            raise StartupError(f"cluster.hosts: {host!r} is not a host's own name")
        found[name] = address or name
    return found
