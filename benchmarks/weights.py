"""How fast a model's weights are there: by SGLang's own loader from disk, and from the pool. Beside them
stand what the disk and what memory can do.

    disk        the files; the page cache is emptied of them before each load
    memory      one node of this host, by mapped memory
    tcp         the same node over TCP, as from another host; here both ends share the processors
    ssd         one node whose pages are in its SSD tier only, before each load

Each load is a fresh process that copies every tensor into memory that is there already, as a model's
parameters are.
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
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import typer
import xxhash

from benchmarks.lib.cluster import ModelOption
from benchmarks.lib.report import FormatOption, Output, Table, choices, say, script, workplace
from pdserve.errors import PoolError
from pdserve.kvpool.weights.manifest import LENGTH_BYTES, header_bytes, parse_header
from pdserve.kvpool.weights.names import ModelName
from pdserve.kvpool.weights.place import tell_children
from pdserve.kvpool.weights.push import push
from pdserve.kvpool.weights.store import NAMESPACE, WeightStore
from tests.support.kvpool.node_processes import NodeProcess, client_of, pool_of
from tests.support.processes import HarnessError

SOURCES: Final = ("disk", "memory", "tcp", "ssd")
NAME: Final = ModelName("bench")
LOAD_TIMEOUT_S: Final = 600.0
STORE_TIMEOUT_S: Final = 300.0
BLOCK_BYTES: Final = 8 << 20
COPY_BYTES: Final = 256 << 20


class Loaded(msgspec.Struct, frozen=True):
    """`seconds`: from the first request to the last byte in its place; `first_s`: to the first tensor.
    `digest`: of all tensors, the same wherever they came from.
    """

    seconds: float
    first_s: float
    size_bytes: int
    digest: str


class LoadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One line of results; medians over rounds. Rates in 10^9 bytes per second."""

    source: str
    size_bytes: int
    rounds: int
    seconds: float
    first_s: float
    gbps: float
    memcpy_gbps: float
    """Of one thread, into memory whose pages are there, between these loads."""
    fresh_gbps: float
    """The same into fresh memory."""
    disk_gbps: float
    """Direct reads of the model's files, in order, by one thread, between these loads."""


def main(
    model: ModelOption = Path("models/demo-medium"),
    sources: Annotated[str, typer.Option(help=f"Separated by commas: {', '.join(SOURCES)}.")] = ",".join(
        SOURCES
    ),
    rounds: Annotated[
        int, typer.Option(min=1, help="Loads of each kind; results are medians over them.")
    ] = 3,
    capacity: Annotated[str, typer.Option(help="Memory of the node, and of its tier.")] = "4GiB",
    format: FormatOption = "text",
) -> None:
    output = Output(format, load=model.name)
    with workplace() as directory:
        rows = measure(model, choices("sources", sources, SOURCES), rounds, capacity, directory)
    for row in rows:
        output.row(row)
    lines = [
        (
            *(row.source, f"{row.seconds:.2f}", f"{row.first_s:.3f}", f"{row.gbps:.2f}"),
            *(f"{row.gbps / gbps:.2f}" for gbps in (row.memcpy_gbps, row.fresh_gbps, row.disk_gbps)),
        )
        for row in rows
    ]
    title = f"{rows[0].size_bytes / 1e9:.2f} GB of tensors, medians of {rounds} loads"
    rates = ("GB/s", "of memcpy", "of fresh memcpy", "of the disk")
    output.show(Table(title, ("from", "s", "first tensor, s", *rates), lines, left=("from",)))


def measure(
    model: Path, sources: Sequence[str], rounds: int, capacity: str, directory: Path
) -> list[LoadFigures]:
    """Raises HarnessError, also where two loads gave different tensors."""
    files = sorted(model.glob("*.safetensors"))
    size = sum(tensor_bytes(file) for file in files)
    if not size:
        raise HarnessError(f"{model} has no *.safetensors files: tests/support/random_model.py makes some")
    found, digests = [], set()
    for source in sources:
        say(f"{source}: {rounds} loads of {size / 1e9:.2f} GB")
        loads, copies, disk = [], [], []
        with _source(source, model, files, capacity, directory) as (path, environment, before):
            for _ in range(rounds):
                before()
                loads.append(_load(path, size, environment))
                copies.append(memcpy_gbps())
                disk.append(disk_gbps(files))
        digests |= {one.digest for one in loads}
        seconds = statistics.median(one.seconds for one in loads)
        fresh, there = map(statistics.median, zip(*copies, strict=True))
        found.append(
            LoadFigures(
                source=source,
                size_bytes=size,
                rounds=rounds,
                seconds=round(seconds, 3),
                first_s=round(statistics.median(one.first_s for one in loads), 3),
                gbps=round(size / seconds / 1e9, 3),
                memcpy_gbps=round(there, 3),
                fresh_gbps=round(fresh, 3),
                disk_gbps=round(statistics.median(disk), 3),
            )
        )
    if len(digests) > 1:
        raise HarnessError("two loads gave different tensors: no figure of this is worth anything")
    return found


@contextmanager
def _source(
    source: str, model: Path, files: Sequence[Path], capacity: str, directory: Path
) -> Iterator[tuple[str, dict[str, str], Callable[[], None]]]:
    """(model path, environment, what is done before each load)."""
    if source == "disk":
        yield str(model), {}, lambda: drop_cached(files)
        return
    place = directory / source
    place.mkdir()
    tier = {"kind": "ssd", "path": str(place / "tier"), "capacity_bytes": capacity, "write": "all"}
    tiers: list[dict[str, Any]] = [tier] if source == "ssd" else []
    with pool_of(1, place, {"capacity_bytes": capacity, "keep": bool(tiers), "tiers": tiers}) as (node,):
        config = client_of([node], "tcp" if source == "tcp" else "shm")
        with WeightStore(config) as store:
            push(store, model, NAME)
        environment: dict[str, str] = {}
        tell_children(config, environment)
        yield f"pdserve://{config.cluster}/{NAME}", environment, lambda: _to_tier(node) if tiers else None
        node.stop()


def _to_tier(node: NodeProcess) -> None:
    """Once the tier has all pages of weights, start the node without its memory. Raises HarnessError."""
    deadline_s = time.monotonic() + STORE_TIMEOUT_S
    while not _is_stored(node):
        if time.monotonic() > deadline_s:
            raise HarnessError(f"{node.name}: its tier did not get all pages within {STORE_TIMEOUT_S:.0f} s")
        time.sleep(0.2)
    node.stop()
    node.forget_memory()
    node.start()


def _is_stored(node: NodeProcess) -> bool:
    try:
        spaces = [one for one in node.status().namespaces if one.name.startswith(NAMESPACE)]
    except PoolError as error:
        raise HarnessError(str(error)) from error
    return all(one.tier_pages >= one.pages for one in spaces)


def _load(path: str, size_bytes: int, environment: dict[str, str]) -> Loaded:
    """One load in a fresh process. Raises HarnessError."""
    program = "import sys; from benchmarks.weights import load; load(sys.argv[1], int(sys.argv[2]))"
    done = subprocess.run(
        [sys.executable, "-c", program, path, str(size_bytes)],
        env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=LOAD_TIMEOUT_S, check=False,
    )  # fmt: skip
    try:
        return msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=Loaded)
    except (IndexError, msgspec.MsgspecError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise HarnessError(f"{path} was not loaded: {last}") from None


def load(path: str, size_bytes: int) -> None:
    """In that process: print what a load took, as one JSON line."""
    from pdserve.engine.sglang import prepare

    prepare.choose("cpu")
    import torch

    memory = torch.ones(size_bytes, dtype=torch.uint8)  # its pages are there
    tensors = _pool_tensors(path) if path.startswith("pdserve://") else _file_tensors(Path(path))
    spans: dict[str, tuple[int, int]] = {}
    at, first_s = 0, 0.0
    begin_s = time.perf_counter()
    for name, tensor in tensors:
        first_s = first_s or time.perf_counter() - begin_s
        if size := tensor.numel() * tensor.element_size():
            memory[at : at + size].copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
        spans[name] = (at, size)
        at += size
    seconds = time.perf_counter() - begin_s
    digest = xxhash.xxh3_128()
    for name, (start, size) in sorted(spans.items()):
        digest.update(name.encode())
        digest.update(memory[start : start + size].numpy().data)
    print(msgspec.json.encode(Loaded(seconds, first_s, at, digest.hexdigest())).decode(), flush=True)


def _pool_tensors(path: str) -> Iterator[tuple[str, Any]]:
    """Nothing is read before the first one is requested; what is imported for it is imported now."""
    from pdserve.engine.model_dir import pool_model
    from pdserve.engine.sglang.pool_weights import tensors

    def of_pool() -> Iterator[tuple[str, Any]]:
        yield from tensors(pool_model(path))

    return of_pool()


def _file_tensors(directory: Path) -> Iterator[tuple[str, Any]]:
    """By SGLang's loader of `--load-format auto`."""
    from sglang.srt.model_loader import weight_utils
    from sglang.srt.model_loader.loader import DefaultModelLoader

    files = [str(path) for path in sorted(directory.glob("*.safetensors"))]
    threads = DefaultModelLoader.DEFAULT_NUM_THREADS
    return weight_utils.buffered_multi_thread_safetensors_weights_iterator(files, threads)


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


def memcpy_gbps() -> list[float]:
    """Into fresh memory, and once more, when its pages are there."""
    source, target = np.ones(COPY_BYTES, np.uint8), np.empty(COPY_BYTES, np.uint8)
    rates = []
    for _ in range(2):
        begin_s = time.perf_counter()
        np.copyto(target, source)
        rates.append(COPY_BYTES / (time.perf_counter() - begin_s) / 1e9)
    return rates


def disk_gbps(files: Sequence[Path]) -> float:
    """Raises HarnessError where the disk takes no direct reads."""
    drop_cached(files)
    block = np.empty(BLOCK_BYTES + 4096, np.uint8)
    start = -block.ctypes.data % 4096  # direct reads need aligned memory
    into = block[start : start + BLOCK_BYTES].data
    done, begin_s = 0, time.perf_counter()
    for file in files:
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            raise HarnessError(f"{file} cannot be read directly: {error.strerror}") from error
        try:
            at = 0
            while count := os.preadv(descriptor, [into], at):
                at += count
            done += at
        finally:
            os.close(descriptor)
    return done / (time.perf_counter() - begin_s) / 1e9


if __name__ == "__main__":
    script(main, __doc__)
