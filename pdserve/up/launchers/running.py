"""One supervised process, as the supervisor has it: an agent that it started, here or on another host.

The agent gets its order by standard input, and gives the process's output and status back.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import closing, suppress
from io import FileIO
from typing import Final, Self

import msgspec

from pdserve.errors import StartupError
from pdserve.up.console import Console
from pdserve.up.launchers.agent import KILL, SIGNALLED
from pdserve.up.launchers.sessions import kill_session
from pdserve.up.spec import ProcessSpec

AGENT: Final = (sys.executable, "-m", "pdserve.up.launchers.agent")
TAIL_LINES: Final = 20
READ_BYTES: Final = 64 * 1024
MAX_LINE_BYTES: Final = 16 * 1024  # longer lines are shown in pieces
DRAIN_TIMEOUT_S: Final = 2.0
BEAT_S: Final = 10.0
"""How often the agent is told that the supervisor is there."""
SHELL_FAILED: Final = 255
"""ssh's status where it has lost the host, or never reached it."""
KILL_S: Final = 5.0


class Running:
    """A running process. Whoever started it must `kill` and `finish` it."""

    def __init__(
        self,
        spec: ProcessSpec,
        process: asyncio.subprocess.Process,
        control: asyncio.WriteTransport,
    ) -> None:
        self.spec = spec
        self._process = process
        self._control = control
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._pump: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, spec: ProcessSpec, words: Sequence[str], order: bytes, console: Console, *, again: bool
    ) -> Self:
        """Start an agent by these words, and have it carry the order out. The log is written anew, or with
        `again` continued. Raises StartupError.
        """
        try:
            log = spec.log_path.open("ab" if again else "wb", buffering=0)
        except OSError as error:
            raise StartupError(f"{spec.log_path}: cannot be written: {error.strerror}") from None
        # pipes of our own: with one of asyncio's, `wait` would wait for all that hold its other end
        reads, writes = os.pipe()
        order_reads, order_writes = os.pipe()
        output = FileIO(reads)
        loop = asyncio.get_running_loop()
        control, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, FileIO(order_writes, "w"))
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=order_reads,
                stdout=writes,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C in the terminal is the supervisor's alone
            )
        except OSError as error:
            log.close()
            output.close()
            control.close()
            raise StartupError(f"{spec.name}: cannot run {words[0]}: {error.strerror}") from None
        finally:
            os.close(writes)
            os.close(order_reads)
        running = cls(spec, process, control)
        running._pump = asyncio.create_task(running._copy_output(output, log, console))
        running._say(order)
        running._beat()
        return running

    async def wait(self) -> None:
        """Wait for the end of the process, and of its children."""
        await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send it SIGTERM or SIGHUP, if it is still there. Does not wait."""
        self._say(str(int(number)).encode())

    def configure(self, config: str) -> None:
        """Its configuration is this now. It reads it on the SIGHUP that follows. Does not wait."""
        self._say(msgspec.json.encode(config))

    async def kill(self) -> None:
        """End it and its children at once, and what leads to them in any case."""
        self._say(KILL)
        with suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), KILL_S)
        self._control.close()
        await asyncio.to_thread(kill_session, self._process.pid)

    async def finish(self) -> int:
        """Wait for the end of it all, and read the rest of its output. Gives the process's own exit status;
        minus a signal's number where that ended it, minus SIGKILL's where its host is lost.
        """
        status = await self._process.wait()
        self._control.close()
        await asyncio.to_thread(kill_session, self._process.pid)
        if self._pump is not None:
            await asyncio.wait({self._pump}, timeout=DRAIN_TIMEOUT_S)
            self._pump.cancel()
        if status == SHELL_FAILED:
            return -int(signal.SIGKILL)
        return SIGNALLED - status if status > SIGNALLED else status

    def last_lines(self) -> list[str]:
        """The last lines of its output, at most `TAIL_LINES`."""
        return list(self._tail)

    def _say(self, line: bytes) -> None:
        if not self._control.is_closing():
            self._control.write(line + b"\n")

    def _beat(self) -> None:
        if not self._control.is_closing():
            self._say(b"")
            asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    async def _copy_output(self, output: FileIO, log: FileIO, console: Console) -> None:
        """Output to the log as it comes, to the console and the tail by lines. Goes on when the log cannot be
        written: a process whose output nobody reads would stand still.
        """
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), output
        )
        lines = LineSplitter()

        def show(parts: list[str]) -> None:
            for line in parts:
                self._tail.append(line)
                console.log(self.spec.name, line)

        with log, closing(transport):
            writable = True
            while data := await stream.read(READ_BYTES):
                try:
                    if writable:
                        log.write(data)
                except OSError as error:
                    writable = False
                    console.say(f"error: {self.spec.log_path}: no longer written: {error.strerror}")
                show(lines.feed(data))
            show(lines.close())


class LineSplitter:
    """Bytes in, text lines out. A carriage return (progress bars) ends a line too; empty ones are dropped."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes."""
        *whole, self._rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            whole.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace") for line in whole if line]

    def close(self) -> list[str]:
        """The last line, if it had no end."""
        return self.feed(b"\n")
