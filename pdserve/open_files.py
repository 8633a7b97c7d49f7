"""The limit of open files of this process: each connection is one."""

from __future__ import annotations

import resource


def raise_open_files() -> int | None:
    """Let this process open as many files as it may. Returns how many; None: without a limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return None if hard == resource.RLIM_INFINITY else hard
