"""`python -m benchmarks pool --ranks`: processes with movers, at the same time."""

from __future__ import annotations

from tests.support.bench.commands import bench, results

SHORT = ("--rounds", "1", "--pages", "256KiB", "--batch", "4", "--path", "shm", "--checksum", "on")


def test_all_ranks_move_all_their_pages() -> None:
    rows = results(
        bench("pool", "--json", *SHORT, "--ranks", "1,2", "--total", "8MiB", "--capacity", "32MiB")
    )
    assert [(row["ranks"], row["total_bytes"]) for row in rows] == [(1, 8 << 20), (2, 8 << 20)]
    for row in rows:
        assert row["memcpy_gbps"] > 0
        assert row["get_over_memcpy"] > 0
        assert row["put_over_memcpy"] > 0


def test_pages_that_are_not_moved_are_no_result() -> None:
    done = bench("pool", *SHORT, "--ranks", "1", "--total", "64MiB", "--capacity", "16MiB")
    assert done.returncode == 1
    assert "pages were not moved; the pool's capacity may be too small" in done.stderr
