"""What a cluster must have for itself before it starts: its ports and its run directory."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdserve.errors import StartupError
from pdserve.private_directory import private_directory
from pdserve.up.plan import Plan
from pdserve.up.ports import is_free


def check_ports(plan: Plan) -> None:
    """Raise StartupError, one line, when a port that was asked for is in use."""
    for spec in plan.processes:
        for place in spec.listening:
            if place.chosen and not is_free(place.host, place.port):
                remedy = " with --port" if spec.role == "router" else ""
                raise StartupError(
                    f"{spec.name}: port {place.port} on {place.host} is in use; "
                    f"stop what listens there or give another{remedy}"
                )


@contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """Make the run directory and hold it for this process alone. Raises StartupError."""
    try:
        private_directory(run_dir, checks_parents=False)
        lock = (run_dir / "lock").open("a+")
    except OSError as error:
        raise StartupError(
            f"{run_dir}: cannot be used as run_dir: {error.strerror}: make it this user's own, or choose "
            "another"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            raise StartupError(
                f"{run_dir}: a cluster runs from here already (process {owner}); "
                "stop it, or give another --run-dir"
            ) from None
        try:
            lock.truncate(0)
            os.write(lock.fileno(), f"{os.getpid()}\n".encode())  # unbuffered: it fails here or nowhere
        except OSError as error:
            raise StartupError(f"{run_dir}: cannot be written: {error.strerror}") from None
        try:
            yield
        finally:
            lock.truncate(0)  # the number may come to mean another process
