"""Pool nodes as processes of the benchmark's own: real ones, started by the command line, to be measured,
killed and paused.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from pdserve.bench.stores import BenchError
from pdserve.errors import PoolError
from pdserve.kvpool.commands.asking import NodeClient
from pdserve.kvpool.messages import StatusReport
from pdserve.up.toml import to_toml

START_TIMEOUT_S: Final = 60.0  # allocating many GiB takes a while
STOP_TIMEOUT_S: Final = 20.0
ASK_TIMEOUT_S: Final = 2.0


class NodeProcess:
    """One node. It listens on a Unix socket in `directory` and wherever `settings` say."""

    def __init__(self, name: str, directory: Path, settings: Mapping[str, Any]) -> None:
        """`settings` as in the node's configuration file, but for its name and arena."""
        self.name = name
        self.address = f"unix:{directory}/{name}.sock"
        self.log_path = directory / f"{name}.log"
        self._file = directory / f"{name}.toml"
        self._arena = Path(tempfile.mkdtemp(prefix="pdserve-bench-", dir=memory_dir()))
        whole = {**settings, "name": name, "arena_dir": self._arena}
        whole["listen"] = [*settings.get("listen", ()), self.address]
        self._file.write_text(to_toml(whole))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def arena_path(self) -> Path:
        return self._arena / self.name / "arena"

    def start(self) -> float:
        """Start it and wait until it answers; how long that took, in s. Raises BenchError."""
        began = time.monotonic()
        self.spawn()
        return self.await_ready() - began

    def spawn(self) -> None:
        """Start it."""
        command = [sys.executable, "-m", "pdserve", "pool", "serve", "--config", str(self._file)]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def await_ready(self) -> float:
        """Wait until it answers; when that was. Raises BenchError."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self.status()
                return time.monotonic()
            except PoolError as error:
                problem = error
            if self._running().poll() is not None or time.monotonic() > deadline:
                last = self.log().strip().splitlines()[-1:] or [str(problem)]
                raise BenchError(f"the benchmark's pool node {self.name} did not start: {last[0]}")
            time.sleep(0.02)

    def status(self) -> StatusReport:
        """Raises PoolUnavailable, PoolTimeout, PoolRefused."""
        node = NodeClient(self.address, timeout_s=ASK_TIMEOUT_S)
        try:
            return node.status()
        finally:
            node.close()

    def kill(self) -> None:
        """kill -9."""
        self._running().kill()
        self._running().wait()

    def pause(self) -> None:
        self._running().send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._running().send_signal(signal.SIGCONT)

    def stop(self) -> bool:
        """As an operator would; whether it ended cleanly and in time."""
        process = self._running()
        if process.poll() is not None:
            return process.returncode == 0
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            return process.wait(STOP_TIMEOUT_S) == 0
        except subprocess.TimeoutExpired:
            self.kill()
            return False

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def close(self) -> None:
        """Whatever state it is in: no process and no memory are left."""
        if self._process is not None and self._process.poll() is None:
            self.kill()
        shutil.rmtree(self._arena, ignore_errors=True)

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the node was never started"
        return self._process


def memory_dir() -> Path | None:
    """Where arenas go: memory, where there is such a directory."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else None


@contextmanager
def stopped_cleanly() -> Iterator[None]:
    """SIGTERM ends the block like Ctrl-C does, so that no process is left behind."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        with suppress(ValueError):
            signal.signal(signal.SIGTERM, before)
