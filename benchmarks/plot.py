"""Results as pictures. matplotlib is an optional dependency: the extra `bench`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.stores import BenchError

if TYPE_CHECKING:
    from benchmarks.pool.speed import PoolFigures
    from benchmarks.router.measure import Row
    from benchmarks.soak.run import Sample

PATH_NAMES: Final = {
    "shm": "pdserve, same host",
    "ucx": "pdserve, UCX over TCP",
    "tcp": "pdserve, TCP",
    "tcp-tls": "pdserve, TLS",
}
COLOURS: Final = {
    "memcpy": "#b0b0b0",
    "pdserve, same host": "#1f5fa8",
    "pdserve, UCX over TCP": "#6fa8dc",
    "pdserve, TCP": "#3d8b7d",
    "pdserve, TLS": "#8fc7bb",
    "ucx_perftest": "#8a8a5c",
    "ucx_perftest_tuned": "#c2c28f",
    "sockets": "#7a9a9a",
    "sockets_two": "#9fbaba",
    "sockets_zerocopy": "#c4d6d6",
    "mooncake": "#d9822b",
    "redis": "#b04a4a",
}


def pyplot() -> Any:
    """matplotlib, drawing to files. Raises BenchError where it is missing."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise BenchError("matplotlib is not installed: pip install '.[bench]' in the checkout") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


@contextmanager
def picture(path: Path, rows: int, columns: int, title: str = "", **options: Any) -> Iterator[Any]:
    """An array of panels, shape [rows, columns], that is kept as a PNG when the block ends. Raises
    BenchError.
    """
    plt = pyplot()
    figure, axes = plt.subplots(rows, columns, squeeze=False, layout="constrained", **options)
    try:
        yield axes
        for axis in axes.flat:
            axis.spines[["top", "right"]].set_visible(False)
        if title:
            figure.suptitle(title)
        figure.savefig(path, dpi=120)
    finally:
        plt.close(figure)


def plot_pool(
    path: Path, figures: Sequence[PoolFigures], perftest_gbps: dict[tuple[str, int], float], title: str
) -> None:
    """Draw get and put by page size, one row of panels with checksums and one without, as a PNG."""
    checksums = sorted({row.checksum for row in figures}, reverse=True)
    sizes = sorted({row.page_bytes for row in figures})
    size = (12, 1 + 3.8 * len(checksums))
    with picture(path, len(checksums), 2, title, figsize=size, sharey=True) as axes:
        for checksum, panels in zip(checksums, axes, strict=True):
            rows = [row for row in figures if row.checksum == checksum]
            for operation, axis in zip(("get", "put"), panels, strict=True):
                _bars(axis, pool_bars(rows, operation, perftest_gbps), sizes)
                axis.set_title(f"{operation}, checksums {'on' if checksum else 'off'}", loc="left")
            panels[0].set_ylabel("GB/s")
        handles = {
            name: bar
            for axis in axes.flat
            for bar, name in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        axes[0, 0].figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False
        )


def pool_bars(
    rows: Sequence[PoolFigures], operation: str, perftest_gbps: dict[tuple[str, int], float]
) -> dict[str, dict[int, float]]:
    """Rates in GB/s of each contender by page size. A peer that was measured beside several of our rows has
    their mean.
    """
    seen: dict[str, dict[int, list[float]]] = {}

    def add(name: str, size: int, gbps: float) -> None:
        seen.setdefault(name, {}).setdefault(size, []).append(gbps)

    for row in rows:
        add("memcpy", row.page_bytes, row.memcpy_gbps)
    for row in rows:
        add(PATH_NAMES[row.path], row.page_bytes, getattr(row, f"{operation}_gbps"))
    for (name, size), gbps in perftest_gbps.items():
        add(name, size, gbps)
    for row in rows:
        for name, peer in row.peers.items():
            add(name, row.page_bytes, getattr(peer, f"{operation}_gbps"))
    return {
        name: {size: sum(rates) / len(rates) for size, rates in by_size.items()}
        for name, by_size in seen.items()
    }


def _bars(axis: Any, bars: dict[str, dict[int, float]], sizes: list[int]) -> None:
    width = 0.8 / max(1, len(bars))
    for place, (name, by_size) in enumerate(bars.items()):
        left = [at - 0.4 + width * (place + 0.5) for at, size in enumerate(sizes) if size in by_size]
        heights = [by_size[size] for size in sizes if size in by_size]
        drawn = axis.bar(left, heights, width * 0.92, label=name, color=COLOURS[name])
        axis.bar_label(drawn, fmt="%.1f", fontsize=7, padding=1)
    axis.set_xticks(range(len(sizes)), [f"{size_name(size)} pages" for size in sizes])
    axis.tick_params(axis="x", length=0)


def size_name(size_bytes: int) -> str:
    """A size for people: 65536 is "64 KiB"."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes % unit == 0:
            return f"{size_bytes // unit} {name}"
    return f"{size_bytes} B"


def plot_soak(path: Path, samples: Sequence[Sample], title: str) -> None:
    """Draw each process's private memory, descriptors and threads, and what nodes hold, over the minutes."""
    panels = {
        "anonymous_bytes": ("private memory, MiB", 2**20),
        "descriptors": ("open descriptors", 1),
        "threads": ("threads", 1),
        "connections": ("connections of a node", 1),
        "pins": ("pins, load held", 1),
        "reserved_bytes": ("reserved MiB, load held", 2**20),
    }
    processes = dict.fromkeys(sample.process for sample in samples)
    with picture(path, 3, 2, title, figsize=(12, 9), sharex=True) as axes:
        for axis, (what, (label, unit)) in zip(axes.flat, panels.items(), strict=True):
            for process in processes:
                mine = [sample for sample in samples if sample.process == process]
                values = [getattr(sample, what) / unit for sample in mine]
                if any(values) or what in ("pins", "reserved_bytes"):
                    axis.plot([sample.at_s / 60 for sample in mine], values, label=process, linewidth=1.2)
            axis.set_ylim(bottom=0, top=max(1.0, axis.get_ylim()[1]))
            _label(axis, label, "minutes" if axis in axes[-1] else "")
        axes[0, 0].legend(frameon=False, fontsize=8)


def plot_router(path: Path, rows: Sequence[Row]) -> None:
    """Draw what each router adds and can take, by the number of streams, as a PNG."""
    panels = {
        "rps": "requests/s",
        "chunks_per_s": "streamed chunks/s",
        "added_ttft_ms_p50": "added time to first chunk, p50, ms",
        "added_ttft_ms_p99": "added time to first chunk, p99, ms",
        "cpu_us_per_request": "processor time of a request, µs",
        "cpu_us_per_chunk": "processor time of a streamed chunk, µs",
    }
    places = list(map(str, dict.fromkeys(row.streams for row in rows)))
    with picture(path, 3, 2, figsize=(12, 10)) as axes:
        for axis, (what, label) in zip(axes.flat, panels.items(), strict=True):
            for router in dict.fromkeys(row.router for row in rows):
                mine = [row for row in rows if row.router == router and getattr(row, what) is not None]
                at = [places.index(str(row.streams)) for row in mine]
                axis.plot(at, [getattr(row, what) for row in mine], label=router, marker="o", linewidth=1.2)
            axis.set_xticks(range(len(places)), places)
            axis.set_ylim(bottom=0)
            _label(axis, label, "streams" if axis in axes[-1] else "")
        axes[0, 0].legend(frameon=False, fontsize=8)


def _label(axis: Any, title: str, below: str = "") -> None:
    axis.set_title(title, loc="left", fontsize=10)
    if below:
        axis.set_xlabel(below)
