"""Loads of one model, one after the other, each in a process of its own: from disk with a cold page cache by
SGLang's loaders, and from pools of this run. Beside them stand what the disk and what memory can do.

    disk        SGLang's --load-format loaders; the page cache is emptied of the files before each load
    cached      --load-format auto with the files in the page cache: the best that a disk can look like
    memory      one node of this host, by mapped memory
    tcp         the same node over TCP, as from another host; here both ends share the processors
    nodes       three nodes of this host, by mapped memory
    ssd         one node whose pages are in its SSD tier only, before each load
    object      one node whose pages are in an object store only, before each load
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from benchmarks.node_processes import NodeProcess, client_of, pool_of
from benchmarks.pool.weights_load.loading_process import POOL, Loaded, LoadJob
from benchmarks.stores import BenchError
from pdserve.engine.sglang.trials.weight_loaders import LOADERS, is_installed
from pdserve.errors import PoolError
from pdserve.kvpool.protocol.messages import DataPathChoice
from pdserve.kvpool.weights.names import ModelName
from pdserve.kvpool.weights.place import tell_children
from pdserve.kvpool.weights.push import push
from pdserve.kvpool.weights.store import NAMESPACE, WeightStore
from pdserve.kvpool.weights.tensors import LENGTH_BYTES, header_bytes, parse_header
from pdserve.up.places.process import dies_with_parent

SOURCES: Final = ("disk", "cached", "memory", "tcp", "nodes", "ssd", "object")
MODEL: Final = ModelName("bench")
TIER: Final = "tier"
BUCKET: Final = "bucket"
"""A directory that stands for one."""
LOAD_TIMEOUT_S: Final = 600.0
STORE_TIMEOUT_S: Final = 300.0
BLOCK_BYTES: Final = 8 << 20
_OF_POOLS: Final = {"memory": 1, "tcp": 1, "nodes": 3, "ssd": 1, "object": 1}
"""Nodes of each."""
_OF_TIERS: Final = ("ssd", "object")
_OF_DISKS: Final = ("disk", *_OF_TIERS)


class LoadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One line of results; medians over rounds. `gbps`: 10^9 bytes of tensors per second."""

    source: str
    loader: str
    size_bytes: int
    rounds: int
    seconds: float
    first_s: float
    gbps: float
    disk_gbps: float | None
    """Direct reads of the model's files, between these loads; None: not measured for this source."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What this machine can do, in 10^9 bytes per second; medians over rounds."""

    memcpy_gbps: float
    """Of one thread, into memory whose pages are there, as a model's parameters are."""
    memcpy_fresh_gbps: float
    """The same into memory that nobody has touched: the kernel makes each page at its first byte."""
    disk_gbps: float
    """Direct reads of the model's files, in order, by one thread."""


def measure(
    model: Path,
    sources: Sequence[str],
    rounds: int,
    capacity: str,
    directory: Path,
    say: Callable[[str], None],
    object_url: str = "",
) -> tuple[list[LoadFigures], Limits]:
    """`object_url`: bucket and prefix of the object store; empty: a directory. Raises BenchError, also where
    two loads gave other tensors.
    """
    files = sorted(model.glob("*.safetensors"))
    size = sum(tensor_bytes(file) for file in files)
    if not size:
        raise BenchError(f"{model} has no *.safetensors files: `pdserve model demo --size medium` makes some")
    found: list[tuple[str, str, list[Loaded], list[float]]] = []
    meter = _Meter(files)
    for source in sources:
        place = directory / source
        place.mkdir()
        tiers = _tiers(source, place, capacity, object_url)
        with _source(source, model, files, capacity, place, tiers) as (path, environment, before):
            for loader in _loaders(source, say):
                say(f"{source}, {loader}: {rounds} loads of {size / 1e9:.2f} GB")
                job = LoadJob(loader=loader, model_path=path, size_bytes=size)
                loads, disk = [], []
                try:
                    for _ in range(rounds):
                        loads.append(_load(job, environment, before, directory))
                        disk += meter.measure(disk=source in _OF_DISKS)
                except BenchError as error:
                    if loader in (POOL, "auto"):
                        raise
                    say(f"{source}, {loader}: not measured, it does not run here: {error}")
                    continue
                found.append((source, loader, loads, disk))
    if len({one.digest for _, _, loads, _ in found for one in loads}) > 1:
        raise BenchError("two loads gave different tensors: nothing of this is worth a figure")
    return [_figures(*one) for one in found], meter.limits()


def _figures(source: str, loader: str, loads: Sequence[Loaded], disk: Sequence[float]) -> LoadFigures:
    seconds = statistics.median(one.seconds for one in loads)
    return LoadFigures(
        source=source,
        loader=loader,
        size_bytes=loads[0].size_bytes,
        rounds=len(loads),
        seconds=round(seconds, 3),
        first_s=round(statistics.median(one.first_s for one in loads), 3),
        gbps=round(loads[0].size_bytes / seconds / 1e9, 3),
        disk_gbps=round(statistics.median(disk), 3) if disk else None,
    )


def _loaders(source: str, say: Callable[[str], None]) -> list[str]:
    if source in _OF_POOLS:
        return [POOL]
    if source == "cached":
        return ["auto"]
    for loader in LOADERS:
        if not is_installed(loader):
            say(f"{source}, {loader}: not measured, its package {LOADERS[loader]} is not installed")
    return [loader for loader in LOADERS if is_installed(loader)]


@contextmanager
def _source(
    source: str, model: Path, files: Sequence[Path], capacity: str, place: Path, tiers: list[dict[str, Any]]
) -> Iterator[tuple[str, dict[str, str], Callable[[], None]]]:
    """(model path, environment, what is done before each load)."""
    if source == "disk":
        yield str(model), {}, lambda: drop_cached(files)
        return
    if source == "cached":
        yield str(model), {}, lambda: read_through(files)
        return
    settings = {"capacity_bytes": capacity, "keep": bool(tiers), "tiers": tiers}
    with pool_of(_OF_POOLS[source], place, settings) as nodes:
        path: DataPathChoice = "tcp" if source == "tcp" else "shm"
        config = client_of(nodes, path)
        with WeightStore(config) as store:
            push(store, model, MODEL)
        environment: dict[str, str] = {}
        tell_children(config, environment)
        spool = place / TIER if source == "object" else None

        def before() -> None:
            if tiers:
                reboot(nodes[0], spool)
                drop_cached([file for file in (place / BUCKET).rglob("*") if file.is_file()])

        yield f"pdserve://{config.cluster}/{MODEL}", environment, before
        for node in nodes:
            node.stop()


def _tiers(source: str, place: Path, capacity: str, object_url: str) -> list[dict[str, Any]]:
    """Of the node's configuration."""
    if source not in _OF_TIERS:
        return []
    tier: dict[str, Any] = {
        "kind": source,
        "path": str(place / TIER),
        "capacity_bytes": capacity,
        "write": "all",
    }
    if source == "object":
        tier["options"] = {
            "url": object_url or f"file://{place / BUCKET}",
            "flush_s": 1.0,
            "spool_bytes": capacity,
        }
    return [tier]


def reboot(node: NodeProcess, spool: Path | None) -> None:
    """Once the tier has all pages of weights, start the node again without its memory. `spool`: the directory
    of segments that are not in the bucket yet. Raises BenchError.
    """
    deadline_s = time.monotonic() + STORE_TIMEOUT_S
    while not _is_stored(node) or (spool is not None and any(spool.glob("*.seg"))):
        if time.monotonic() > deadline_s:
            raise BenchError(f"{node.name}: its tier did not get all pages within {STORE_TIMEOUT_S:.0f} s")
        time.sleep(0.2)
    node.stop()
    node.forget_memory()
    node.start()


def _is_stored(node: NodeProcess) -> bool:
    try:
        spaces = [one for one in node.status().namespaces if one.name.startswith(NAMESPACE)]
    except PoolError as error:
        raise BenchError(str(error)) from error
    return all(one.tier_pages >= one.pages for one in spaces)


def _load(job: LoadJob, environment: dict[str, str], before: Callable[[], None], directory: Path) -> Loaded:
    """Raises BenchError."""
    before()
    file = directory / "job.json"
    file.write_bytes(msgspec.json.encode(job))
    command = dies_with_parent([sys.executable, "-m", "benchmarks.pool.weights_load.loading_process", file])
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LOAD_TIMEOUT_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    try:
        return msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=Loaded)
    except (IndexError, msgspec.MsgspecError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise BenchError(f"{job.loader} did not load {job.model_path}: {last}") from None


def tensor_bytes(file: Path) -> int:
    """Of all tensors of a safetensors file."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = header_bytes(opened.read(LENGTH_BYTES), size)
        tensors = parse_header(opened.read(length), size - LENGTH_BYTES - length)
    return sum(tensor.end - tensor.start for tensor in tensors)


def drop_cached(files: Sequence[Path]) -> None:
    """Take the files out of the page cache, as far as the kernel does it for this user."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_through(files: Sequence[Path]) -> None:
    """Get the files into the page cache."""
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.read(BLOCK_BYTES):
                pass


class _Meter:
    """Measures after each load, because a machine's memory and disk are not always equally fast."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._memcpy: list[float] = []
        self._fresh: list[float] = []
        self._disk: list[float] = []

    def measure(self, *, disk: bool) -> list[float]:
        """What the disk made, if it was asked for. Raises BenchError where the disk takes no direct reads."""
        self._memcpy.append(memcpy_gbps())
        self._fresh.append(memcpy_gbps(fresh=True))
        if disk or not self._disk:
            self._disk.append(disk_gbps(self._files))
        return self._disk[-1:] if disk else []

    def limits(self) -> Limits:
        """After the last load."""
        memcpy, fresh, disk = map(statistics.median, (self._memcpy, self._fresh, self._disk))
        return Limits(
            memcpy_gbps=round(memcpy, 3), memcpy_fresh_gbps=round(fresh, 3), disk_gbps=round(disk, 3)
        )


def memcpy_gbps(size_bytes: int = 256 << 20, *, fresh: bool = False) -> float:
    """Of one thread. `fresh`: the target's pages are not there."""
    source, target = np.ones(size_bytes, np.uint8), np.empty(size_bytes, np.uint8)
    if not fresh:
        target.fill(0)
    begin_s = time.perf_counter()
    np.copyto(target, source)
    return size_bytes / (time.perf_counter() - begin_s) / 1e9


def disk_gbps(files: Sequence[Path]) -> float:
    drop_cached(files)
    block = np.empty(BLOCK_BYTES + 4096, np.uint8)
    start = -block.ctypes.data % 4096  # direct reads need aligned memory
    into = block[start : start + BLOCK_BYTES].data
    done, begin_s = 0, time.perf_counter()
    for file in files:
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            raise BenchError(f"{file} cannot be read directly: {error.strerror}") from error
        try:
            at = 0
            while count := os.preadv(descriptor, [into], at):
                at += count
            done += at
        finally:
            os.close(descriptor)
    return done / (time.perf_counter() - begin_s) / 1e9
