"""Page residency of a mapped arena: populate its pages before use, and drop them before the unmapping.

The first access to a mapped page is a page fault: half a microsecond per 4 KiB, as much as copying it. So a
thread touches the whole arena as soon as it is mapped.

Unmapping costs the kernel as much again: 50 ms per GiB. Python unmaps with the last reference and holds the
GIL meanwhile, so a worker would pause after a restart of its pool node. A thread therefore drops the pages
first, in steps, so the unmapping has little to do.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Final

from pdserve.kvpool.protocol.page_bytes import Bytes1D

logger = logging.getLogger(__name__)

MADV_DONTNEED: Final = 4  # of a shared mapping: the file keeps the bytes
MADV_POPULATE_READ: Final = 22  # Linux 5.14; makes pages present
MADV_POPULATE_WRITE: Final = 23  # makes pages present and writable without changing them
THREAD: Final = "pdserve-memory"
STEP_BYTES: Final = 64 * 1024 * 1024  # per call, about 10 ms


def populate_in_background(memory: Bytes1D) -> None:
    """Populate the arena's pages in this process, in a thread.

    The thread keeps no reference to `memory` between steps, and ends when it is the only one left.
    """
    advice = MADV_POPULATE_WRITE if memory.flags.writeable else MADV_POPULATE_READ
    _start(_advise, weakref.ref(memory), advice)


def unmap_in_background(memory: Bytes1D) -> None:
    """Drop the pages of a shared mapping in a thread, and then its last reference."""
    _start(_let_go, [memory])


def _start(target: Callable[..., None], *given: object) -> None:
    thread = threading.Thread(target=target, args=given, name=THREAD, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # no thread can start (limit, or interpreter exit): unmapped synchronously
        logger.debug("%s", error)


def _let_go(memory: list[Bytes1D]) -> None:
    _advise(lambda: memory[0], MADV_DONTNEED)
    memory.clear()


def _advise(reference: Callable[[], Bytes1D | None], advice: int) -> None:
    # mmap.madvise would hold the GIL for the whole call
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    offset = 0
    while (memory := reference()) is not None and offset < memory.size:
        size = min(STEP_BYTES, memory.size - offset)
        if madvise(memory.ctypes.data + offset, size, advice) != 0:
            logger.debug("madvise %d: %s", advice, os.strerror(ctypes.get_errno()))
            return
        offset += size
        del memory
