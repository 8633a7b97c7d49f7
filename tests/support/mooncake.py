"""Mooncake Store on this machine: its master and one process with all the memory, over TCP on loopback."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.support.processes import HarnessError, accepts, free_ports, server

HOW_TO_INSTALL: Final = (
    "pip install '.[mooncake]' in the checkout (the wheel mooncake-transfer-engine-non-cuda)"
)
QUIET: Final = {"MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2", "GLOG_logtostderr": "1"}  # no files of logs
# Runs as a process: joins its memory to the store, says so, and stays until its standard input ends.
STORE_PROGRAM: Final = (
    "import sys\n"
    "from tests.support.mooncake import joined\n"
    "store = joined(sys.argv[1], int(sys.argv[2]))\n"
    "print('ready', flush=True)\n"
    "sys.stdin.read()\n"
)


def is_installed() -> bool:
    """Whether its package is there."""
    return _package() is not None


def _package() -> Path | None:
    found = importlib.util.find_spec("mooncake")
    places = found.submodule_search_locations if found is not None else None
    return Path(places[0]) if places else None


@contextmanager
def mooncake_servers(
    capacity_bytes: int, directory: Path, port: int = 0, flags: Sequence[str] = ()
) -> Iterator[str]:
    """The master and one process with all the memory; the master's HOST:PORT. `port`: 0 takes a free one.
    `flags`: more arguments for the master. Raises HarnessError.
    """
    package = _package()
    if package is None:
        raise HarnessError(f"mooncake is not installed: {HOW_TO_INSTALL}")
    free_port, metrics_port = free_ports(2)
    port = port or free_port
    command: list[str | Path] = [package / "mooncake_master", f"-rpc_port={port}", "-rpc_address=127.0.0.1"]
    command += [f"-metrics_port={metrics_port}", "-metrics_host=127.0.0.1", "-enable_metric_reporting=false"]
    command += ["-minloglevel=2", *flags]
    address = f"127.0.0.1:{port}"
    store_log = directory / "mooncake-store.log"
    environment = {**os.environ, **QUIET, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    store_command = [sys.executable, "-c", STORE_PROGRAM, address, str(capacity_bytes)]

    def joins() -> bool:
        return "ready" in store_log.read_text(errors="replace")

    with (
        server("mooncake's master", command, directory / "mooncake-master.log", lambda: accepts(port)),
        server("mooncake's store", store_command, store_log, joins, environment),
    ):
        yield address


def joined(address: str, segment_bytes: int) -> Any:
    """A client of the store that brings it `segment_bytes` of memory. Raises HarnessError."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)  # read when the library is loaded
    try:
        store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    except ImportError as error:  # of its library, which needs others of the system
        raise HarnessError(
            f"mooncake cannot be loaded: {error}; apt-get install libibverbs1 may help"
        ) from error
    settings = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": str(segment_bytes),
        "local_buffer_size": str(16 << 20),  # Mooncake's default
        "protocol": "tcp",
        "rdma_devices": "",
        "master_server_addr": address,
    }
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        code = store.setup(settings)
    finally:
        # Mooncake ends a process on SIGTERM by a thread of its own, and blocks the signal in this one for it
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if code != 0:
        raise HarnessError(f"mooncake cannot join the store of {address} (error {code})")
    return store
