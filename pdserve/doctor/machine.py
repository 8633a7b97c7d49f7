"""Facts of this machine."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from pdserve.capacity.available import limit_bytes
from pdserve.capacity.gather import has_nvidia_gpu
from pdserve.doctor.facts import NO_UCX, Machine
from pdserve.engine.device import computes_bfloat16
from pdserve.errors import StartupError
from pdserve.extras import is_installed
from pdserve.kvpool.transports.ucx import UcxLibrary, libucx_root

UCX_INFO_TIMEOUT_S: Final = 30.0
SELF_CHECK_TIMEOUT_S: Final = 180.0


def gather(sglang_tested: str, *, measure: bool = True) -> Machine:
    """All of it; `measure`: check all of SGLang that pdserve leans on, too, which takes 15 to 30 seconds."""
    shm = os.statvfs("/dev/shm")
    transports, ucx_error = _transports()
    try:
        sglang = version("sglang")
    except PackageNotFoundError:
        sglang = ""
    infiniband = Path("/sys/class/infiniband")
    return Machine(
        open_files=_limit(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        shm_bytes=shm.f_blocks * shm.f_frsize,
        shm_free_bytes=shm.f_bavail * shm.f_frsize,
        memory_bytes=limit_bytes(),
        sglang=sglang,
        sglang_tested=sglang_tested,
        sglang_misfit=_misfit() if measure and sglang else "",
        transports=transports,
        ucx_error=ucx_error,
        has_infiniband=infiniband.is_dir() and any(infiniband.iterdir()),
        has_gpu=has_nvidia_gpu(),
        numa_nodes=len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
        has_numactl=shutil.which("numactl") is not None,
        has_bfloat16=computes_bfloat16(Path("/proc/cpuinfo").read_text(encoding="utf-8")),
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


def _transports() -> tuple[tuple[str, ...], str]:
    """(UCX's transports by `ucx_info -d`, why there are none)"""
    if not is_installed("ucx"):
        return (), NO_UCX
    try:
        UcxLibrary()
        root = libucx_root()
        said = subprocess.run(
            [root / "bin" / "ucx_info", "-d"],
            env={**os.environ, "LD_LIBRARY_PATH": str(root / "lib")},
            capture_output=True,
            text=True,
            timeout=UCX_INFO_TIMEOUT_S,
            check=False,
        ).stdout
    except (StartupError, OSError, subprocess.TimeoutExpired) as error:
        return (), f"UCX cannot be used: {error}"
    return tuple(dict.fromkeys(re.findall(r"Transport: (\S+)", said))), ""
