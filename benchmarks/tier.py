"""How fast the SSD tier writes and reads, against plain direct I/O of the same sizes in the same run.

Per round and page size, one after the other: the tier stores pages in batches, is opened anew, and loads all
of them in random order in several threads; then the same bytes go to one file in writes of a batch's size,
and come back in reads of a page's size by as many threads. Figures are medians over rounds, so that what else
the machine does hits both.
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec
import numpy as np
import typer

from benchmarks.lib.report import FormatOption, Output, Table, page_sizes, script, size_name
from pdserve.kvpool.protocol.page_bytes import checksum_page
from pdserve.kvpool.tiers import open_tier
from pdserve.kvpool.tiers.base import (
    LOADED,
    STORED,
    PageMemory,
    PageName,
    Tier,
    TierPage,
    TierSettings,
    padded,
)
from pdserve.sizes import parse_bytes
from tests.support.processes import HarnessError

Item = TypeVar("Item")
BATCH_BYTES: Final = 16 << 20
READ_BATCH_BYTES: Final = 4 << 20  # what one thread of a node loads at a time


def main(
    path: Annotated[
        Path, typer.Argument(help="A directory on the SSD; temporary ones are made and removed in it.")
    ],
    pages: Annotated[str, typer.Option(help="Page sizes, separated by commas.")] = "64KiB,1MiB,4MiB",
    size: Annotated[str, typer.Option(help="Bytes written and read per round.")] = "1GiB",
    threads: Annotated[int, typer.Option(min=1, help="Number of reading threads.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; results are medians over them.")] = 3,
    format: FormatOption = "text",
) -> None:
    sizes, total_bytes = page_sizes(pages), parse_bytes(size)
    output = Output(format)
    rows = []
    for page_bytes in sizes:
        row = measure_tier(path, page_bytes, total_bytes, threads, rounds)
        output.row(row)
        writes = (row.put_gbps, row.plain_write_gbps)
        rates = (*writes, row.load_gbps, row.plain_read_gbps)
        rows.append((size_name(page_bytes), *(f"{rate:.2f}" if rate else "-" for rate in rates)))
    columns = ("page", "put", "plain write", "load", "plain read")
    output.show(Table("SSD tier, GB/s", columns, rows))


class TierFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One line of results. Rates in 10^9 bytes per second."""

    page_bytes: int
    total_bytes: int
    threads: int
    rounds: int
    put_gbps: float
    load_gbps: float
    plain_write_gbps: float
    plain_read_gbps: float


def measure_tier(
    directory: Path, page_bytes: int, total_bytes: int, threads: int, rounds: int
) -> TierFigures:
    """Run the rounds in a directory of its own under `directory`, removed after. Raises HarnessError,
    StartupError.
    """
    where = directory / f"pdserve-bench-tier-{os.getpid()}"
    try:
        memory = _pages(page_bytes, max(1, BATCH_BYTES // page_bytes))
        rates = [
            (
                *_tier_round(where / f"tier{number}", memory, page_bytes, total_bytes, threads),
                *_plain_round(where, memory, page_bytes, total_bytes, threads),
            )
            for number in range(rounds)
        ]
    except OSError as error:
        raise HarnessError(f"cannot measure in {where}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(where, ignore_errors=True)
    put, load, write, read = (round(statistics.median(column), 3) for column in zip(*rates, strict=True))
    return TierFigures(
        page_bytes=page_bytes,
        total_bytes=total_bytes,
        threads=threads,
        rounds=rounds,
        put_gbps=put,
        load_gbps=load,
        plain_write_gbps=write,
        plain_read_gbps=read,
    )


def _tier_round(
    path: Path, memory: list[PageMemory], page_bytes: int, total_bytes: int, threads: int
) -> tuple[float, float]:
    """GB/s of putting and of loading."""
    count = total_bytes // page_bytes
    checksums = [checksum_page([page[:page_bytes]]) for page in memory]
    pages = [TierPage(1, os.urandom(32), page_bytes, checksums[n % len(memory)], n + 1) for n in range(count)]
    settings = TierSettings("bench", path, 2 * total_bytes + (1 << 30), {}, lambda names: None)
    tier = open_tier("ssd", settings)
    list(tier.scan([1]))

    def put() -> None:
        for first in range(0, count, len(memory)):
            some = pages[first : first + len(memory)]
            if tier.put(some, memory[: len(some)]).statuses != [STORED] * len(some):
                raise HarnessError(f"the tier at {path} did not take the pages: is there room?")
            tier.maintain()

    put_s = _timed(put)
    tier.close()
    tier = open_tier("ssd", settings)
    if sum(len(batch) for batch in tier.scan([1])) != count:
        raise HarnessError("the tier lost pages")
    names = [PageName(1, page.key, page_bytes) for page in pages]
    random.Random(0).shuffle(names)
    at_once = max(1, READ_BATCH_BYTES // page_bytes)
    batches = [names[first : first + at_once] for first in range(0, count, at_once)]

    def load(some: Sequence[PageName], into: Sequence[PageMemory]) -> None:
        _load(tier, some, into)

    load_s = _timed(lambda: _in_threads(threads, batches, load, page_bytes))
    tier.close()
    shutil.rmtree(path)
    return total_bytes / put_s / 1e9, total_bytes / load_s / 1e9


def _load(tier: Tier, names: Sequence[PageName], into: Sequence[PageMemory]) -> None:
    if any(result.status != LOADED for result in tier.read(names, into[: len(names)])):
        raise HarnessError("the tier did not return a page that was just put")


def _plain_round(
    where: Path, memory: list[PageMemory], page_bytes: int, total_bytes: int, threads: int
) -> tuple[float, float]:
    """GB/s of plain writes and reads."""
    path = where / "plain"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(fd, 0, total_bytes)
        size = padded(page_bytes) * len(memory)
        offsets = range(0, total_bytes - size + 1, size)

        def write() -> None:
            for offset in offsets:
                os.pwritev(fd, memory, offset)  # type: ignore[arg-type]
            os.fdatasync(fd)

        write_s = _timed(write)
        places = [offset + at * padded(page_bytes) for offset in offsets for at in range(len(memory))]
        random.Random(0).shuffle(places)
        at_once = max(1, READ_BATCH_BYTES // page_bytes)
        batches = [places[first : first + at_once] for first in range(0, len(places), at_once)]

        def read(some: Sequence[int], into: Sequence[PageMemory]) -> None:
            for place, page in zip(some, into, strict=False):
                os.preadv(fd, [page], place)  # type: ignore[list-item]

        read_s = _timed(lambda: _in_threads(threads, batches, read, page_bytes))
        moved = len(places) * padded(page_bytes)
    finally:
        os.close(fd)
        path.unlink()
    return moved / write_s / 1e9, moved / read_s / 1e9


def _in_threads(
    threads: int,
    batches: Sequence[Sequence[Item]],
    work: Callable[[Sequence[Item], Sequence[PageMemory]], None],
    page_bytes: int,
) -> None:
    def run(number: int) -> None:
        into = _pages(page_bytes, max(1, READ_BATCH_BYTES // page_bytes))
        for batch in batches[number::threads]:
            work(batch, into)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, range(threads)))


def _pages(page_bytes: int, count: int) -> list[PageMemory]:
    """Random pages in memory that is touched and on page boundaries, as an arena is."""
    size = padded(page_bytes)
    whole = np.frombuffer(mmap.mmap(-1, size * count), np.uint8)
    whole[:] = np.random.default_rng(0).integers(0, 256, whole.size, np.uint8)
    return [whole[at * size : (at + 1) * size] for at in range(count)]


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    script(main, __doc__)
