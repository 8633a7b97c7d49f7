"""Which of UCX's transports move what lies on the GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from benchmarks.gpu_check.place import Place, Skipped, output_of
from benchmarks.peers.ucx_perftest import libucx_root, ucx_perftest_gbps
from pdserve.kvpool.transports.ucx import ucx_options

PAGE_BYTES: Final = 1 << 20
MOVE_BYTES: Final = 2 * 10**9
_NEEDS: Final = {"UCX CUDA": "cuda_copy", "UCX between processes": "cuda_ipc", "UCX GPU-direct": "gdr_copy"}
_REMEDY: Final = {"gdr_copy": ": install gdrcopy and its kernel module", "cuda_ipc": "", "cuda_copy": ""}


def steps(place: Place) -> Iterator[tuple[str, Callable[[], str]]]:
    """See `checks.GROUPS`."""
    yield "UCX", lambda: _speed("host", [])
    for name, transport in _NEEDS.items():
        yield name, partial(_of_gpu, place, transport)


def _of_gpu(place: Place, transport: str) -> str:
    there = _transports()
    if transport not in there:
        raise Skipped(f"UCX sees no {transport} (it has {', '.join(there)}){_REMEDY[transport]}")
    if place.device == "cpu":
        raise Skipped("no memory of a GPU to move")
    return _speed("cuda", ["cuda_copy", transport])


def _speed(memory: str, transports: list[str]) -> str:
    settings = ucx_options({})
    if transports:
        settings["TLS"] = ",".join(dict.fromkeys(["tcp", "self", *transports]))
    found = ucx_perftest_gbps(PAGE_BYTES, settings, runs=1, move_bytes=MOVE_BYTES, memory=memory)
    return f"{found:.2f} GB/s of {memory} memory, {settings.get('TLS', 'all transports')}"


def _transports() -> tuple[str, ...]:
    root = libucx_root()
    environment = {**os.environ, "LD_LIBRARY_PATH": str(root / "lib")}
    said = output_of([str(root / "bin" / "ucx_info"), "-d"], 30.0, environment)
    return tuple(dict.fromkeys(re.findall(r"Transport: (\S+)", said)))
