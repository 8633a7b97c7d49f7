"""What runs on another host for one process: starts it, ends it, and exits as it did. remote.py starts it.

Standard input leads to the supervisor. Its first line is the order, as JSON (`Order`); each further line is
the number of a signal for the process, `kill`, its new configuration as a JSON string, or empty: the
supervisor is there. The process writes to the standard output that is there already.

When the input ends or is silent for `patience_s`, the supervisor or the way to it is lost. The process is
asked to end then, and killed with its children after its grace; so it is when this one gets SIGTERM. A
supervisor that comes back finds the host free, at the latest so much later. Meanwhile the lock holds: a
process of a name runs once on a host. Hosts may have the run directory in common, so its name has the
host's: one that was lost for good locks nobody out.

Run as `python -m pdserve.up.places.remote_process`.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Final

import msgspec

from pdserve.errors import StartupError
from pdserve.security.private_directory import private_directory
from pdserve.up.places.process import dies_with_parent, write_private
from pdserve.up.places.sessions import end_sessions, kill_session

KILL: Final = b"kill"
LOCK_POLL_S: Final = 0.05
SIGNALLED: Final = 128
"""A process that a signal ended gives this much more than the signal's number."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to run."""

    argv: list[str]
    environment: dict[str, str]
    config_path: str
    config: str
    grace_s: float
    """Time between SIGTERM and SIGKILL where the supervisor is lost."""
    patience_s: float
    """It is lost when it has said nothing for so long."""


def main() -> int:
    """Exit status: the process's own, or `SIGNALLED` and more; 1 with a line where it cannot be started."""
    with suppress(PermissionError):  # the leader of a session already
        os.setsid()
    try:
        order = msgspec.json.decode(FileIO(0, closefd=False).readline(), type=Order)  # what follows is left
        process, lock = _started(order)
    except (StartupError, OSError, msgspec.DecodeError) as error:
        print(f"cannot be started here: {error}", flush=True)
        return 1

    def end() -> None:
        end_sessions([process.pid], order.grace_s)

    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=end, daemon=True).start())
    threading.Thread(target=_obey, args=(process, order, end), daemon=True).start()
    status = process.wait()
    kill_session(process.pid)
    os.close(lock)
    return status if status >= 0 else SIGNALLED - status


def _started(order: Order) -> tuple[subprocess.Popen[bytes], int]:
    """The process, leader of a session, and its lock. Raises StartupError, OSError."""
    config = Path(order.config_path)
    private_directory(config.parent, checks_parents=False)
    lock = _lock(config.with_suffix(f".{os.uname().nodename}.lock"), order.grace_s + order.patience_s)
    _write(config, order.config)
    process = subprocess.Popen(
        dies_with_parent(order.argv),
        stdin=subprocess.DEVNULL,
        env={**os.environ, **order.environment},
        start_new_session=True,
        pass_fds=[lock],  # held until the process has ended, even if this one is killed before
    )
    return process, lock


def _lock(path: Path, wait_s: float) -> int:
    """A descriptor of the locked file. Waits for an earlier process of this name to end. Raises
    StartupError.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + wait_s
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        if time.monotonic() > deadline:
            os.close(descriptor)
            raise StartupError(f"{path}: another supervisor's process of this name runs here: stop it")
        time.sleep(LOCK_POLL_S)


def _obey(process: subprocess.Popen[bytes], order: Order, end: Callable[[], None]) -> None:
    """The thread that does what the supervisor says, and `end` when it is lost."""
    said = b""
    while select.select([0], [], [], order.patience_s)[0] and (data := os.read(0, 4096)):
        *lines, said = (said + data).split(b"\n")
        for line in lines:
            if line == KILL:
                kill_session(process.pid)
            elif line.startswith(b'"'):
                _configure(order, msgspec.json.decode(line, type=str))
            elif line and process.poll() is None:
                process.send_signal(signal.Signals(int(line)))
    end()


def _configure(order: Order, config: str) -> None:
    try:
        _write(Path(order.config_path), config)
    except StartupError as error:
        print(f"not configured anew: {error}", flush=True)


def _write(path: Path, config: str) -> None:
    """Unless the supervisor has done so: hosts may have the run directory in common. Raises StartupError."""
    with suppress(OSError):
        if path.read_text(encoding="utf-8") == config:
            return
    write_private(path, config)


if __name__ == "__main__":
    sys.exit(main())
