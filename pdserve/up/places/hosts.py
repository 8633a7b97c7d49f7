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

import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from io import FileIO
from typing import Final, Self

import msgspec

from pdserve.errors import StartupError
from pdserve.settings.command_line import RESTARTED
from pdserve.settings.toml_text import to_toml
from pdserve.up.claims import is_ours
from pdserve.up.config import ClusterSettings
from pdserve.up.console import Console
from pdserve.up.places.orphan_reaper import OrphanReaper
from pdserve.up.places.process import Child
from pdserve.up.places.remote_process import BEAT_S, KILL, SIGNALLED, Order
from pdserve.up.places.spread import spread
from pdserve.up.plan import ProcessSpec, grace_s
from pdserve.up.site import Demand

SHELL: Final = (
    "ssh -T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=10 -o ServerAliveCountMax=6"
)
SHELL_VARIABLE: Final = "PDSERVE_REMOTE_SHELL"
OUR_VARIABLES: Final = "PDSERVE_"
SHELL_FAILED: Final = 255
"""ssh's status where it has lost the host, or never reached it."""
KILL_S: Final = 5.0
AGENT: Final = "pdserve.up.places.remote_process"


class Remote(Child):
    """A process on another host. Its remote shell is our child."""

    _control: asyncio.WriteTransport

    @classmethod
    async def order(
        cls, spec: ProcessSpec, order: Order, reaper: OrphanReaper, console: Console, *, again: bool
    ) -> Self:
        """Start `spec`, which is the remote shell. Raises StartupError."""
        reads, writes = os.pipe()
        loop = asyncio.get_running_loop()
        control, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, FileIO(writes, "w"))
        try:
            child = await cls.start(spec, reaper, console, again=again, stdin=reads)
        except StartupError:
            control.close()
            raise
        finally:
            os.close(reads)
        child._control = control
        child._say(msgspec.json.encode(order))
        child._beat()
        return child

    def signal(self, number: signal.Signals) -> None:
        """Send it there, if it has not ended."""
        self._say(str(int(number)).encode())

    def configure(self, config: str) -> None:
        """Write it there, before what `signal` sends next."""
        self._say(msgspec.json.encode(config))

    async def kill(self) -> None:
        """End it there, and the remote shell in any case."""
        self._say(KILL)
        with suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), KILL_S)
        self._control.close()
        await super().kill()

    async def finish(self) -> int:
        """The process's own status, or minus a signal; minus SIGKILL where the host is lost."""
        status = await super().finish()
        if status == SHELL_FAILED:
            return -int(signal.SIGKILL)
        return SIGNALLED - status if status > SIGNALLED else status

    def _say(self, line: bytes) -> None:
        if not self._control.is_closing():
            self._control.write(line + b"\n")

    def _beat(self) -> None:
        if not self._control.is_closing():
            self._say(b"")
            asyncio.get_running_loop().call_later(BEAT_S, self._beat)


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
        """Over the hosts; GPUs are not counted. Raises StartupError."""
        addresses = addresses_of(self._settings.hosts)
        if not addresses:
            raise StartupError('--on hosts: there are none: give cluster.hosts = ["NAME", "NAME=ADDRESS"]')
        own = next((name for name, address in addresses.items() if is_ours(address)), next(iter(addresses)))
        gpus = dict.fromkeys(addresses, sum(one.needs.gpus for one in demands))
        self._names = spread(demands, gpus, own, self._names)
        return {process: addresses[name] for process, name in self._names.items()}

    async def start(self, spec: ProcessSpec, console: Console, *, again: bool) -> Remote:
        """Start it on its host. Raises StartupError."""
        if self._reaper is None:
            self._reaper = OrphanReaper()
        ours = {name: value for name, value in self._environ.items() if name.startswith(OUR_VARIABLES)}
        order = Order(
            argv=list(spec.argv),
            environment={
                **ours,
                "PYTHONUNBUFFERED": "1",
                **({RESTARTED: "1"} if again else {}),
                **spec.env,
            },
            config_path=str(spec.config_path),
            config=to_toml(spec.config),
            grace_s=grace_s(spec, self._settings),
        )
        shell = self._environ.get(SHELL_VARIABLE) or self._settings.remote_shell or SHELL
        words = [*shlex.split(shell), self._names[spec.name], shlex.join([sys.executable, "-m", AGENT])]
        return await Remote.order(
            replace(spec, argv=tuple(words), env={}), order, self._reaper, console, again=again
        )

    def taken_away(self) -> None:
        """No engine takes it away."""

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
