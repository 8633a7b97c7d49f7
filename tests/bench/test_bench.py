"""`pdserve bench pool`, end to end and in parts."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pdserve.bench.peers import read_perftest
from pdserve.bench.pool import BenchError, PoolFigures, Workload, _figures

PERFTEST_OUTPUT = """
+--------------+--------------+------------------------------+---------------------+-----------------------+
|              |              |       overhead (usec)        |   bandwidth (MB/s)  |  message rate (msg/s) |
+--------------+--------------+----------+---------+---------+----------+----------+-----------+-----------+
Final:                   953      4.366   601.937   601.937     1661.30    1600.00        1661        1661
"""


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pdserve", "bench", "pool", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


def test_json_has_one_line_per_size_path_and_checksum() -> None:
    done = bench("--json", "--pages", "64KiB,256KiB", "--seconds", "0", "--batch", "4", "--capacity", "64MiB")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["path"], row["checksum"], row["page_bytes"]) for row in rows] == [
        (path, checksum, size)
        for path in ("shm", "ucx")
        for checksum in ("on", "off")
        for size in (65536, 262144)
    ]
    for row in rows:
        assert row["get_gbps"] > 0
        assert row["get_over_memcpy"] == pytest.approx(row["get_gbps"] / row["memcpy_gbps"], rel=0.02)
        assert row["single_get_p50_us"] <= row["single_get_p99_us"]


def test_table_names_what_it_shows() -> None:
    done = bench("--pages", "64KiB", "--path", "shm", "--checksum", "on", "--seconds", "0", "--batch", "4")
    assert done.returncode == 0, done.stderr
    assert "get/copy" in done.stdout
    assert "64 KiB" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--path", "rdma"), "'rdma' is not one of shm, ucx"),
        (("--checksum", "maybe"), "'maybe' is not one of on, off"),
        (("--pages", "big"), "--pages:"),
        (("--capacity", "1MiB"), "holds no 4 batches"),
        (("--peer", "redis"), "'redis' is not one of"),
    ],
)
def test_bad_options_end_with_one_line(arguments: tuple[str, ...], complaint: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_medians_leave_the_warm_up_out() -> None:
    workload = Workload("shm", False, 10**6, 1, 0.0, 10**9)
    slow_start = [9.0, 9.0, 9.0]
    figures = _figures(
        workload,
        [*slow_start, 1e-3],
        [*slow_start, 4e-3],
        [*slow_start, 2e-3],
        [n * 1e-6 for n in range(100)],
    )
    assert figures == PoolFigures(
        path="shm",
        checksum=False,
        page_bytes=10**6,
        batch_pages=1,
        rounds=1,
        memcpy_gbps=1.0,
        get_gbps=0.5,
        put_gbps=0.25,
        get_over_memcpy=0.5,
        put_over_memcpy=0.25,
        single_get_p50_us=50.0,
        single_get_p99_us=99.0,
    )


def test_perftest_bandwidth_is_read_and_converted() -> None:
    assert read_perftest(PERFTEST_OUTPUT) == pytest.approx(1600 * 2**20 / 1e9, rel=1e-3)
    with pytest.raises(BenchError, match="Connection refused"):
        read_perftest("ucx_perftest: Connection refused")
