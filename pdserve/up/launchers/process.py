"""One supervised process: its session, its output, its end; and the launcher that makes it a child here."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from io import FileIO
from pathlib import Path
from typing import Final, Self

from pdserve.errors import StartupError
from pdserve.settings.command_line import RESTARTED
from pdserve.up.config import ClusterSettings
from pdserve.up.console import Console
from pdserve.up.hosts import Demand
from pdserve.up.launchers.sessions import OrphanReaper, kill_session
from pdserve.up.plan import ProcessSpec

TAIL_LINES: Final = 20
READ_BYTES: Final = 64 * 1024
MAX_LINE_BYTES: Final = 16 * 1024  # longer lines are shown in pieces
DRAIN_TIMEOUT_S: Final = 2.0
_WISH: Final = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):  # it died before
    os._exit(1)
for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would keep that
    signal.signal(number, signal.SIG_DFL)
os.execv(sys.argv[2], sys.argv[3:])
"""
"""Asks for SIGTERM when the parent dies, and becomes the command. The wish survives exec."""


class Child:
    """A running process, leader of its own session. Whoever started it must `kill` and `finish` it."""

    def __init__(self, spec: ProcessSpec, process: asyncio.subprocess.Process, reaper: OrphanReaper) -> None:
        self.spec = spec
        self.session = process.pid
        self._process = process
        self._reaper = reaper
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._pump: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        spec: ProcessSpec,
        reaper: OrphanReaper,
        console: Console,
        *,
        again: bool,
        stdin: int = asyncio.subprocess.DEVNULL,
    ) -> Self:
        """Start the process; its log is written anew, or with `again` continued. `stdin`: a descriptor, for
        its standard input. Raises StartupError.
        """
        try:
            log = spec.log_path.open("ab" if again else "wb", buffering=0)
        except OSError as error:
            raise StartupError(f"{spec.log_path}: cannot be written: {error.strerror}") from None
        # A pipe of our own: with one of asyncio's, `wait` would wait for all that hold its other end.
        reads, writes = os.pipe()
        output = FileIO(reads)
        try:
            process = await asyncio.create_subprocess_exec(
                *dies_with_parent(spec.argv),
                stdin=stdin,
                stdout=writes,
                stderr=asyncio.subprocess.STDOUT,
                env=os.environ
                | {"PYTHONUNBUFFERED": "1"}
                | ({RESTARTED: "1"} if again else {})
                | dict(spec.env),
                start_new_session=True,
            )
        except OSError as error:
            log.close()
            output.close()
            raise StartupError(f"{spec.name}: cannot run {spec.argv[0]}: {error.strerror}") from None
        finally:
            os.close(writes)
        child = cls(spec, process, reaper)
        reaper.watch(child.session)
        child._pump = asyncio.create_task(child._copy_output(output, log, console))
        return child

    async def wait(self) -> None:
        """Wait for the end of the process itself, not of its children."""
        await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it is still alive."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def configure(self, config: str) -> None:
        """The supervisor has written it, to the directory that the process sees."""

    async def kill(self) -> None:
        """SIGKILL to all of the session."""
        await asyncio.to_thread(kill_session, self.session)

    async def finish(self) -> int:
        """Wait for the end, end the rest of the session, read the rest of the output. Gives the exit status;
        negative: minus a signal.
        """
        status = await self._process.wait()
        await self.kill()
        self._reaper.forget(self.session)
        if self._pump is not None:
            await asyncio.wait({self._pump}, timeout=DRAIN_TIMEOUT_S)
            self._pump.cancel()
        return status

    def last_lines(self) -> list[str]:
        """The last lines of output, at most `TAIL_LINES`."""
        return list(self._tail)

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


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read: configuration can hold access tokens. Who reads meanwhile
    gets the old one. Raises StartupError.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        new.unlink(missing_ok=True)
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
        new.replace(path)
    except OSError as error:
        raise StartupError(f"{path}: cannot be written: {error.strerror}") from None


def dies_with_parent(command: Sequence[str | Path]) -> list[str]:
    """The command, to be started by this process, which gets SIGTERM when this process dies.

    The wish is made by a Python of its own that becomes the command. Code between fork and exec of a process
    with threads may wait for a lock for ever (`preexec_fn`). Raises FileNotFoundError.
    """
    program, *arguments = map(str, command)
    if (found := shutil.which(program)) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), program)
    return [sys.executable, "-I", "-S", "-c", _WISH, str(os.getpid()), found, program, *arguments]


class LocalLauncher:
    """See base.Launcher. This host: each process is a child of the supervisor, in a session of its own."""

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
