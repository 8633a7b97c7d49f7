"""`python -m benchmarks router`, end to end and in parts."""

from __future__ import annotations

import asyncio
import socket
import stat
import threading
from array import array
from pathlib import Path

import psutil
import pytest

from benchmarks.router import measure
from benchmarks.router.contenders import Server
from benchmarks.router.idle import how_many, idle_kb
from benchmarks.router.load import Load, Loaded, make_requests, run_load
from benchmarks.router.measure import Turn, rows_of, split_cores
from benchmarks.router.mock import Mock, answers
from benchmarks.stores import BenchError
from tests.support.bench.commands import assert_refused, bench_here, results

pytestmark = pytest.mark.long

SHORT = (
    *("--streams", "4", "--rounds", "1", "--seconds", "0.3"),
    *("--long-streams", "8", "--long-seconds", "0.3", "--idle", "200"),
)


def test_every_router_is_measured_beside_direct_access(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "LONG_WARM_UP_S", 0.2)
    broken = tmp_path / "smg"
    broken.write_text("#!/bin/sh\necho no such option\nexit 1\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    picture = tmp_path / "router.png"
    words = (*SHORT, "--peers", "smg,vllm-router", "--plot", str(picture))
    done = bench_here("router", "--json", *words, PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "vllm-router is not installed" in done.stderr
    assert "left out: smg did not start: no such option" in done.stderr
    rows = results(done)
    named = [(row["router"], row["streams"]) for row in rows]
    assert named == [(router, streams) for streams in (4, 8) for router in ("direct", "pdserve")]
    assert [row["errors"] for row in rows] == [0] * len(rows), rows
    keys = ["streams", "added_ttft_ms_p50", "added_ttft_ms_p99", "rps", "chunks_per_s", "rss_mb"]
    assert list(rows[0])[1:7] == keys
    for direct, ours in zip(rows[::2], rows[1::2], strict=True):
        assert direct["added_chunk_ms_p50"] is None
        assert ours["rss_mb"] > 20
    for router in ("direct", "pdserve"):
        own = [row for row in rows if row["router"] == router]
        # on a starved machine one window may pass without an answer, not all of them
        assert max(row["rps"] or 0 for row in own) > 0, own
        assert max(row["chunks_per_s"] for row in own) > 0, own
        (paced,) = (row for row in own if row["streams"] == 8)
        assert 0 < paced["chunks_per_s"] <= 2 * 8 * 20, "eight streams of 20 chunks a second each"
    assert [row["idle_kb"] is not None for row in rows] == [False, False, False, True]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("way", ["tls", "redis", "unix"])
def test_our_router_is_measured_a_second_time_in_another_way(way: str) -> None:
    words = ("--streams", "4", "--rounds", "1", "--seconds", "0.3", "--long-streams", "0")
    done = bench_here("router", "--json", *words, "--peers", "", f"--{way}")
    assert done.returncode == 0, done.stderr
    direct, plain, second = results(done)
    assert [row["router"] for row in (direct, plain, second)] == ["direct", "pdserve", f"pdserve-{way}"]
    assert [row["errors"] for row in (direct, plain, second)] == [0, 0, 0]
    assert second["rps"] > 0
    assert plain["rps_over"].keys() == {f"pdserve-{way}"}


def test_our_router_is_measured_under_other_loads_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "LONG_WARM_UP_S", 0.2)
    words = ("--rounds", "1", "--seconds", "0.3", "--long-seconds", "1.5", "--idle", "50", "--peers", "")
    done = bench_here("router", "--json", "--other-loads", "--long-streams", "20", *words)
    assert done.returncode == 0, done.stderr
    rows = results(done)
    assert [(row["load"], row["router"], row["connections"]) for row in rows] == [
        ("nothing", "pdserve", 0),
        ("idle", "pdserve", 50),
        ("idle and streams", "pdserve", 70),
        ("plain", "pdserve", 16),
        ("bodies of 128 KiB", "pdserve", 16),
        ("8 requests pipelined", "pdserve", 16),
        ("plain", "pdserve-two", 16),
    ]
    assert [row["errors"] for row in rows] == [0] * len(rows), rows
    assert all(row["rps"] > 0 and row["cpu_us_per_request"] > 0 for row in rows[3:]), rows
    assert rows[2]["cpu_us_per_chunk"] is not None
    assert rows[6]["rss_mb"] > 2 * 20, "two processes"


def test_bad_options_end_with_one_line() -> None:
    for arguments, complaint in (
        (("--streams", "many"), "--streams:"),
        (("--streams", "0"), "no list of positive numbers"),
        (("--peers", "nginx"), "'nginx' is not one of"),
    ):
        assert_refused(complaint, "router", *arguments)


def test_the_same_seed_asks_the_same() -> None:
    load = Load(streams=1, seconds=1, chunks=8, interval_us=50_000, prompt_bytes=100)
    assert make_requests(load, 1) == make_requests(load, 1)
    assert len(set(make_requests(load, 1))) > 1
    other = Load(streams=1, seconds=1, chunks=8, interval_us=50_000, prompt_bytes=100, seed=2)
    assert make_requests(load, 1) != make_requests(other, 1)


def test_a_long_prompt_has_its_length_and_differs_from_others() -> None:
    bodies = make_requests(Load(streams=1, seconds=1, prompt_bytes=128 * 1024), 1)
    assert {len(body) // 1024 for body in bodies} == {128}
    assert len({body[:300] for body in bodies}) == len(bodies)


def loaded(role: str, load: Load) -> Loaded:
    """What a mock worker of this role makes of the load."""

    async def main() -> Loaded:
        loop = asyncio.get_running_loop()
        known = answers(role)
        server = await loop.create_server(lambda: Mock(role, known, loop), "127.0.0.1", 0)
        async with server:
            return (await run_load(load, server.sockets[0].getsockname()[1], lambda: None))[0]

    return asyncio.run(main())


def test_streams_are_counted_chunk_by_chunk() -> None:
    done = loaded("decode", Load(streams=4, seconds=0.3, chunks=5, interval_us=2000, ramp_s=0.002))
    assert done.errors == 0
    assert done.requests > 0
    assert len(done.chunk_ms) >= 5 * (done.requests - 4)
    assert all(ms > 0 for ms in (*done.chunk_ms, *done.first_ms))


def test_requests_on_their_way_together_are_all_counted() -> None:
    done = loaded("decode", Load(streams=2, seconds=0.2, pipelined=4))
    assert (done.errors, done.first_error) == (0, "")
    assert done.requests > 0
    assert len(done.first_ms) == 0


def test_a_stream_with_other_chunks_than_asked_for_is_an_error() -> None:
    done = loaded("prefill", Load(streams=2, seconds=0.1, chunks=5))
    assert done.errors > 0
    assert done.requests == 0
    assert done.first_error == "status 200, 1 of 5 chunks"


def test_nobody_there_is_an_error_in_words() -> None:
    with pytest.raises(BenchError, match="no connection to port 1"):
        asyncio.run(run_load(Load(streams=1, seconds=0.1), 1, lambda: None))


def turn(phase: str, requests: int, chunk_ms: list[float], cpu_s: float, rss_mb: float | None) -> Turn:
    done = Loaded(
        first_ms=array("d", [1.0 + cpu_s * 100] * 100),
        chunk_ms=array("d", chunk_ms),
        seconds=2.0,
        requests=requests,
    )
    return Turn(phase, done, router_cpu_s=cpu_s, load_cpu_s=0.5, rss_mb=rss_mb)  # type: ignore[arg-type]


def test_figures_are_medians_of_rates_and_differences_of_percentiles() -> None:
    paced = [float(ms) for ms in range(200)]
    turns = {
        "direct": [turn("whole", 4000, [], 0, None), turn("paced", 10, paced, 0, None)],
        "pdserve": [
            *(turn("whole", count, [], 0.02, 50.0) for count in (1000, 2000, 9000)),
            turn("burst", 10, [1.0] * 600, 0.5, 52.0)._replace(load_cpu_s=1.9),
            turn("paced", 10, [ms + 3 for ms in paced], 0.01, 51.0),
        ],
        "smg": [turn("whole", 500, [], 0.5, 90.0)],
    }
    direct, ours, smg = rows_of(64, turns, load_cores=1)
    assert (direct.rps, direct.added_chunk_ms_p50, direct.rss_mb) == (2000.0, None, None)
    assert (ours.rps, ours.chunks_per_s, ours.rss_mb) == (1000.0, 300.0, 52.0)
    assert (ours.added_chunk_ms_p50, ours.added_chunk_ms_p99) == (3.0, 3.0)
    assert ours.added_ttft_ms_p50 == 1.0
    assert ours.added_whole_ms_p50 == 2.0
    assert ours.cpu_us_per_request == 5.0
    assert ours.cpu_us_per_chunk == 50.0
    assert ours.rps_over == {"smg": 4.0}
    assert (ours.load_busy, ours.load_busy_burst) == (0.25, 0.95)
    assert (direct.load_busy, direct.load_busy_burst) == (0.25, None)
    assert smg.added_ttft_ms_p50 is None


def test_the_router_has_a_core_of_its_own_where_there_are_two() -> None:
    assert split_cores({0, 1, 5}) == ({5}, {0, 1})
    assert split_cores({3}) == ({3}, {3})


def test_idle_connections_leave_room_for_workers() -> None:
    assert [how_many(10_000, most) for most in (None, 1 << 20, 20_000, 1024)] == [10_000, 10_000, 9_000, 0]


def test_a_router_that_closes_its_connections_has_no_idle_ones() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        closing = threading.Thread(target=lambda: listening.accept()[0].close())
        closing.start()
        one = Server("r", listening.getsockname()[1], (psutil.Process(),))
        assert idle_kb(one, 1) is None
        closing.join()
    assert idle_kb(one, 1) is None, "nobody is there"
    assert idle_kb(Server("direct", 1), 1) is None
