"""The part of UCX that both ends of the data path use: one worker with one endpoint per connection.

Every connection has its own worker, on both sides, for these reasons:

- UCX can cancel a posted receive only before a message has matched it. To make sure that nothing writes into
  a buffer any more, the endpoint is force-closed and the worker destroyed. This closes its sockets and queue
  pairs, and no other connection is affected.
- Tags match per worker. So a client cannot reach another client's transfers, and messages without a receive
  end with the connection.
- The cost is small: 1 to 6 ms at connect, 6 to 12 descriptors, up to 4 MB (less with fewer transports).

Rules of use:

- Endpoints always use error handling: a dead peer is noticed at once, because its sockets close. UCX's
  shared-memory transports have no error handling, so they are excluded; same-host clients map the arena.
- A buffer belongs to UCX from `send` or `receive` until the operation is completed or `destroy` returned.
- Blocking on `epoll_fd` is right only after `arm` returned True with nothing progressed since.

UCXX is imported when the first context is made, not before: it is not installed everywhere, and the import
takes half a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from pdserve.errors import PoolUnavailable, StartupError
from pdserve.extras import how_to_install
from pdserve.kvpool.protocol.page_bytes import Bytes1D

logger = logging.getLogger(__name__)

GREETING_TAG: Final = 1  # client -> node: the connection's number; both tags are below events.FIRST_TAG
GREETED_TAG: Final = 2  # node -> client: the same number, which confirms the endpoint
LAST_TAG: Final = 3  # never sent: see UcxLink._close
GREETING_BYTES: Final = 8
CLOSE_WAIT_S: Final = 0.2  # a forced close is local work; after this time the worker is destroyed anyway

# UCX's default TCP segments (8 KiB) cap it at 1.6 GB/s on loopback; with these it reaches 8.
_TCP_SEGMENTS: Final = {"TCP_TX_SEG_SIZE": "256k", "TCP_RX_SEG_SIZE": "1m"}
# A connection uses one or two of them at a time, and UCX allocates eight at once, for each network interface:
# 20 MiB that come and go with it, and leave holes in the heap of a process that lives long.
_FEW_SEGMENTS: Final = {"TCP_TX_BUFS_GROW": "2", "TCP_RX_BUFS_GROW": "1"}
# Of two peers the one with the lower address connects to the other's interface, while its endpoint is made.
# UCX 1.21 dies (SIGSEGV in ucp_is_uct_ep_failed) where a blocking connect succeeds there, is reset before the
# first send (the peer was killed, or gave up on a busy machine), and the retry is refused: the failure
# frees a transport endpoint that its owner still uses, as the flag that tells it from an unowned one is set
# only afterwards. A connect that does not block is completed in `progress`, where errors are handled, and a
# peer that does not answer cannot stop the node's event loop.
_CONNECT_IN_PROGRESS: Final = {"TCP_CONN_NB": "y"}
# Larger messages are announced, and fetched by their receiver. UCX never ends a receive of a message that
# comes by itself, in parts, when its sender is gone: its worker would stay, with 4 MB and its descriptors.
# UCXX sets a variable to the same value where it is imported first.
_RENDEZVOUS: Final = {"RNDV_THRESH": "8k"}


def ucx_options(overrides: Mapping[str, str]) -> dict[str, str]:
    """UCX settings (names without `UCX_`) for host memory between hosts.

    `overrides` win over the environment, which wins over the defaults here.

    Transports: TCP, InfiniBand/RoCE if the machine has it, and `self`, which `complete_unmatched` uses.
    """
    infiniband = Path("/sys/class/infiniband")
    has_infiniband = infiniband.is_dir() and any(infiniband.iterdir())
    options = {
        "TLS": "tcp,self,ib" if has_infiniband else "tcp,self",
        **_TCP_SEGMENTS,
        **_FEW_SEGMENTS,
        **_CONNECT_IN_PROGRESS,
        **_RENDEZVOUS,
    }
    options = {name: value for name, value in options.items() if f"UCX_{name}" not in os.environ}
    return {**options, **overrides}


class UcxLibrary:
    """The loaded UCXX module. The constructor only imports it."""

    def __init__(self) -> None:
        """Raises StartupError if UCXX is not installed or cannot be loaded here."""
        # UCXX sets a variable that its own UCX then warns about, on the terminal of whoever started us
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
        # else UCX takes SIGHUP, which is a node's upgrade, and traces all that it does from then on
        os.environ.setdefault("UCX_DEBUG_SIGNO", "0")
        _load_ucs()
        try:
            self.api: Any = importlib.import_module("ucxx._lib.libucxx")
            self.array: Any = importlib.import_module("ucxx._lib.arr").Array
        except (ImportError, OSError) as error:
            raise StartupError(
                f"UCX data path: cannot load ucxx ({error}): {how_to_install('ucx')}, or set data_path to tcp"
            ) from error

    def context(self, options: Mapping[str, str]) -> Any:
        """A UCP context for tagged messages and sleeping. Raises StartupError on settings UCX refuses."""
        features = (self.api.Feature.TAG, self.api.Feature.WAKEUP)
        try:
            return self.api.UCXContext(ucx_options(options), features)
        except (self.api.UCXError, RuntimeError) as error:
            wrong = [name for name in options if not self._takes({name: options[name]})]
            text = ", ".join(f"{name} = {options[name]!r}" for name in wrong or options) or "its defaults"
            raise StartupError(
                f"UCX data path: UCX does not start with {text} ({error}); `ucx_info -cf` lists all names "
                "and values, here they stand without UCX_"
            ) from error

    def _takes(self, options: Mapping[str, str]) -> bool:
        """Whether UCX starts with only these settings."""
        try:
            self.api.UCXContext(ucx_options(options), (self.api.Feature.TAG, self.api.Feature.WAKEUP))
        except (self.api.UCXError, RuntimeError):
            return False
        return True


def _load_ucs() -> None:
    """Load UCX's lowest library, which measures the CPU's clock for 0.4 s while it loads.

    An `import` would hold the GIL meanwhile, a foreign call does not. Errors show up in the later import.
    """
    with contextlib.suppress(StartupError):
        path = libucx_root() / "lib" / "libucs.so"
        dlopen = ctypes.CDLL(None).dlopen
        dlopen.argtypes, dlopen.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
        dlopen(os.fsencode(path), os.RTLD_NOW | os.RTLD_LOCAL)


def libucx_root() -> Path:
    """Where the package of UCX's programs (bin/) and libraries (lib/) lies. Raises StartupError."""
    found = importlib.util.find_spec("libucx")
    for folder in (found.submodule_search_locations or []) if found else []:
        if (Path(folder) / "lib" / "libucs.so").is_file():
            return Path(folder)
    raise StartupError(f"UCX's libraries are not installed: {how_to_install('ucx')}")


class Operation:
    """One send or receive in progress. It keeps its buffer alive."""

    __slots__ = ("_array", "_request")

    def __init__(self, request: Any, array: Any) -> None:
        self._request = request
        self._array = array

    @property
    def completed(self) -> bool:
        """The operation has ended, with or without success. UCX does not touch the buffer any more."""
        return bool(self._request.completed)

    @property
    def ok(self) -> bool:
        """The operation succeeded. Valid only after `completed`."""
        return int(self._request.status) == 0

    def release(self) -> None:
        """Drop the request, which refers to the worker. The operation cannot be used afterwards."""
        self._request = self._array = None


class UcxLink:
    """One worker and, once connected, its endpoint. Used by one thread at a time."""

    def __init__(self, library: UcxLibrary, context: Any) -> None:
        """Raises PoolUnavailable if UCX cannot make a worker (out of descriptors or memory)."""
        self._api = library.api
        self._array = library.array
        self._endpoint: Any = None
        self._loop_endpoint: Any = None
        self._listener: Any = None
        self._greeting: Operation | None = None
        self._arrived: list[Any] = []  # accepted endpoints; a list, so the callback refers not to self
        try:
            self._worker: Any = self._api.UCXWorker(context)
            self._worker.init_blocking_progress_mode()
            self.epoll_fd: int = self._worker.epoll_file_descriptor
        except (self._api.UCXError, RuntimeError, OSError) as error:
            raise PoolUnavailable(f"UCX cannot make a worker: {error}") from error

    # -- connecting

    def listen(self, port: int) -> int:
        """Accept one endpoint on this port (0: any free one); return the port. Raises PoolUnavailable."""
        try:
            self._listener = self._api.UCXListener.create(
                self._worker, port, self._arrived.append, deliver_endpoint=True
            )
        except (self._api.UCXError, RuntimeError) as error:
            raise PoolUnavailable(f"UCX cannot listen on port {port}: {error}") from error
        return int(self._listener.port)

    def accept(self) -> bool:
        """Take the first accepted endpoint and close all others. True if there is one."""
        while self._arrived:
            endpoint = self._arrived.pop(0)
            if self._endpoint is None:
                self._endpoint = endpoint
            else:
                self._close(endpoint)
        return self._endpoint is not None

    def connect(self, host: str, port: int) -> None:
        """Begin to connect. Later errors show up in `alive`. Raises PoolUnavailable."""
        try:
            self._endpoint = self._api.UCXEndpoint.create(self._worker, host, port, True)
        except (self._api.UCXError, RuntimeError) as error:
            raise PoolUnavailable(f"UCX cannot connect to {host} port {port}: {error}") from error

    # -- moving bytes

    def send(self, buffer: Bytes1D, tag: int) -> Operation:
        """Send the buffer as one message. Raises PoolUnavailable if the endpoint is gone."""
        return self._start(self._endpoint.tag_send, buffer, tag)

    def receive(self, buffer: Bytes1D, tag: int) -> Operation:
        """Receive one message into the buffer; a longer one fails, a shorter one fills only its start."""
        return self._start(self._endpoint.tag_recv, buffer, tag)

    def receive_greeting(self, buffer: Bytes1D) -> Operation:
        """Receive the greeting from any endpoint."""
        self._greeting = self._start(self._worker.tag_recv, buffer, GREETING_TAG)
        return self._greeting

    def complete_unmatched(self, tag: int) -> None:
        """End a posted receive that no message has matched, by sending it an empty message from this worker.

        UCXX has no cancel of one request that reports its outcome. If the receive was matched already, it is
        not affected, and the empty message stays in the worker.
        """
        if self._loop_endpoint is None:
            self._loop_endpoint = self._worker.create_endpoint_from_worker_address(self._worker.address, True)
        self._start(self._loop_endpoint.tag_send, np.empty(0, np.uint8), tag)

    def unexpected(self) -> tuple[int, int] | None:
        """(tag, length) of a message that arrives or has arrived without a posted receive, or None.

        UCX keeps the message until a receive takes it. Raises PoolUnavailable.
        """
        try:
            found = self._worker.tag_probe(self._api.UCXXTag(0), self._api.UCXXTagMask(0))
        except (self._api.UCXError, RuntimeError) as error:
            raise PoolUnavailable(f"UCX failed: {error}") from error
        return (int(found.sender_tag.value), int(found.length)) if found.matched else None

    def _start(self, begin: Any, buffer: Bytes1D, tag: int) -> Operation:
        array = self._array(buffer)
        try:
            return Operation(begin(array, self._api.UCXXTag(tag)), array)
        except (self._api.UCXError, RuntimeError) as error:
            raise PoolUnavailable(f"UCX endpoint failed: {error}") from error

    # -- progress

    def progress(self) -> bool:
        """Do one step of UCX's work. True if there was any. Raises PoolUnavailable."""
        try:
            return bool(self._worker.progress_once())
        except (self._api.UCXError, RuntimeError) as error:
            raise PoolUnavailable(f"UCX failed: {error}") from error

    def arm(self) -> bool:
        """Prepare `epoll_fd` for a wait. False: call `progress` again first. Raises PoolUnavailable."""
        try:
            return bool(self._worker.arm())
        except (self._api.UCXError, RuntimeError) as error:
            raise PoolUnavailable(f"UCX failed: {error}") from error

    @property
    def alive(self) -> bool:
        """The endpoint has not failed. It may not be connected yet."""
        return self._endpoint is None or bool(self._endpoint.alive)

    def destroy(self, operations: list[Operation]) -> None:
        """Destroy endpoint and worker. After it UCX touches none of the operations' buffers. Never raises.

        The operations are released and `operations` is emptied, because the worker ends with its last
        reference, and a traceback may hold an operation for long. The greeting's receive belongs to no
        endpoint, so it ends only with the worker.
        """
        if self._worker is None:
            return
        try:
            for endpoint in (self._endpoint, self._loop_endpoint, *self._arrived):
                if endpoint is not None:
                    self._close(endpoint)
            deadline_s = time.monotonic() + CLOSE_WAIT_S
            ending = [operation for operation in operations if operation is not self._greeting]
            while not all(operation.completed for operation in ending) and time.monotonic() < deadline_s:
                self._worker.progress()
            ending.clear()
            self._worker.progress()  # drops requests that completed in the last step
        except (self._api.UCXError, RuntimeError) as error:
            logger.warning("closing a UCX connection: %s", error)
        self._drop_unreceived()
        for operation in operations:
            operation.release()
        self._greeting = None
        operations.clear()
        self._arrived.clear()
        self._endpoint = self._loop_endpoint = None
        self._listener = None
        self._worker = None

    def _drop_unreceived(self) -> None:
        """Take all messages without a receive out of the worker, whose memory ends with it.

        For each of them UCXX would take memory of the length that the sender says, and wait without a
        deadline until it is whole: never, once its endpoint is closed. So it only warns, on the terminal.
        """
        with contextlib.suppress(self._api.UCXError, RuntimeError):
            while self._worker.tag_probe(self._api.UCXXTag(0), self._api.UCXXTagMask(0), remove=True).matched:
                pass

    def _close(self, endpoint: Any) -> None:
        """Close the endpoint by force, so that the worker can be destroyed afterwards.

        After a forced close the endpoint keeps requests that could not be cancelled at once, and they refer
        to it: UCXX 0.52 never frees such a cycle, nor the worker and its sockets. A request that begins on a
        just closed endpoint makes UCXX move them all to the worker, which drops them while it progresses.
        This is possible only in the close callback. (A failed endpoint has done it already.)
        """
        last: list[Any] = []
        held = [endpoint]  # emptied below: the endpoint refers to its callback, which must not refer back
        empty = self._array(np.empty(0, np.uint8))
        if endpoint.alive:
            endpoint.set_close_callback(
                lambda: last.append(held[0].tag_recv(empty, self._api.UCXXTag(LAST_TAG)))
            )
        endpoint.close_blocking()
        endpoint.remove_close_callback()
        held.clear()
        self._worker.progress()
        last.clear()
