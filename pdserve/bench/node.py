"""A pool node of the benchmark's own, and clients to it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final, cast

from pdserve.bench.stores import BenchError
from pdserve.errors import PoolError
from pdserve.kvpool.client import PoolClient
from pdserve.kvpool.client_config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.messages import DataPathChoice
from pdserve.kvpool.transports.control import ControlChannel, make_hello

CONNECT_TIMEOUT_S: Final = 10.0
START_TIMEOUT_S: Final = 60.0  # allocating many GiB takes a while
STOP_TIMEOUT_S: Final = 10.0
NODE_NAME: Final = "bench"

Connect = Callable[[str, bool], AbstractContextManager[PoolClient]]


@contextmanager
def bench_node(capacity: str, slab_bytes: int) -> Iterator[Connect]:
    """Start a node in a temporary directory; yields `connect(path, checksum)`. Raises BenchError."""
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as directory:
        socket_path = Path(directory) / "pool.sock"
        arena = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(directory)
        with tempfile.TemporaryDirectory(prefix="pdserve-bench-", dir=arena) as arena_dir:
            config = Path(directory) / "node.toml"
            config.write_text(
                f'name = "{NODE_NAME}"\nlisten = ["unix:{socket_path}"]\ncapacity_bytes = "{capacity}"\n'
                f'slab_bytes = {slab_bytes}\narena_dir = "{arena_dir}"\nkeep = false\n'
            )
            log_path = Path(directory) / "node.log"
            with log_path.open("wb") as log:
                command = [sys.executable, "-m", "pdserve", "pool", "serve", "--config", str(config)]
                process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
                try:
                    _await_ready(f"unix:{socket_path}", process, log_path)
                    yield lambda path, checksum: _client(f"unix:{socket_path}", path, checksum)
                finally:
                    process.terminate()
                    try:
                        process.wait(STOP_TIMEOUT_S)
                    except subprocess.TimeoutExpired:
                        process.kill()
                        process.wait()


@contextmanager
def _client(address: str, path: str, checksum: bool) -> Iterator[PoolClient]:
    config = PoolClientConfig(
        nodes=[PoolNodeRef(node=NODE_NAME, address=address)],
        data_path=cast(DataPathChoice, path),
        checksum=checksum,
        connect_timeout_s=CONNECT_TIMEOUT_S,
        get_timeout_s=60.0,
        put_timeout_s=60.0,
    )
    client = PoolClient(config, "bench", {"bench": "1"}, name="bench")
    try:
        problem = client.check()[NODE_NAME]
        if problem is not None:
            raise BenchError(str(problem)) from problem
        yield client
        client.clear()
    finally:
        client.close()


def _await_ready(address: str, process: subprocess.Popen[bytes], log_path: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            hello = make_hello("bench", "", "none")
            ControlChannel.connect(address, hello, time.monotonic() + CONNECT_TIMEOUT_S).close()
            return
        except PoolError as error:
            problem = error
        if process.poll() is not None or time.monotonic() > deadline:
            last = log_path.read_text(errors="replace").strip().splitlines()[-1:] or [str(problem)]
            raise BenchError(f"the benchmark's pool node did not start: {last[0]}") from problem
        time.sleep(0.05)
