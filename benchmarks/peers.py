"""What the pool is measured beside: Mooncake Store, and UCX's own bandwidth test."""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, Protocol

from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.protocol.page_bytes import Bytes1D, PageBuffers
from pdserve.kvpool.transports.ucx import libucx_root
from tests.support.mooncake import joined, mooncake_servers
from tests.support.processes import HarnessError, free_ports, server

PERFTEST_TIMEOUT_S: Final = 60.0
MOVE_BYTES: Final = 10**9
RUNS: Final = 3


class PageStore(Protocol):
    """A store of pages under keys. Pages have one segment each."""

    def lend(self, blocks: Sequence[Bytes1D]) -> AbstractContextManager[None]:
        """Every page's buffer lies in one of these blocks while this is open (a store may register them)."""
        ...

    def put(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> None:
        """Store a batch. Raises HarnessError unless all of it is stored."""
        ...

    def get(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> None:
        """Fill the buffers. Raises HarnessError unless all of them are filled."""
        ...

    def forget(self, keys: Sequence[bytes]) -> None:
        """These are not asked for again. Not measured: it spares a store its eviction."""
        ...


class PoolStore:
    """pdserve's pool, through its client. It evicts by itself, inside what is measured."""

    def __init__(self, client: PoolClient) -> None:
        self._client = client

    def lend(self, blocks: Sequence[Bytes1D]) -> AbstractContextManager[None]:
        return nullcontext()

    def put(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> None:
        if not all(self._client.put(keys, pages)):
            raise HarnessError(
                "the pool did not store a page: is its capacity large enough, and the node well?"
            )

    def get(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> None:
        if not all(self._client.get(keys, pages)):
            raise HarnessError("the pool did not return a page that was just put")

    def forget(self, keys: Sequence[bytes]) -> None:
        pass


class MooncakeStore:
    """A client of Mooncake Store, over TCP on loopback. It brings no memory of its own, so that every page
    crosses between processes as it would between hosts. Buffers are registered once, and batches go by its
    zero-copy calls.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    @contextmanager
    def lend(self, blocks: Sequence[Bytes1D]) -> Iterator[None]:
        registered: list[Bytes1D] = []
        try:
            for block in blocks:
                if self._store.register_buffer(block.ctypes.data, block.nbytes) != 0:
                    raise HarnessError("mooncake did not register a buffer")
                registered.append(block)
            yield
        finally:
            for block in registered:
                self._store.unregister_buffer(block.ctypes.data)

    def put(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> None:
        pointers, sizes = _pointers(pages)
        codes = self._store.batch_put_from([key.hex() for key in keys], pointers, sizes)
        if any(code != 0 for code in codes):
            raise HarnessError(f"mooncake did not store a page (error {min(codes)})")

    def get(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> None:
        pointers, sizes = _pointers(pages)
        if self._store.batch_get_into([key.hex() for key in keys], pointers, sizes) != sizes:
            raise HarnessError("mooncake did not return a page that was just put")

    def forget(self, keys: Sequence[bytes]) -> None:
        self._store.batch_remove([key.hex() for key in keys], True)  # though it was read a moment ago


def _pointers(pages: Sequence[PageBuffers]) -> tuple[list[int], list[int]]:
    return [page.ctypes.data for (page,) in pages], [page.nbytes for (page,) in pages]


@contextmanager
def mooncake_store(capacity_bytes: int) -> Iterator[PageStore]:
    """The store's servers, and a client of them here. Raises HarnessError."""
    with (
        tempfile.TemporaryDirectory(prefix="pdserve-mooncake-") as directory,
        mooncake_servers(capacity_bytes, Path(directory)) as address,
    ):
        store = joined(address, 0)
        try:
            yield MooncakeStore(store)
        finally:
            store.close()


def ucx_perftest_gbps(
    page_bytes: int,
    settings: dict[str, str],
    *,
    runs: int = RUNS,
    move_bytes: int = MOVE_BYTES,
    memory: str = "host",
) -> float:
    """Tag bandwidth that UCX's own `ucx_perftest` reports over TCP loopback, in 10^9 bytes/s: the median of
    the runs.

    It sends one and the same buffer again and again, which stays in the CPU's cache; a pool's pages do not.
    `settings`: UCX settings without their `UCX_` prefix. `memory`: of both sides, host or cuda. Raises
    HarnessError, StartupError.
    """
    root = libucx_root()
    program = root / "bin" / "ucx_perftest"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(root / "lib")}
    environment |= {f"UCX_{name}": value for name, value in settings.items()}
    return statistics.median(
        _perftest(program, environment, page_bytes, move_bytes, memory) for _ in range(runs)
    )


def _perftest(
    program: Path, environment: dict[str, str], page_bytes: int, move_bytes: int, memory: str
) -> float:
    (port,) = free_ports(1)
    messages = str(max(100, move_bytes // page_bytes))
    command = [program, "127.0.0.1", "-p", str(port), "-t", "tag_bw", "-s", str(page_bytes), "-m", memory]
    with tempfile.TemporaryDirectory(prefix="pdserve-perftest-") as directory:
        serve = [program, "-p", str(port)]
        try:
            with server("ucx_perftest", serve, Path(directory, "log"), lambda: _listens(port), environment):
                done = subprocess.run(
                    [*command, "-n", messages, "-w", "100"],
                    env=environment, capture_output=True, text=True, timeout=PERFTEST_TIMEOUT_S, check=False,
                )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise HarnessError(f"ucx_perftest did not finish in {PERFTEST_TIMEOUT_S:.0f} s") from error
    # the last columns are MB/s average and overall, then messages per second; its MB are 2^20 bytes
    output = done.stdout + done.stderr
    final = re.search(r"^Final:\s+(.+)$", output, re.MULTILINE)
    columns = final[1].split() if final else []
    if len(columns) != 8:
        raise HarnessError(f"ucx_perftest printed no result: {output.strip().splitlines()[-1:]}")
    return round(float(columns[5]) * 2**20 / 1e9, 3)


def _listens(port: int) -> bool:
    """Whether something does, by the kernel's table: a connection would end ucx_perftest's server."""
    needle = f":{port:04X} "
    with contextlib.suppress(FileNotFoundError):
        tables = [Path("/proc/net", name).read_text() for name in ("tcp", "tcp6")]
        return any(needle in line and " 0A " in line for table in tables for line in table.splitlines())
    return False
