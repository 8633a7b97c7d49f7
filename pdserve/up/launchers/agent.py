"""What runs on a host for one process: starts it, ends it, and exits as it did. running.py orders it.

Standard input leads to the supervisor. Its first line is the order, as JSON (`Order`); each further line is
the number of a signal for the process, `kill`, its new configuration as a JSON string, or empty: the
supervisor is there. The process writes to the standard output that is there already.

When the input ends or is silent for `patience_s`, the supervisor or the way to it is lost, by `kill -9` too.
The process is asked to end then, and killed with its children after its grace; so it is when this one gets
SIGTERM. A supervisor that comes back finds the host free, at the latest so much later. Meanwhile the lock
holds: a process of a name runs once on a host. Hosts may have the run directory in common, so its name has
the host's: one that was lost for good locks nobody out.

Run as `python -m pdserve.up.launchers.agent`.
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
from pdserve.resources.gpus import choose, described, visible
from pdserve.resources.machine import Machine, this_machine
from pdserve.security.private_directory import private_directory, write_private
from pdserve.up.launchers.sessions import dies_with_parent, end_sessions, kill_session

KILL: Final = b"kill"
LOCK_POLL_S: Final = 0.05
FOR_EVER_S: Final = 1e9
"""Patience with a supervisor on the same host: its end is the end of the input."""
LOST_S: Final = 60.0
"""What a lost process may take beyond its grace until it is noticed, and the next one of its name begins."""
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
    gpu_count: int = 0
    """GPUs that it computes on where this host has any."""
    gpu_numbers: list[int] = []
    """Which ones; empty: any that are free."""
    gpus_of_others: list[int] = []
    """Those that processes of the cluster on this host name for themselves."""
    needs_gpus: bool = False
    """It cannot do without."""


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
    wait_s = order.grace_s + LOST_S
    lock = _lock(config.with_suffix(f".{os.uname().nodename}.lock"), wait_s)
    _write(config, order.config)
    gpus, gpu_locks = _claimed_gpus(order, wait_s)
    process = subprocess.Popen(
        dies_with_parent(order.argv),
        stdin=subprocess.DEVNULL,
        env={**os.environ, **order.environment, **gpus},
        start_new_session=True,
        pass_fds=[lock, *gpu_locks],  # held until it has ended, even if this one is killed before
    )
    for one in gpu_locks:
        os.close(one)
    return process, lock


def _claimed_gpus(order: Order, wait_s: float) -> tuple[dict[str, str], list[int]]:
    """(the variables by which the process sees its GPUs, their locks). Raises StartupError."""
    here = this_machine(os.environ) if order.gpu_count else None
    if here is None or not here.gpus:
        if order.needs_gpus and order.gpu_count:
            raise StartupError("this host has no GPU")
        return {}, []
    folder = Path(f"/dev/shm/pdserve-{os.getuid()}/gpus")
    taken, locks = claim_gpus(here, order, folder, wait_s)
    print(described(here, Path(order.config_path).stem, taken), flush=True)
    return visible(taken), locks


def claim_gpus(here: Machine, order: Order, folder: Path, wait_s: float) -> tuple[tuple[int, ...], list[int]]:
    """(GPUs for the order that no other process of this user holds, the descriptors of their locks in
    `folder`). Waits for an earlier process to release its own. Raises StartupError, OSError.
    """
    count, others = order.gpu_count, order.gpus_of_others
    numbers = order.gpu_numbers or [gpu.index for gpu in here.gpus if gpu.index not in others]
    private_directory(folder)
    deadline = time.monotonic() + wait_s
    wanted = [gpu for gpu in here.gpus if gpu.index in numbers]
    while True:
        with (folder / "choosing").open("w") as choosing:  # one at a time
            fcntl.flock(choosing, fcntl.LOCK_EX)
            free = {
                gpu.index: lock for gpu in wanted if (lock := _try_lock(folder / f"{gpu.index}")) is not None
            }
            chosen: tuple[int, ...] = ()
            if len(free) >= count:
                chosen = choose(count, [gpu for gpu in wanted if gpu.index in free])
            for index in free.keys() - set(chosen):
                os.close(free[index])
        if chosen:
            return chosen, [free[index] for index in chosen]
        if len(wanted) < count or time.monotonic() > deadline:
            which = ", ".join(map(str, numbers))
            raise StartupError(f"{count} GPUs of {which} are needed here, and {len(free)} are free")
        time.sleep(LOCK_POLL_S)


def _try_lock(path: Path) -> int | None:
    """A descriptor of the locked file; None: another holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _lock(path: Path, wait_s: float) -> int:
    """A descriptor of the locked file. Waits for an earlier process of this name to end. Raises
    StartupError.
    """
    deadline = time.monotonic() + wait_s
    while (descriptor := _try_lock(path)) is None:
        if time.monotonic() > deadline:
            raise StartupError(f"{path}: another supervisor's process of this name runs here: stop it")
        time.sleep(LOCK_POLL_S)
    return descriptor


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
