"""What a cluster must have for itself before it starts: its ports and its run directory."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pdserve.errors import StartupError
from pdserve.security.private_directory import private_directory
from pdserve.up.spec import Plan

AUTOMATIC_PORTS: Final = range(10_000, 22_000)
"""Below Linux's range for outgoing connections, and below that of SGLang's engines for their own use, so that
none of those takes a port before its process binds it.
"""

SUPERVISOR_LOCK: Final = "lock"
"""In the run directory: held, and its holder's process id; empty once that has ended."""


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen on the port now. Raises StartupError when the host is not one of ours."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise StartupError(f"cannot listen on host '{host}': {error.strerror}") from None
    lacking: OSError | None = None
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                # as servers do: TIME_WAIT is no obstacle
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                return True
        except PermissionError:
            raise StartupError(f"port {port} needs privileges: give one above 1023") from None
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            lacking = error  # another address of the name may be one of ours
    raise StartupError(f"cannot listen on {host}:{port}: {lacking.strerror if lacking else 'no address'}")


def has_ipv6_alone(host: str) -> bool:
    """Whether other hosts reach it by IPv6 only. A name that cannot be resolved here has not."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return False
    return bool(found) and all(family == socket.AF_INET6 for family, *_ in found)


def is_ours(host: str) -> bool:
    """Whether the name or address is one of this machine."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def free_ports(host: str, choose: random.Random) -> Iterator[int]:
    """Ports on which nothing listens, none given twice. Raises StartupError when there are no more."""
    for port in choose.sample(AUTOMATIC_PORTS, len(AUTOMATIC_PORTS)):
        if is_free(host, port):
            yield port
    raise StartupError(f"no free port from {AUTOMATIC_PORTS.start} to {AUTOMATIC_PORTS.stop - 1} on {host}")


def check_ports(plan: Plan) -> None:
    """Raise StartupError, one line, when a port that was asked for is in use."""
    for spec in plan.processes:
        for place in spec.listening:
            if place.chosen and not spec.host and not is_free(place.host, place.port):
                remedy = " with --port" if spec.role == "router" else ""
                raise StartupError(
                    f"{spec.name}: port {place.port} on {place.host} is in use; "
                    f"stop what listens there or give another{remedy}"
                )


def run_directory(path: Path) -> Path:
    """The absolute path for `claimed`. Raises StartupError for a name that is no text. Its last component
    stays a link if it is one, which `claimed` refuses: in /tmp another user could have made it, to have us
    write where he may not.
    """
    found = path.parent.resolve() / path.name
    try:
        str(found).encode()
    except UnicodeEncodeError:
        raise StartupError(
            f"{os.fsencode(found)!r}: its name is not UTF-8, and cannot stand in a configuration: choose "
            "another run_dir"
        ) from None
    return found


def make_run_directory(run_dir: Path) -> None:
    """Make it, if it is not there, and check that no other user can write there. Raises StartupError."""
    try:
        private_directory(run_dir, checks_parents=False)
    except OSError as error:
        raise _unusable(run_dir, error) from None


@contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """Make the run directory and hold it for this process alone. Raises StartupError."""
    make_run_directory(run_dir)
    try:
        lock = (run_dir / SUPERVISOR_LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise _unusable(run_dir, error) from None
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


def _unusable(run_dir: Path, error: OSError) -> StartupError:
    return StartupError(
        f"{run_dir}: cannot be used as run_dir: {error.strerror}: make it this user's own, or choose another"
    )
