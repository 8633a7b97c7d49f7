"""Blocks of docs/benchmarks/router.md: the router beside other routers, and the goals it is held to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from docs.generate.benchmarks.goals import Goal, goal_table
from docs.generate.benchmarks.results import NO_RUN, Run, origin, runs
from docs.generate.markdown import table

OURS = "pdserve"
OURS_TLS = "pdserve-tls"
OURS_REDIS = "pdserve-redis"
OURS_TWO = "pdserve-two"
OURS_UNIX = "pdserve-unix"
LONG = 1000
LIMIT = 0.9
"""A load that uses more of its cores than this may be what limits the rate."""


def beside_others() -> str:
    """The newest run: a row for each number of streams and router."""
    kept = runs("router")
    if not kept:
        return NO_RUN
    columns = (
        *("streams", "router", "requests/s", "chunks/s", "first byte, added ms, p50 / p99"),
        *("chunk, added ms, p99", "CPU µs, request / chunk", "memory MB", "KB for an idle connection"),
        "processor use of the load, requests / chunks",
    )
    rows = [_cells(line) for line in kept[0].lines if line["router"] != "direct"]
    instruments = kept[0].lines[0].get("instruments", "Python")
    return f"{origin(kept[0])}- Load and mock workers: written in {instruments}\n\n{table(columns, rows)}"


def tls() -> str:
    """The newest run with and without TLS to the workers: a row for each number of streams."""
    return _second("router-tls", OURS_TLS, "TLS")


def unix() -> str:
    """The newest run with TCP and with Unix sockets to the workers: a row for each number of streams."""
    return _second("router-unix", OURS_UNIX, "Unix sockets")


def redis() -> str:
    """The newest run of a router alone, and of one that shares with another: a row for each number of
    streams.
    """
    return _second("router-redis", OURS_REDIS, "Redis")


def _second(kind: str, name: str, what: str) -> str:
    """Our router without something and with it, in the newest run of that kind."""
    kept = runs(kind)
    if not kept:
        return NO_RUN
    by_streams: dict[int, dict[str, dict[str, Any]]] = {}
    for line in kept[0].lines:
        by_streams.setdefault(line["streams"], {})[line["router"]] = line
    pairs = [(streams, found[OURS], found[name]) for streams, found in by_streams.items()]
    columns = (
        *("streams", "requests/s", f"with {what}", f"{what} / without"),
        f"CPU µs of a request, without / with {what}",
        *(f"first byte, added ms, {p}, without / with {what}" for p in ("p50", "p99")),
    )
    shown = (("cpu_us_per_request", ".0f"), ("added_ttft_ms_p50", ".1f"), ("added_ttft_ms_p99", ".1f"))
    rows = [
        (
            *(f"{streams:,}", f"{plain['rps']:,.0f}", f"{second['rps']:,.0f}"),
            f"{second['rps'] / plain['rps']:.2f}",
            *(f"{plain[figure]:{form}} / {second[figure]:{form}}" for figure, form in shown),
        )
        for streams, plain, second in pairs
        if plain["rps"] and second["rps"]
    ]
    return origin(kept[0]) + "\n" + table(columns, rows)


def other_loads() -> str:
    """The newest run under other loads: a row for each load and router."""
    kept = runs("router-others")
    if not kept:
        return NO_RUN
    columns = (
        *("load", "connections", "router", "requests/s", "CPU µs, request / chunk", "memory MB"),
        *("processor use of the load", "errors"),
    )
    rows = [_other_cells(line) for line in kept[0].lines]
    return (
        f"{origin(kept[0])}- Load and mock workers: written in {kept[0].lines[0]['instruments']}\n\n"
        + table(columns, rows)
    )


def goals() -> str:
    """Each goal, and what every kept run reached; a column for each run, with its machine."""
    kept = runs("router")
    if not kept:
        return NO_RUN
    return goal_table(GOALS, kept)


def requests_over(run: Run, other: str, streams: int) -> list[float]:
    """Requests/s of our router over those of another; empty where that was not measured."""
    over: dict[str, float] = _row(run, streams).get("rps_over", {})
    return [over[other]] if other in over else []


def _row(run: Run, streams: int) -> dict[str, Any]:
    found = (line for line in run.lines if line["router"] == OURS and line["streams"] == streams)
    return next(found, {})


def _cells(line: dict[str, Any]) -> Iterator[str]:
    yield f"{line['streams']:,}"
    yield line["router"]
    yield _shown(line, "rps", ",.0f")
    yield _shown(line, "chunks_per_s", ",.0f")
    yield f"{_shown(line, 'added_ttft_ms_p50', '.1f')} / {_shown(line, 'added_ttft_ms_p99', '.1f')}"
    yield _shown(line, "added_chunk_ms_p99", ".1f")
    yield _cpu(line)
    yield _shown(line, "rss_mb", ".0f")
    yield _shown(line, "idle_kb", ".1f")
    yield " / ".join(_share(line[of]) for of in ("load_busy", "load_busy_burst") if line.get(of) is not None)


def _other_cells(line: dict[str, Any]) -> Iterator[str]:
    yield line["load"]
    yield f"{line['connections']:,}"
    yield "pdserve, 2 processes" if line["router"] == OURS_TWO else line["router"]
    yield _shown(line, "rps", ",.0f")
    yield _cpu(line)
    yield _shown(line, "rss_mb", ".0f")
    yield _share(line["load_busy"]) if line["load_busy"] else "-"
    yield f"{line['errors']:,}"


def _shown(line: dict[str, Any], name: str, form: str) -> str:
    value = line.get(name)
    return "-" if value is None else format(value, form)


def _cpu(line: dict[str, Any]) -> str:
    return f"{_shown(line, 'cpu_us_per_request', '.0f')} / {_shown(line, 'cpu_us_per_chunk', '.0f')}"


def _share(busy: float) -> str:
    return f"{100 * busy:.0f}%{' (a limit)' if busy >= LIMIT else ''}"


def _figure(streams: int, name: str) -> Callable[[Run], list[float]]:
    def found(run: Run) -> list[float]:
        value = _row(run, streams).get(name)
        return [] if value is None else [value]

    return found


def _over(other: str, streams: int) -> Callable[[Run], list[float]]:
    return lambda run: requests_over(run, other, streams)


PEERS = ("sglang-router", "vllm-router", "smg")


def _beside(streams: int, bounds: Sequence[float]) -> Iterator[Goal]:
    """Our requests/s over those of each of `PEERS`, with its bound."""
    for peer, bound in zip(PEERS, bounds, strict=True):
        connections = "1 connection" if streams == 1 else f"{streams} connections"
        yield Goal(f"requests/s over {peer}, {connections}", _over(peer, streams), bound)


GOALS = (
    *_beside(16, (1.5, 1.5, 2)),
    *_beside(64, (1.5, 1.5, 2)),
    *_beside(1, (1, 1, 1)),
    Goal("CPU of a request in µs, 16 connections", _figure(16, "cpu_us_per_request"), 90, False, 0),
    Goal("CPU of a streamed chunk in µs, 1,000 streams", _figure(LONG, "cpu_us_per_chunk"), 15, False, 0),
    Goal("chunk delay in ms, p99, 1,000 streams", _figure(LONG, "added_chunk_ms_p99"), 15, False, 1),
    Goal("memory in MB, 1,000 streams", _figure(LONG, "rss_mb"), 100, False, 0),
    Goal("added to the first byte in ms, p50, 1 stream", _figure(1, "added_ttft_ms_p50"), 0.35, False, 3),
    Goal("added to the first byte in ms, p50, 64 streams", _figure(64, "added_ttft_ms_p50"), 1.5, False),
    Goal("added to the first byte in ms, p99, 64 streams", _figure(64, "added_ttft_ms_p99"), 10, False),
)
