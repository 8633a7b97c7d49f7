"""Ends the servers of a test run that is itself ended (`timeout`, `kill -9`) before it could stop them."""

from __future__ import annotations

import atexit
import functools

from pdserve.up.launchers.sessions import OrphanReaper


@functools.cache
def reaper() -> OrphanReaper:
    """Of this process. Tell it each session that a test starts, and each that has ended."""
    reaper = OrphanReaper()
    atexit.register(reaper.close)
    return reaper
