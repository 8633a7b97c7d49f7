"""Servers that the benchmark starts for itself on this machine, and stops."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pdserve.bench.stores import BenchError
from pdserve.up.process import die_with_parent

START_TIMEOUT_S: Final = 20.0
STOP_TIMEOUT_S: Final = 5.0
DEBIAN_PACKAGES: Final = {"libibverbs.so.1": "libibverbs1"}
"""Of libraries that a server needs and its wheel does not bring."""


@contextmanager
def server(
    name: str,
    command: Sequence[str | Path],
    log_path: Path,
    ready: Callable[[], bool],
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `command` until the block ends; entered once `ready()` is true. Raises BenchError.

    Its standard input is a pipe that ends with this process, should the server listen to that; the kernel
    sends it SIGTERM then. To be called in the main thread: it is that thread's end that counts.
    """
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=die_with_parent(os.getpid()),
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline:
                last = log_path.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
                raise BenchError(f"{name} did not start: {last[0]}{_remedy(last[0])}")
            time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdin is not None
        process.stdin.close()


def _remedy(line: str) -> str:
    """What to install, where the loader says that a library is missing."""
    missing = (package for library, package in DEBIAN_PACKAGES.items() if library in line)
    return "".join(f"; 'sudo apt-get install {package}' (or your system's like) helps" for package in missing)


def free_ports(count: int) -> list[int]:
    """TCP ports of the loopback address that nobody listens on now, all different."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [int(each.getsockname()[1]) for each in servers]
    finally:
        for each in servers:
            each.close()


def accepts(port: int) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
