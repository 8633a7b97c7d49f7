"""A process that something else starts and connects us to: a remote shell, Slurm's srun, an actor of Ray.

That runs agent.py, which gets its order by standard input, and gives output and status back.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from io import FileIO
from typing import Final, Self

import msgspec

from pdserve.errors import StartupError
from pdserve.resources.machine import VISIBLE
from pdserve.settings.command_line import RESTARTED
from pdserve.settings.config_file import to_toml
from pdserve.up.console import Console
from pdserve.up.launchers.agent import KILL, SIGNALLED, Order
from pdserve.up.launchers.process import Child
from pdserve.up.launchers.sessions import OrphanReaper
from pdserve.up.plan import ProcessSpec

AGENT: Final = (sys.executable, "-m", "pdserve.up.launchers.agent")
PATIENCE_S: Final = 60.0
BEAT_S: Final = 10.0
"""How often the supervisor says that it is there."""
SHELL_FAILED: Final = 255
"""ssh's status where it has lost the host, or never reached it."""
KILL_S: Final = 5.0


def order_for(
    spec: ProcessSpec, grace_s: float, *, again: bool, environment: Mapping[str, str] | None = None
) -> bytes:
    """To run `spec`, with these variables besides its own."""
    restarted = {RESTARTED: "1"} if again else {}
    return msgspec.json.encode(
        Order(
            argv=list(spec.argv),
            environment={**(environment or {}), "PYTHONUNBUFFERED": "1", **restarted, **spec.env},
            config_path=str(spec.config_path),
            config=to_toml(spec.config),
            grace_s=grace_s,
            patience_s=PATIENCE_S,
            gpu_count=0 if VISIBLE in spec.env else spec.gpu_count,
            gpu_numbers=list(spec.needs.gpu_numbers),
            needs_gpus=spec.needs.gpus > 0,
        )
    )


def exit_status(status: int) -> int:
    """The process's own, or minus a signal, by that of agent.py."""
    return SIGNALLED - status if status > SIGNALLED else status


class Remote(Child):
    """A process on another host. What connects us to it is our child."""

    _control: asyncio.WriteTransport

    @classmethod
    async def order(
        cls,
        spec: ProcessSpec,
        words: Sequence[str],
        order: bytes,
        reaper: OrphanReaper,
        console: Console,
        *,
        again: bool,
    ) -> Self:
        """Start `words`, and have the order for `spec` carried out there. Raises StartupError."""
        reads, writes = os.pipe()
        loop = asyncio.get_running_loop()
        control, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, FileIO(writes, "w"))
        shell = replace(spec, argv=tuple(words), env={})
        try:
            child = await cls.start(shell, reaper, console, again=again, stdin=reads)
        except StartupError:
            control.close()
            raise
        finally:
            os.close(reads)
        child._control = control
        child._say(order)
        child._beat()
        return child

    def signal(self, number: signal.Signals) -> None:
        """Send it there, if it has not ended."""
        self._say(str(int(number)).encode())

    def configure(self, config: str) -> None:
        """Write it there, before what `signal` sends next."""
        self._say(msgspec.json.encode(config))

    async def kill(self) -> None:
        """End it there, and what connects us in any case."""
        self._say(KILL)
        with suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), KILL_S)
        self._control.close()
        await super().kill()

    async def finish(self) -> int:
        """The process's own status, or minus a signal; minus SIGKILL where the host is lost."""
        status = await super().finish()
        return -int(signal.SIGKILL) if status == SHELL_FAILED else exit_status(status)

    def _say(self, line: bytes) -> None:
        if not self._control.is_closing():
            self._control.write(line + b"\n")

    def _beat(self) -> None:
        if not self._control.is_closing():
            self._say(b"")
            asyncio.get_running_loop().call_later(BEAT_S, self._beat)
