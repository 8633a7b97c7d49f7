"""Mooncake Store as the store of a worker's pages (`pool.engine = "mooncake"`), by its own client.

A page is one object, named NAMESPACE/KEY. Its segments go straight between the caller's memory and the
store's processes (`batch_put_from_multi_buffers`, `batch_get_into_multi_buffers`). Mooncake moves registered
memory only: the blocks of `StoreSettings.memory` are registered, and pages elsewhere pass through a block of
our own.

What its answers mean (0.3.13):

| call | answer for a key |
|---|---|
| batch_is_exist | 1: all bytes are there; 0: no; below 0: it cannot say |
| batch_put_from_multi_buffers | 0: stored, or there already; below 0: not |
| batch_get_into_multi_buffers | the object's length; below 0: not read |

RPC_FAILED stands for a master that cannot be reached, of each call.

An object that is asked for is leased to its reader for a few seconds, and stays meanwhile.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Final

import msgspec
import numpy as np
from msgspec import Meta

from pdserve.errors import ConfigError, PoolError, PoolUnavailable
from pdserve.extras import how_to_install, is_installed, needed_by
from pdserve.kvpool.protocol.page_bytes import Bytes1D, PageBuffers
from pdserve.kvpool.stores.base import StoreSettings, read_options

KIND: Final = "mooncake"
BUFFER_BYTES: Final = 16 << 20  # Mooncake's default; the calls used here need none
STAGING_BYTES: Final = 4 << 20
"""For pages outside of registered memory: records of answers, of 16 KiB each."""
RPC_FAILED: Final = (-900, -901)
QUIET: Final = {"MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2", "GLOG_logtostderr": "1"}  # no files of logs


class MooncakeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`pool.options`. The names of Mooncake's own settings are in brackets."""

    master: Annotated[str, Meta(min_length=1)]
    """HOST:PORT of the master (MOONCAKE_MASTER)."""
    metadata_server: str = "P2PHANDSHAKE"
    """Where clients find each other's memory (MOONCAKE_TE_META_DATA_SERVER)."""
    protocol: str = "tcp"
    """tcp, rdma, or another of Mooncake's transports (MOONCAKE_PROTOCOL)."""
    devices: str = ""
    """RDMA devices, comma-separated (MOONCAKE_DEVICE)."""
    hostname: str = "127.0.0.1"
    """Of this host, as the other processes of the store reach it (MOONCAKE_LOCAL_HOSTNAME)."""


class MooncakeStore:
    """A `PageStore`."""

    lacks: ClassVar = (
        "quotas and fair shares of namespaces",
        "access tokens, page keys",
        "checksums of pages",
        "reports of commits (they are polled)",
        "kept conversations",
        "reasons of misses",
        "drops of namespaces as a whole",
        "weights, KV events, live page",
    )

    @staticmethod
    def check_options(settings: StoreSettings) -> None:
        """Raises ConfigError: bad options, or Mooncake is not installed."""
        read_options(settings, KIND, MooncakeOptions)
        if not is_installed("mooncake"):
            raise ConfigError(f"Mooncake's client is not installed: {how_to_install('mooncake')}")

    def __init__(self, settings: StoreSettings) -> None:
        """Raises ConfigError, PoolUnavailable."""
        options = read_options(settings, KIND, MooncakeOptions)
        _await_port(options.master, settings.exists_timeout_s)
        self._prefix = settings.namespace + "/"
        self._store = join(options)
        self._staging: Bytes1D = np.empty(STAGING_BYTES, np.uint8)
        self._staged = threading.Lock()
        self._spans: list[tuple[int, int]] = []
        """Of registered memory: (first address, the one behind the last)."""
        for block in (*settings.memory, self._staging):
            start = block.ctypes.data
            if self._store.register_buffer(start, block.nbytes) != 0:
                self.close()
                raise PoolUnavailable("mooncake did not register the memory of pages")
            self._spans.append((start, start + block.nbytes))

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """See `PageStore`. Raises PoolUnavailable."""
        codes = self._store.batch_is_exist(self._names(keys))
        _check_master(codes)
        return [code == 1 for code in codes]

    def get(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> list[bool]:
        """See `PageStore`. Raises PoolUnavailable."""
        return self._moved(keys, pages, self._read, out=True)

    def put(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> list[bool]:
        """See `PageStore`."""
        return self._moved(keys, pages, self._write, out=False)

    def clear(self) -> int:
        """See `PageStore`. Objects that were asked for in the last seconds stay: they may be read now."""
        return max(0, int(self._store.remove_by_regex("^" + re.escape(self._prefix), False)))

    def check(self) -> dict[str, PoolError | None]:
        """See `PageStore`. Mooncake's own `health_check` says that all is well while the master is dead."""
        try:
            self.exists([bytes(32)])
        except PoolUnavailable as error:
            return {KIND: error}
        return {KIND: None}

    def close(self) -> None:
        """Idempotent."""
        self._store.close()

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        return [self._prefix + key.hex() for key in keys]

    def _read(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> list[bool]:
        pointers, sizes = _places(pages)
        lengths = self._store.batch_get_into_multi_buffers(self._names(keys), pointers, sizes)
        _check_master(lengths)
        return [length == sum(size) for length, size in zip(lengths, sizes, strict=True)]

    def _write(self, keys: Sequence[bytes], pages: Sequence[PageBuffers]) -> list[bool]:
        pointers, sizes = _places(pages)
        codes = self._store.batch_put_from_multi_buffers(self._names(keys), pointers, sizes)
        _check_master(codes)
        return [code == 0 for code in codes]

    def _moved(
        self,
        keys: Sequence[bytes],
        pages: Sequence[PageBuffers],
        move: Callable[[Sequence[bytes], Sequence[PageBuffers]], list[bool]],
        *,
        out: bool,
    ) -> list[bool]:
        """Move pages of registered memory as they are, others by `_staging`. `out`: of the store."""
        if all(map(self._is_registered, pages)):
            return move(keys, pages)
        page_bytes = sum(segment.nbytes for segment in pages[0])
        at_once = STAGING_BYTES // page_bytes
        if not at_once:
            return [False] * len(keys)
        done: list[bool] = []
        with self._staged:
            for start in range(0, len(keys), at_once):
                some = pages[start : start + at_once]
                flats = [self._staging[i * page_bytes : (i + 1) * page_bytes] for i in range(len(some))]
                if not out:
                    _copy(some, flats)
                done += move(keys[start : start + at_once], [[flat] for flat in flats])
                if out:
                    _copy_back(flats, some)
        return done

    def _is_registered(self, page: PageBuffers) -> bool:
        return all(
            any(
                start <= segment.ctypes.data and segment.ctypes.data + segment.nbytes <= end
                for start, end in self._spans
            )
            for segment in page
        )


def join(options: MooncakeOptions, segment_bytes: int = 0) -> Any:
    """A client of the store, which brings it so much memory. Raises ConfigError: Mooncake is not installed;
    PoolUnavailable.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)  # read when the library is loaded
    with needed_by('pool.engine = "mooncake"', "mooncake"):
        library = importlib.import_module("mooncake.store")
    store = library.MooncakeDistributedStore()
    settings = {
        "local_hostname": options.hostname,
        "metadata_server": options.metadata_server,
        "global_segment_size": str(segment_bytes),
        "local_buffer_size": str(BUFFER_BYTES),
        "protocol": options.protocol,
        "rdma_devices": options.devices,
        "master_server_addr": options.master,
    }
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        code = store.setup(settings)
    finally:
        # Mooncake ends a process on SIGTERM by a thread of its own, and blocks the signal in this one for it
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if code != 0:
        raise PoolUnavailable(f"mooncake cannot join the store of {options.master} (error {code})")
    return store


def _places(pages: Sequence[PageBuffers]) -> tuple[list[list[int]], list[list[int]]]:
    """The addresses and lengths of all segments."""
    addresses = [[segment.ctypes.data for segment in page] for page in pages]
    return addresses, [[segment.nbytes for segment in page] for page in pages]


def _copy(pages: Sequence[PageBuffers], into: Sequence[Bytes1D]) -> None:
    for page, flat in zip(pages, into, strict=True):
        np.concatenate(page, out=flat)


def _copy_back(flats: Sequence[Bytes1D], pages: Sequence[PageBuffers]) -> None:
    for flat, page in zip(flats, pages, strict=True):
        start = 0
        for segment in page:
            segment[:] = flat[start : start + segment.nbytes]
            start += segment.nbytes


def _check_master(codes: Sequence[int]) -> None:
    """Raises PoolUnavailable where the master could not be asked."""
    if any(code in RPC_FAILED for code in codes):
        raise PoolUnavailable(f"mooncake's master does not answer (error {codes[0]})")


def _await_port(master: str, timeout_s: float) -> None:
    """Raises PoolUnavailable where nobody listens. Mooncake would try for 90 s, and hold the interpreter."""
    host, _, port = master.rpartition(":")
    if not port.isdigit() or "://" in master:
        return  # found by etcd
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except OSError as error:
        raise PoolUnavailable(f"mooncake's master at {master} cannot be reached: {error}") from error
