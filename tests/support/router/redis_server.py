"""A Redis server of a test's own, on a Unix socket."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple


class RedisServer(NamedTuple):
    process: subprocess.Popen[bytes]
    url: str


@contextmanager
def redis_server(directory: Path) -> Iterator[RedisServer]:
    """It keeps nothing, and is killed when the block ends."""
    program = shutil.which("redis-server")
    assert program, "redis-server is missing: apt-get install redis-server"
    socket = directory / "redis.sock"
    process = subprocess.Popen(
        [program, "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(directory)],
        stdout=subprocess.DEVNULL,
    )
    try:
        yield RedisServer(process, f"unix://{socket}")
    finally:
        process.kill()
        process.wait()
