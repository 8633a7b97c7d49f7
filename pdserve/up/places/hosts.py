"""Plain hosts: each process is started over `ssh` by remote_process.py, whose output and status come back by
that connection.

`cluster.hosts` lists the hosts as `NAME` or `NAME=ADDRESS`: how the remote shell calls one, and how the other
hosts reach it. pdserve is at the same path on all of them; the run directory is each one's own. What of our
environment begins with PDSERVE_ goes along.

- A remote shell is called as `ssh` is: with the name of a host and one string, which a shell there runs.
  `cluster.remote_shell`, or PDSERVE_REMOTE_SHELL, names another.
- The supervisor may run on one of the hosts or beside them. It must reach them by their addresses.
- A process stays where it was put. While its host is lost it fails to start again, as often as
  `cluster.max_restarts` says.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Mapping, Sequence
from typing import Final

from pdserve.errors import StartupError
from pdserve.resources.machine import VISIBLE
from pdserve.up.claims import is_ours
from pdserve.up.config import ClusterSettings
from pdserve.up.console import Console
from pdserve.up.needs import Needs
from pdserve.up.places.orphan_reaper import OrphanReaper
from pdserve.up.places.remote import AGENT, Remote, order_for
from pdserve.up.places.spread import spread
from pdserve.up.plan import ProcessSpec, grace_s
from pdserve.up.site import Demand

SHELL: Final = (
    "ssh -T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=10 -o ServerAliveCountMax=6"
)
SHELL_VARIABLE: Final = "PDSERVE_REMOTE_SHELL"
OUR_VARIABLES: Final = "PDSERVE_"


class HostsPlace:
    """See base.Place."""

    stop_signals: Sequence[signal.Signals] = ()

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._reaper: OrphanReaper | None = None
        self._settings = ClusterSettings()
        self._names: dict[str, str] = {}
        """Of the host of each process."""

    def submit(self, words: Sequence[str], settings: ClusterSettings) -> str | None:
        """None: the supervisor runs here. It says which hosts there are."""
        self._settings = settings
        return None

    def assign(self, demands: Sequence[Demand]) -> Mapping[str, str]:
        """Over the hosts; workers get the GPUs that they name. Raises StartupError."""
        addresses = addresses_of(self._settings.hosts)
        if not addresses:
            raise StartupError('--on hosts: there are none: give cluster.hosts = ["NAME", "NAME=ADDRESS"]')
        own = next((name for name, address in addresses.items() if is_ours(address)), next(iter(addresses)))
        for one in demands:
            if one.needs.gpus and not one.needs.gpu_numbers:
                raise StartupError(
                    f"{one.name}: --on hosts does not know which GPUs are free on its hosts: name them, as "
                    f"in gpus = {list(range(one.needs.gpus))}"
                )
        gpus = dict.fromkeys(addresses, sum(one.needs.gpus for one in demands))
        self._names = spread(demands, gpus, own, self._names, by_number=True)
        return {process: addresses[name] for process, name in self._names.items()}

    async def start(self, spec: ProcessSpec, console: Console, *, again: bool) -> Remote:
        """Start it on its host. Raises StartupError."""
        if self._reaper is None:
            self._reaper = OrphanReaper()
        ours = {name: value for name, value in self._environ.items() if name.startswith(OUR_VARIABLES)}
        ours |= visible_gpus(spec.needs, spec.env)
        order = order_for(spec, grace_s(spec, self._settings), again=again, environment=ours)
        shell = self._environ.get(SHELL_VARIABLE) or self._settings.remote_shell or SHELL
        words = [*shlex.split(shell), self._names[spec.name], shlex.join(AGENT)]
        return await Remote.order(spec, words, order, self._reaper, console, again=again)

    def taken_away(self) -> None:
        """No engine takes it away."""

    def close(self) -> None:
        """The reaper has nothing more to do."""
        if self._reaper is not None:
            self._reaper.close()


def visible_gpus(needs: Needs, env: Mapping[str, str]) -> dict[str, str]:
    """The variables by which a worker sees the GPUs that its table names, unless `env` of it sets one."""
    if not needs.gpu_numbers or VISIBLE in env:
        return {}
    return {VISIBLE: ",".join(map(str, needs.gpu_numbers)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def addresses_of(hosts: Sequence[str]) -> dict[str, str]:
    """The address of each host by name. Raises StartupError: two of one name, or an empty one."""
    found: dict[str, str] = {}
    for host in hosts:
        name, _, address = host.partition("=")
        if not name or name in found:
            raise StartupError(f"cluster.hosts: {host!r} is not a host's own name")
        found[name] = address or name
    return found
