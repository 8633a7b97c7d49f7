"""`python -m benchmarks pool`, end to end and in parts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.peers.sockets import WAYS, sockets_gbps
from benchmarks.peers.ucx_perftest import read_perftest
from benchmarks.plot import pool_bars
from benchmarks.pool.speed import PeerFigures, PoolFigures, Workload, _Contender, _figures
from benchmarks.stores import BenchError, PoolStore
from tests.support.bench.commands import assert_refused, bench, bench_here, results

SHORT = ("--seconds", "0", "--batch", "4", "--capacity", "64MiB")
PERFTEST_OUTPUT = """
+--------------+--------------+------------------------------+---------------------+-----------------------+
|              |              |       overhead (usec)        |   bandwidth (MB/s)  |  message rate (msg/s) |
+--------------+--------------+----------+---------+---------+----------+----------+-----------+-----------+
Final:                   953      4.366   601.937   601.937     1661.30    1600.00        1661        1661
"""


def test_each_size_and_checksum_is_a_line_with_its_peers_measured_in_the_same_rounds_and_drawn(
    tmp_path: Path,
) -> None:
    picture = tmp_path / "pool.png"
    peers = ("--peer", "mooncake", "--peer", "redis", "--plot", str(picture))
    rows = results(bench("pool", "--json", *SHORT, "--path", "shm", "--pages", "64KiB,256KiB", *peers))
    assert [(row["path"], row["checksum"], row["page_bytes"]) for row in rows] == [
        ("shm", checksum, size) for checksum in ("on", "off") for size in (65536, 262144)
    ]
    for row in rows:
        assert row["get_gbps"] > 0
        assert row["single_get_p50_us"] <= row["single_get_p99_us"]
        assert row["rounds"] >= 5
        assert set(row["peers"]) == {"mooncake", "redis"}
        assert all(peer["get_gbps"] > 0 and peer["put_gbps"] > 0 for peer in row["peers"].values())
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("missing", "extra"), [("mooncake", "bench"), ("redis", "bench"), ("matplotlib", "bench")]
)
def test_what_is_not_installed_is_named_with_how_to_install_it(
    missing: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for loaded in [name for name in sys.modules if name.startswith(f"{missing}.")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, missing, None)  # type: ignore[arg-type]  # cannot be imported
    asked = ("--plot", "x.png") if missing == "matplotlib" else ("--peer", missing)
    done = bench_here("pool", *asked)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert f"{missing} is not installed" in line
    assert f"pip install '.[{extra}]' in the checkout" in line


def test_a_library_that_mooncake_misses_is_named_with_its_package(tmp_path: Path) -> None:
    master = tmp_path / "mooncake" / "mooncake_master"
    master.parent.mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    says = "mooncake_master: error while loading shared libraries: libibverbs.so.1: cannot open shared object"
    master.write_text(f"#!/bin/sh\necho '{says}' >&2\nexit 127\n")
    master.chmod(0o755)
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    done = bench("pool", "--peer", "mooncake", PYTHONPATH=path)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert "libibverbs.so.1" in line
    assert "apt-get install libibverbs1" in line


def test_table_names_what_it_shows() -> None:
    one = ("--pages", "64KiB", "--path", "shm,ucx,tcp,tcp-tls", "--checksum", "on")
    done = bench_here("pool", *SHORT, *one)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("python -m benchmarks pool --seconds 0")
    assert "(commit " in done.stdout.splitlines()[0]
    assert "get/copy" in done.stdout
    first, *more = (line.split() for line in done.stdout.splitlines() if " 64 KiB " in line)
    assert [row[:4] for row in (first, *more)] == [
        [path, "on", "64", "KiB"] for path in ("shm", "ucx", "tcp", "tcp-tls")
    ]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--path", "rdma"), "'rdma' is not one of shm, ucx, tcp, tcp-tls"),
        (("--checksum", "maybe"), "'maybe' is not one of on, off"),
        (("--pages", "big"), "--pages:"),
        (("--capacity", "1MiB"), "holds no 4 batches"),
        (("--peer", "memcached"), "'memcached' is not one of"),
    ],
)
def test_bad_options_end_with_one_line(arguments: tuple[str, ...], complaint: str) -> None:
    assert_refused(complaint, "pool", *arguments)


def test_medians_leave_the_warm_up_out() -> None:
    workload = Workload("shm", False, 10**6, 1, 0.0, 10**9)
    slow_start = [9.0, 9.0, 9.0]
    store = PoolStore(None)  # type: ignore[arg-type]  # never called
    figures = _figures(
        workload,
        [*slow_start, 1e-3],
        _Contender(store, put_s=[*slow_start, 4e-3], get_s=[*slow_start, 2e-3]),
        {"redis": _Contender(store, put_s=[*slow_start, 10e-3], get_s=[*slow_start, 20e-3])},
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
        peers={"redis": PeerFigures(get_gbps=0.05, put_gbps=0.1)},
    )
    bars = pool_bars([figures, figures], "put", {("ucx_perftest", 10**6): 3.0})
    assert {name: by_size[10**6] for name, by_size in bars.items()} == pytest.approx(
        {"memcpy": 1.0, "pdserve, same host": 0.25, "ucx_perftest": 3.0, "redis": 0.1}
    )


@pytest.mark.parametrize("name", WAYS)
def test_plain_sockets_move_batches_by_each_way(name: str) -> None:
    assert sockets_gbps(name, 64 * 1024) > 0


def test_perftest_bandwidth_is_read_and_converted() -> None:
    assert read_perftest(PERFTEST_OUTPUT) == pytest.approx(1600 * 2**20 / 1e9, rel=1e-3)
    with pytest.raises(BenchError, match="Connection refused"):
        read_perftest("ucx_perftest: Connection refused")
