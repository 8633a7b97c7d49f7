"""Mooncake Store: its master, one store process with all the memory, and a client, over TCP on loopback.

The client brings no memory of its own, so that every page crosses between processes as it would between
hosts. Buffers are registered once, and batches go by `batch_put_from` and `batch_get_into`, its zero-copy
calls.
"""

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

from benchmarks.processes import accepts, free_ports, server
from benchmarks.stores import BenchError, PageStore
from pdserve.kvpool.protocol.page_bytes import Bytes1D, PageBuffers

HOW_TO_INSTALL = "pip install '.[bench]' in the checkout (the wheel mooncake-transfer-engine-non-cuda)"
BUFFER_BYTES: Final = 16 << 20  # Mooncake's default; the calls used here need none
QUIET: Final = {"MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2", "GLOG_logtostderr": "1"}  # no files of logs
# Runs as a process: joins its memory to the store, says so, and stays until its standard input ends.
STORE_PROGRAM: Final = (
    "import sys\n"
    "from benchmarks.peers.mooncake import joined\n"
    "store = joined(sys.argv[1], int(sys.argv[2]))\n"
    "print('ready', flush=True)\n"
    "sys.stdin.read()\n"
)


class MooncakeStore:
    """A client of the store."""

    def __init__(self, store: Any) -> None:
        self._store = store

    @contextmanager
    def lend(self, blocks: Sequence[Bytes1D]) -> Iterator[None]:
        registered: list[Bytes1D] = []
        try:
            for block in blocks:
                if self._store.register_buffer(block.ctypes.data, block.nbytes) != 0:
                    raise BenchError("mooncake did not register a buffer")
                registered.append(block)
            yield
        finally:
            for block in registered:
                self._store.unregister_buffer(block.ctypes.data)

    def put(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> None:
        pointers, sizes = _places(pages)
        codes = self._store.batch_put_from([key.hex() for key in keys], pointers, sizes)
        if any(code != 0 for code in codes):
            raise BenchError(f"mooncake did not store a page (error {min(codes)})")

    def get(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> None:
        pointers, sizes = _places(pages)
        if self._store.batch_get_into([key.hex() for key in keys], pointers, sizes) != sizes:
            raise BenchError("mooncake did not return a page that was just put")

    def forget(self, keys: Sequence[bytes]) -> None:
        self._store.batch_remove([key.hex() for key in keys], True)  # though it was read a moment ago


def _places(pages: Sequence[PageBuffers]) -> tuple[list[int], list[int]]:
    return [page.ctypes.data for (page,) in pages], [page.nbytes for (page,) in pages]


def is_installed() -> bool:
    """Whether its package is there."""
    return _package() is not None


def _package() -> Path | None:
    found = importlib.util.find_spec("mooncake")
    places = found.submodule_search_locations if found is not None else None
    return Path(places[0]) if places else None


@contextmanager
def mooncake_store(capacity_bytes: int, directory: Path) -> Iterator[PageStore]:
    """The store's servers, and a client of them here. Raises BenchError."""
    with mooncake_servers(capacity_bytes, directory) as address:
        store = joined(address, 0)
        try:
            yield MooncakeStore(store)
        finally:
            store.close()


@contextmanager
def mooncake_servers(
    capacity_bytes: int, directory: Path, port: int = 0, flags: Sequence[str] = ()
) -> Iterator[str]:
    """The master and one process with all the memory; the master's HOST:PORT. Raises BenchError. `port`: 0:
    a free one. `flags`: more words for the master.
    """
    package = _package()
    if package is None:
        raise BenchError(f"mooncake is not installed: {HOW_TO_INSTALL}")
    free_port, metrics_port = free_ports(2)
    port = port or free_port
    command: list[str | Path] = [
        package / "mooncake_master",
        f"-rpc_port={port}",
        "-rpc_address=127.0.0.1",
        f"-metrics_port={metrics_port}",
    ]
    command += ["-metrics_host=127.0.0.1", "-enable_metric_reporting=false", "-minloglevel=2", *flags]
    address = f"127.0.0.1:{port}"
    store_log = directory / "mooncake-store.log"
    environment = {**os.environ, **QUIET, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    store_command = [sys.executable, "-c", STORE_PROGRAM, address, str(capacity_bytes)]
    with (
        server("mooncake's master", command, directory / "mooncake-master.log", lambda: accepts(port)),
        server(
            "mooncake's store",
            store_command,
            store_log,
            lambda: "ready" in store_log.read_text(errors="replace"),
            environment,
        ),
    ):
        yield address


def joined(address: str, segment_bytes: int) -> Any:
    """A process of the store that brings `segment_bytes` of memory. Raises BenchError."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)  # read when the library is loaded
    try:
        store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    except ImportError as error:
        raise BenchError(f"mooncake cannot be loaded ({error}): {HOW_TO_INSTALL}") from error
    settings = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": str(segment_bytes),
        "local_buffer_size": str(BUFFER_BYTES),
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
        raise BenchError(f"mooncake cannot join the store of {address} (error {code})")
    return store
