"""UCX's own bandwidth test, `ucx_perftest`."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import statistics
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.processes import free_ports, server
from benchmarks.stores import BenchError

RUN_TIMEOUT_S: Final = 60.0
MOVE_BYTES: Final = 10**9
RUNS: Final = 3


def ucx_perftest_gbps(
    page_bytes: int,
    settings: dict[str, str],
    *,
    runs: int = RUNS,
    move_bytes: int = MOVE_BYTES,
    memory: str = "host",
) -> float:
    """Tag bandwidth that UCX's own `ucx_perftest` reports over TCP loopback, in 10^9 bytes/s: the median of
    so many runs.

    It sends one and the same buffer again and again, which stays in the CPU's cache; a pool's pages do not.
    `settings`: UCX settings without their `UCX_` prefix. `memory`: of both sides, host or cuda. Raises
    BenchError.
    """
    return statistics.median(_run(page_bytes, settings, move_bytes, memory) for _ in range(runs))


def _run(page_bytes: int, settings: dict[str, str], move_bytes: int, memory: str) -> float:
    root = libucx_root()
    program = root / "bin" / "ucx_perftest"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(root / "lib")}
    environment |= {f"UCX_{name}": value for name, value in settings.items()}
    (port,) = free_ports(1)
    messages = max(100, move_bytes // page_bytes)
    command = [str(program), "127.0.0.1", "-p", str(port), "-t", "tag_bw", "-s", str(page_bytes)]
    command += ["-m", memory]
    with tempfile.TemporaryDirectory(prefix="pdserve-perftest-") as directory:
        log = Path(directory) / "log"
        ready = partial(_listens, port)
        try:
            with server("ucx_perftest's server", [program, "-p", str(port)], log, ready, environment):
                done = subprocess.run(
                    [*command, "-n", str(messages), "-w", "100"],
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=RUN_TIMEOUT_S,
                    check=False,
                )
        except subprocess.TimeoutExpired as error:
            raise BenchError(f"ucx_perftest did not finish in {RUN_TIMEOUT_S:.0f} s") from error
    return read_perftest(done.stdout + done.stderr)


def read_perftest(output: str) -> float:
    """The overall bandwidth in ucx_perftest's output (its last columns are MB/s average and overall, messages
    per second average and overall; its MB are 2^20 bytes). Raises BenchError.
    """
    final = re.search(r"^Final:\s+(.+)$", output, re.MULTILINE)
    columns = final[1].split() if final else []
    if len(columns) != 8:
        raise BenchError(f"ucx_perftest printed no result: {output.strip().splitlines()[-1:]}")
    return round(float(columns[5]) * 2**20 / 1e9, 3)


def libucx_root() -> Path:
    """Where UCX's programs and libraries lie. Raises BenchError."""
    found = importlib.util.find_spec("libucx")
    for folder in (found.submodule_search_locations or []) if found else []:
        if (Path(folder) / "bin" / "ucx_perftest").is_file():
            return Path(folder)
    raise BenchError("ucx_perftest is not installed: it comes with the package libucx-cu13")


def _listens(port: int) -> bool:
    """Whether something does, by the kernel's table: a connection would end ucx_perftest's server."""
    needle = f":{port:04X} "
    with contextlib.suppress(FileNotFoundError):
        tables = [Path("/proc/net", name).read_text() for name in ("tcp", "tcp6")]
        return any(needle in line and " 0A " in line for table in tables for line in table.splitlines())
    return False
