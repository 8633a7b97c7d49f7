"""Facts of this machine."""

from __future__ import annotations

import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.peers.ucx_perftest import libucx_root, ucx_perftest_gbps
from benchmarks.stores import BenchError
from pdserve.doctor.facts import NO_UCX, Machine
from pdserve.engine.device import computes_bfloat16
from pdserve.errors import StartupError
from pdserve.extras import is_installed
from pdserve.kvpool.transports.ucx import UcxLibrary, ucx_options
from pdserve.resources.machine import has_nvidia_gpu
from pdserve.resources.memory import limit_bytes

COPY_BYTES: Final = 32 * 1024 * 1024
UCX_PAGE_BYTES: Final = 1024 * 1024
UCX_MOVE_BYTES: Final = 2 * 10**8
UCX_INFO_TIMEOUT_S: Final = 30.0
SELF_CHECK_TIMEOUT_S: Final = 180.0


def gather(sglang_tested: str, *, measure: bool = True) -> Machine:
    """All of it; `measure`: bandwidths too, which takes a second or two."""
    shm = os.statvfs("/dev/shm")
    transports, ucx_error = _transports()
    try:
        sglang = version("sglang")
    except PackageNotFoundError:
        sglang = ""
    infiniband = Path("/sys/class/infiniband")
    ucx_gbps, ucx_trouble = measured_ucx() if measure and not ucx_error else (0.0, "")
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
        copy_gbps=_copy_gbps() if measure else 0.0,
        ucx_gbps=ucx_gbps,
        ucx_trouble=ucx_trouble,
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
    except (StartupError, BenchError, OSError, subprocess.TimeoutExpired) as error:
        return (), f"UCX cannot be used: {error}"
    return tuple(dict.fromkeys(re.findall(r"Transport: (\S+)", said))), ""


def _copy_gbps() -> float:
    """Plain copy of what lies in no cache: the bound of pages on this host."""
    source, target = np.ones(COPY_BYTES, np.uint8), np.ones(COPY_BYTES, np.uint8)
    seconds = []
    for _ in range(3):
        started_s = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - started_s)
    return COPY_BYTES / statistics.median(seconds) / 1e9


def measured_ucx() -> tuple[float, str]:
    """(`ucx_perftest` over loopback, a fifth of a second, in 10^9 bytes/s; why it cannot run)"""
    try:
        return ucx_perftest_gbps(UCX_PAGE_BYTES, ucx_options({}), runs=1, move_bytes=UCX_MOVE_BYTES), ""
    except BenchError as error:
        return 0.0, str(error)
