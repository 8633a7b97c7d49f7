"""Processes that a test or a benchmark starts and ends, and what their main functions share."""

from __future__ import annotations

import ctypes
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import msgspec

from pdserve.errors import PdserveError
from pdserve.security.tokens import decode_secret, reveal_secret

C = TypeVar("C")

SERVER_START_TIMEOUT_S: Final = 20.0
SERVER_STOP_TIMEOUT_S: Final = 5.0
CLIENT_STOP_TIMEOUT_S: Final = 15.0
SIGNAL_POLL_S: Final = 0.1
PORTS: Final = range(10_000, 22_000)
"""Below Linux's range for outgoing connections, none of which takes a port before its server has bound it."""
PR_SET_PDEATHSIG: Final = 1
PRCTL: Final = ctypes.CDLL(None).prctl


class HarnessError(PdserveError):
    """A process that is needed did not start, or what is tested or measured did not do its part."""


class Child:
    """One process, whose output is appended to a log."""

    def __init__(self, name: str, command: Sequence[str | Path], log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self.command = command
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, f"{self.name} was never started"
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def spawn(self, *, dies_with_parent: bool = False, **options: Any) -> None:
        """Start it. `dies_with_parent`: the kernel sends it SIGTERM when the calling thread ends. `options`:
        of subprocess.Popen.
        """
        if dies_with_parent:
            options["preexec_fn"] = lambda: PRCTL(PR_SET_PDEATHSIG, signal.SIGTERM)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(self.command, stdout=log, stderr=subprocess.STDOUT, **options)

    def await_true(
        self, ready: Callable[[], bool], within_s: float, poll_s: float = 0.02, last_lines: int = 1
    ) -> None:
        """Wait until `ready()`. Raises HarnessError, with the last lines of the log, where the process ends
        first or it takes longer.
        """
        deadline = time.monotonic() + within_s
        while not ready():
            if not self.runs or time.monotonic() > deadline:
                last = "\n".join(self.log().strip().splitlines()[-last_lines:]) or "it said nothing"
                raise HarnessError(f"{self.name} did not start: {last}")
            time.sleep(poll_s)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def ended(self, within_s: float) -> bool:
        """Whether it ends within this time, without an error."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(max(0.0, within_s)) == 0
        return False

    def stop(self, within_s: float) -> bool:
        """SIGTERM, also where it is paused, then SIGKILL; whether it ended cleanly and in time."""
        if self.runs:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        clean = self.ended(within_s)
        self.kill()
        return clean

    def kill(self) -> None:
        """SIGKILL, where it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@contextmanager
def server(
    name: str,
    command: Sequence[str | Path],
    log_path: Path,
    ready: Callable[[], bool],
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `command` until the block ends; entered once `ready()`. Raises HarnessError.

    Its standard input is a pipe that ends with this process. To be called in the main thread, whose end also
    ends the server.
    """
    child = Child(name, command, log_path)
    child.spawn(dies_with_parent=True, stdin=subprocess.PIPE, env=environment)
    try:
        child.await_true(ready, SERVER_START_TIMEOUT_S)
        yield child.process
    finally:
        child.stop(SERVER_STOP_TIMEOUT_S)
        assert child.process.stdin is not None
        child.process.stdin.close()


class ClientConfig(Protocol):
    """What a process of load is told, as JSON."""

    @property
    def name(self) -> str: ...


def client(config: ClientConfig, directory: Path, module: str) -> Child:
    """One of them, not started yet."""
    file = directory / f"{config.name}.json"
    file.write_bytes(msgspec.json.encode(config, enc_hook=reveal_secret))
    command = [sys.executable, "-m", module, str(file)]
    return Child(config.name, command, directory / f"{config.name}.log")


def read_config(path: str, type_: type[C]) -> C:
    """What `client` wrote, in the client's process."""
    return msgspec.json.decode(Path(path).read_bytes(), type=type_, dec_hook=decode_secret)


def stop_at_sigterm() -> threading.Event:
    """An event that SIGTERM sets."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    return stop


def run_threads(works: Sequence[Callable[[], None]], stop: threading.Event) -> None:
    """Run each in a thread of its own until all have ended. The first error sets `stop`, and is raised."""
    with ThreadPoolExecutor(len(works)) as threads:
        working = [threads.submit(work) for work in works]
        while wait(working, SIGNAL_POLL_S).not_done:  # in small steps: a signal is handled between them
            if any(one.done() and one.exception() for one in working):
                stop.set()
    for one in working:
        one.result()


@contextmanager
def stopped_cleanly() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that no process is left behind."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        with suppress(ValueError):
            signal.signal(signal.SIGTERM, before)


def free_ports(count: int) -> list[int]:
    """TCP ports of the loopback address that nobody listens on now, all different, out of PORTS."""
    found: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with suppress(OSError):
            socket.create_server(("127.0.0.1", port)).close()
            found.append(port)
        if len(found) == count:
            break
    return found


def accepts(port: int) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
