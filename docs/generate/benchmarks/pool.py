"""Blocks of docs/benchmarks/pool.md: page transfers, and the goals they are held to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from docs.generate.benchmarks.goals import Goal, goal_table
from docs.generate.benchmarks.results import NO_RUN, Run, origin, runs
from docs.generate.markdown import table

LARGE_BYTES = 1 << 20
Lines = list[dict[str, Any]]


def speed() -> str:
    """The newest run: its origin and a row for each path, page size and checksum."""
    kept = runs("pool")
    if not kept:
        return NO_RUN
    run = kept[0]
    rows, beside = _own(run), _bandwidths(run)
    stores = list(rows[0].get("peers", {}))
    columns = (
        *("path", "page", "checksum", "memcpy GB/s", "get GB/s", "put GB/s", "get / memcpy", "put / memcpy"),
        "one page, get, p50 / p99 µs",
        *(f"{name.capitalize()} get / put GB/s" for name in stores),
        "`ucx_perftest` GB/s, its settings / ours",
        "plain sockets GB/s, one / two / zero-copy",
    )
    return origin(run) + "\n" + table(columns, (_cells(row, beside) for row in rows))


def goals() -> str:
    """Each goal, and what every kept run reached."""
    kept = runs("pool")
    if not kept:
        return NO_RUN
    return goal_table(GOALS, kept)


def control() -> str:
    """The newest run of control messages: a row for each way to a node."""
    kept = runs("control")
    if not kept:
        return NO_RUN
    columns = ("path", "messages", "round trip, p50 / p99 µs", "over TCP", "connect, p50 µs")
    rows = [
        (
            *(line["path"], f"{line['messages']:,}", f"{line['p50_us']:.0f} / {line['p99_us']:.0f}"),
            *(f"{line['over_tcp']:.2f} ×", f"{line['connect_p50_us']:,.0f}"),
        )
        for line in kept[0].lines
    ]
    return origin(kept[0]) + "\n" + table(columns, rows)


def beside() -> str:
    """The newest runs, one for each number of pages in a batch."""
    kept = runs("beside")
    if not kept:
        return NO_RUN
    columns = (
        *("batch", "path", "checksum", "way", "beside", "get GB/s", "put GB/s", "get / alone", "put / alone"),
        *("step, get: mean / p99", "step, put: mean / p99"),
    )
    rows = [_beside_cells(line) for run in kept for line in run.lines]
    return "\n".join(map(origin, kept)) + "\n" + table(columns, rows)


def _beside_cells(line: dict[str, Any]) -> tuple[str, ...]:
    def steps(what: str) -> str:
        mean, p99 = line[f"{what}_step_mean"], line[f"{what}_step_p99"]
        return f"{mean:.2f} / {p99:.2f}" if mean else ""

    return (
        *(f"{line['batch_pages']} × {line['page_bytes'] >> 20} MiB", line["path"], line["checksum"]),
        *(line["way"], line["beside"], f"{line['get_gbps']:.2f}", f"{line['put_gbps']:.2f}"),
        *(f"{line['get_over_alone']:.2f}", f"{line['put_over_alone']:.2f}", steps("get"), steps("put")),
    )


def ranks() -> str:
    """The newest run: a row for each path, checksum and number of ranks."""
    kept = runs("ranks")
    if not kept:
        return NO_RUN
    run = kept[0]
    columns = (
        *("path", "page", "checksum", "ranks", "memcpy GB/s", "get GB/s", "put GB/s"),
        *("get / memcpy", "put / memcpy"),
    )
    rows = [
        (
            *(line["path"], f"{line['page_bytes'] >> 20} MiB", line["checksum"], str(line["ranks"])),
            *(f"{line[name]:.1f}" for name in ("memcpy_gbps", "get_gbps", "put_gbps")),
            *(f"{line[name]:.2f}" for name in ("get_over_memcpy", "put_over_memcpy")),
        )
        for line in run.lines
    ]
    return origin(run) + "\n" + table(columns, rows)


def weights_load() -> str:
    """The newest run: a row for each source and loader."""
    kept = runs("weights-load")
    if not kept:
        return NO_RUN
    run = kept[0]
    loads = [line for line in run.lines if "source" in line]
    (limits,) = [line for line in run.lines if "memcpy_gbps" in line]
    if "memcpy_fresh_gbps" not in limits:  # a run of before: its target was fresh, whatever its name says
        limits = {**limits, "memcpy_fresh_gbps": limits["memcpy_gbps"], "memcpy_gbps": None}
    plain = next(
        (line["seconds"] for line in loads if (line["source"], line["loader"]) == ("disk", "auto")), None
    )
    columns = (
        "from",
        "loader",
        "s",
        "first tensor, s",
        "GB/s",
        "of memcpy",
        "of memcpy, fresh",
        "of the disk",
        "disk, auto / this",
    )
    rows = [
        (
            *(line["source"], line["loader"], f"{line['seconds']:.2f}", f"{line['first_s']:.3f}"),
            f"{line['gbps']:.2f}",
            *(
                f"{line['gbps'] / limit:.2f}" if limit else "-"
                for limit in (
                    limits["memcpy_gbps"],
                    limits["memcpy_fresh_gbps"],
                    line.get("disk_gbps") or limits["disk_gbps"],
                )
            ),
            f"{plain / line['seconds']:.1f} ×" if plain else "-",
        )
        for line in loads
    ]
    size = f"{loads[0]['size_bytes'] / 1e9:.2f} GB, medians of {loads[0]['rounds']} loads. " if loads else ""
    touched = f"{limits['memcpy_gbps']:.2f} GB/s, " if limits["memcpy_gbps"] else ""
    said = (
        f"`memcpy` {touched}into fresh memory {limits['memcpy_fresh_gbps']:.2f} GB/s; "
        f"direct reads of the disk {limits['disk_gbps']:.2f} GB/s."
    )
    return origin(run) + f"\n{size}{said}\n\n" + table(columns, rows)


def same_host(run: Run, figure: str, checksum: str = "off") -> list[float]:
    """A figure of same-host transfers of pages of 1 MiB and more."""
    return [row[figure] for row in _large(run, "shm", checksum)]


def over_perftest(run: Run, figure: str) -> list[float]:
    """UCX transfers of pages of 1 MiB and more without checksums, over `ucx_perftest` at its own settings."""
    beside = _bandwidths(run)
    return [
        row[figure] / beside[row["page_bytes"]]["ucx_perftest"]
        for row in _large(run, "ucx", "off")
        if "ucx_perftest" in beside.get(row["page_bytes"], {})
    ]


def over_sockets(run: Run, figure: str) -> list[float]:
    """Pages of 1 MiB and more over UCX and TCP without checksums, over one plain socket with cold pages."""
    beside = _bandwidths(run)
    return [
        row[figure] / beside[row["page_bytes"]]["sockets"]
        for path in ("ucx", "tcp")
        for row in _large(run, path, "off")
        if "sockets" in beside.get(row["page_bytes"], {})
    ]


def _own(run: Run) -> Lines:
    return [line for line in run.lines if "peer" not in line]


def _large(run: Run, path: str, checksum: str) -> Lines:
    return [
        row
        for row in _own(run)
        if row["path"] == path and row["checksum"] == checksum and row["page_bytes"] >= LARGE_BYTES
    ]


def _bandwidths(run: Run) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for line in run.lines:
        if "peer" in line:
            found.setdefault(line["page_bytes"], {})[line["peer"]] = line["gbps"]
    return found


def _cells(row: Mapping[str, Any], beside: Mapping[int, Mapping[str, float]]) -> Iterator[str]:
    size = row["page_bytes"]
    yield from (row["path"], f"{size // 1024} KiB", row["checksum"])
    yield from (f"{row[name]:.1f}" for name in ("memcpy_gbps", "get_gbps", "put_gbps"))
    yield from (f"{row[name]:.2f}" for name in ("get_over_memcpy", "put_over_memcpy"))
    yield f"{row['single_get_p50_us']:.0f} / {row['single_get_p99_us']:.0f}"
    for peer in row.get("peers", {}).values():
        yield f"{peer['get_gbps']:.1f} / {peer['put_gbps']:.1f}"
    bandwidths = beside.get(size, {})
    for kind, paths in (("ucx_perftest", ("ucx",)), ("sockets", ("ucx", "tcp"))):
        found = [gbps for name, gbps in bandwidths.items() if name.startswith(kind)]
        yield " / ".join(f"{gbps:.1f}" for gbps in found) if row["path"] in paths else ""


def _over_mooncake(path: str) -> Callable[[Run], list[float]]:
    def found(run: Run) -> list[float]:
        return [
            row[f"{what}_gbps"] / row["peers"]["mooncake"][f"{what}_gbps"]
            for row in _large(run, path, "off")
            if "mooncake" in row.get("peers", {})
            for what in ("get", "put")
        ]

    return found


def _one_page(figure: str) -> Callable[[Run], list[float]]:
    def found(run: Run) -> list[float]:
        rows = [row for row in _own(run) if row["path"] == "shm" and row["checksum"] == "on"]
        return [row[figure] for row in rows if row["page_bytes"] == min(one["page_bytes"] for one in rows)]

    return found


GOALS = (
    Goal("same host, no checksum: get / memcpy", lambda run: same_host(run, "get_over_memcpy"), 0.85),
    Goal("same host, no checksum: put / memcpy", lambda run: same_host(run, "put_over_memcpy"), 0.75),
    Goal("same host, with checksum: get / memcpy", lambda run: same_host(run, "get_over_memcpy", "on"), 0.5),
    Goal("same host, with checksum: put / memcpy", lambda run: same_host(run, "put_over_memcpy", "on"), 0.5),
    Goal("same host: get and put / Mooncake over TCP", _over_mooncake("shm"), 4, places=1),
    Goal("UCX: get and put / Mooncake over TCP", _over_mooncake("ucx"), 1, places=1),
    Goal("UCX: get / `ucx_perftest`", lambda run: over_perftest(run, "get_gbps"), 0.8),
    Goal("UCX: put / `ucx_perftest`", lambda run: over_perftest(run, "put_gbps"), 0.8),
    Goal("UCX and TCP: get / one plain socket", lambda run: over_sockets(run, "get_gbps"), 0.8),
    Goal("UCX and TCP: put / one plain socket", lambda run: over_sockets(run, "put_gbps"), 0.8),
    Goal("one 64 KiB page, same host, get, p50 in µs", _one_page("single_get_p50_us"), 150, False, 0),
    Goal("one 64 KiB page, same host, get, p99 in µs", _one_page("single_get_p99_us"), 1000, False, 0),
)


def codec() -> str:
    """The newest run: a row for each codec."""
    kept = runs("codec")
    if not kept:
        return NO_RUN
    run = kept[0]
    rows = [
        (line["codec"], *(f"{line[name]:.2f}" for name in ("ratio", "store_gbps", "load_gbps")))
        for line in run.lines
    ]
    return origin(run) + "\n" + table(("codec", "bytes / stored", "store, GB/s", "load, GB/s"), rows)
