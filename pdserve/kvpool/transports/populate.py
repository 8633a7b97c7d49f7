"""Making the pages of a mapped arena present before they are needed.

A first access to a page that this process has mapped but not touched is a fault of half a microsecond per
4 KiB, as much as copying them. So whoever maps an arena to move bytes lets a thread touch it all at once.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import weakref
from typing import Final

from pdserve.kvpool.transports.base import Bytes1D

logger = logging.getLogger(__name__)

MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; makes pages present and writable without changing them
POPULATE_BYTES: Final = 64 * 1024 * 1024  # per call, about 10 ms


def populate_in_background(memory: Bytes1D) -> None:
    """Make the arena's pages present in this process, without delaying anybody. The thread keeps no reference
    to `memory` between steps, and ends when nobody else has one.
    """
    reference = weakref.ref(memory)
    thread = threading.Thread(target=_populate, args=(reference,), name="pdserve-populate", daemon=True)
    thread.start()


def _populate(reference: weakref.ref[Bytes1D]) -> None:
    # mmap.madvise would hold the GIL for the whole call
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    offset = 0
    while (memory := reference()) is not None and offset < memory.size:
        size = min(POPULATE_BYTES, memory.size - offset)
        if madvise(memory.ctypes.data + offset, size, MADV_POPULATE_WRITE) != 0:
            logger.debug("pages stay to be faulted in one by one: %s", os.strerror(ctypes.get_errno()))
            return
        offset += size
        del memory
