"""Plain sockets over TCP loopback, with pages as cold as a pool's: what the kernel's own copies allow.

Two processes: this one takes batches, and `python -m benchmarks.peers.sockets` sends them. There are no
messages, keys or checksums, and each side makes one call to the kernel after the other. Batches take turns
among buffers that are together larger than a CPU's cache.
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final

import numpy as np

from benchmarks.stores import BenchError
from pdserve.kvpool.protocol.page_bytes import Bytes1D

ROTATE_BYTES: Final = 256 * 1024 * 1024
BATCH_PAGES: Final = 32
ROUNDS: Final = 12
WARM_UP_ROUNDS: Final = 2
SEND_BYTES: Final = 4 * 1024 * 1024
TIMEOUT_S: Final = 30.0
SO_ZEROCOPY: Final = 60  # linux/socket.h; Python has no names for these two
MSG_ZEROCOPY: Final = 0x4000000

WAYS: Final = {"sockets": (1, False), "sockets_two": (2, False), "sockets_zerocopy": (1, True)}
"""By name: lanes (connections with a thread at each end), and whether pages are sent with MSG_ZEROCOPY."""


def sockets_gbps(name: str, page_bytes: int) -> float:
    """Rate of batches of BATCH_PAGES pages, in 10^9 bytes/s: the median of some rounds. Raises BenchError."""
    lanes, zerocopy = WAYS[name]
    batch_bytes = BATCH_PAGES * page_bytes
    # ones: memory that nobody has written yet comes while it is received, page by page
    targets = [np.ones(batch_bytes, np.uint8) for _ in range(_buffers(batch_bytes))]
    with ExitStack() as open_:
        listening = open_.enter_context(socket.create_server(("127.0.0.1", 0)))
        listening.settimeout(TIMEOUT_S)
        port = listening.getsockname()[1]
        words = [str(port), str(lanes), str(int(zerocopy)), str(batch_bytes)]
        sender = subprocess.Popen([sys.executable, "-m", "benchmarks.peers.sockets", *words])
        open_.callback(_stop, sender)
        try:
            taken = [open_.enter_context(listening.accept()[0]) for _ in range(lanes)]
            for lane in taken:
                lane.settimeout(TIMEOUT_S)
            times_s = [_take_batch(taken, targets[turn % len(targets)]) for turn in range(ROUNDS)]
        except OSError as error:
            raise BenchError(f"plain sockets could not be measured: {error}") from error
    return round(batch_bytes / statistics.median(times_s[WARM_UP_ROUNDS:]) / 1e9, 3)


def _buffers(batch_bytes: int) -> int:
    return max(2, ROTATE_BYTES // batch_bytes)


def _take_batch(lanes: Sequence[socket.socket], target: Bytes1D) -> float:
    """Ask for a batch and take it, each lane its share. Returns how long it took, in s."""

    def take(number: int) -> None:
        share = target.data[_share(number, len(lanes), target.nbytes)]
        lanes[number].sendall(b"x")
        while share.nbytes:
            got = lanes[number].recv_into(share)
            if not got:
                raise ConnectionError("the sender has ended")
            share = share[got:]

    began_s = time.perf_counter()
    _side_by_side(len(lanes), take)
    return time.perf_counter() - began_s


def _send_batches(
    lane: socket.socket, number: int, lanes: int, batches: Sequence[Bytes1D], flags: int
) -> None:
    """Send this lane's share of the next batch for each byte that comes, until the other end closes."""
    turn = 0
    while lane.recv(1):
        batch = batches[turn % len(batches)]
        turn += 1
        left = batch.data[_share(number, lanes, batch.nbytes)]
        while left.nbytes:
            left = left[lane.send(left[:SEND_BYTES], flags) :]


def _share(number: int, lanes: int, size: int) -> slice:
    return slice(size * number // lanes, size * (number + 1) // lanes)


def _side_by_side(count: int, work: Callable[[int], None]) -> None:
    """Call `work` with each number, each in a thread; alone in this one. Raises the first error."""
    errors: list[OSError] = []

    def one(number: int) -> None:
        try:
            work(number)
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(1, count)]
    for thread in threads:
        thread.start()
    one(0)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(TIMEOUT_S)


def main(words: Sequence[str]) -> None:
    """The sender: PORT LANES ZEROCOPY BATCH_BYTES."""
    port, lanes, zerocopy, batch_bytes = (int(word) for word in words)
    random = np.random.default_rng(0)
    batches = [random.integers(0, 256, batch_bytes, np.uint8) for _ in range(_buffers(batch_bytes))]
    connected = [socket.create_connection(("127.0.0.1", port), TIMEOUT_S) for _ in range(lanes)]
    flags = 0
    for lane in connected:
        lane.settimeout(TIMEOUT_S)
        if zerocopy:
            lane.setsockopt(socket.SOL_SOCKET, SO_ZEROCOPY, 1)
            flags = MSG_ZEROCOPY
    _side_by_side(lanes, lambda number: _send_batches(connected[number], number, lanes, batches, flags))


if __name__ == "__main__":
    main(sys.argv[1:])
