"""Facts of this machine."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from pdserve.doctor.facts import NO_UCX, Machine
from pdserve.errors import StartupError
from pdserve.extras import is_installed
from pdserve.kvpool.transports.ucx import UcxLibrary

SELF_CHECK_TIMEOUT_S: Final = 180.0


def gather(sglang_tested: str, *, self_check: bool = True) -> Machine:
    """All of it; `self_check`: all of SGLang that pdserve leans on too, which takes 15 to 30 seconds."""
    shm = os.statvfs("/dev/shm")
    try:
        sglang = version("sglang")
    except PackageNotFoundError:
        sglang = ""
    infiniband = Path("/sys/class/infiniband")
    return Machine(
        open_files=_limit(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        shm_bytes=shm.f_blocks * shm.f_frsize,
        shm_free_bytes=shm.f_bavail * shm.f_frsize,
        sglang=sglang,
        sglang_tested=sglang_tested,
        sglang_misfit=_misfit() if self_check and sglang else "",
        ucx_error=_ucx_error(),
        has_infiniband=infiniband.is_dir() and any(infiniband.iterdir()),
    )


def _misfit() -> str:
    """What pdserve relies on and the installed SGLang has not, or does otherwise; empty: nothing."""
    words = [sys.executable, "-m", "pdserve.engine.sglang.selfcheck"]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=SELF_CHECK_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"its check did not end within {SELF_CHECK_TIMEOUT_S:.0f} s"
    return (done.stderr.strip().splitlines() or ["no reason given"])[-1] if done.returncode else ""


def _limit(value: int) -> int:
    return 2**31 if value == resource.RLIM_INFINITY else value


def _ucx_error() -> str:
    """Why UCX cannot be used; empty: it can."""
    if not is_installed("ucx"):
        return NO_UCX
    try:
        UcxLibrary()
    except (StartupError, OSError) as error:
        return f"UCX cannot be used: {error}"
    return ""
