"""`python -m benchmarks policies` and `python -m benchmarks index`."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from benchmarks.pool import index
from benchmarks.pool.policies import Cache, replay
from benchmarks.pool.traces import GENERATED, Request, multi_turn, read_trace, scanning, skewed
from benchmarks.stores import BenchError
from pdserve.errors import ConfigError
from tests.support.bench.commands import assert_refused, bench, bench_here, results


def lru_by_list(requests: list[Request], capacity: int) -> int:
    """Hits by prefix of the plainest LRU cache."""
    held: list[int] = []  # used longest ago first
    hits = 0
    for _, blocks in requests:
        missed = False
        for block in blocks:
            missed = missed or block not in held
            if not missed:
                hits += 1
                held.remove(block)
                held.append(block)
            elif block not in held:
                held.append(block)
                del held[: max(0, len(held) - capacity)]
    return hits


def test_the_replay_counts_what_a_plain_lru_cache_hits_by_prefix() -> None:
    requests = GENERATED["multi-turn"](3)[:400]
    for capacity in (50, 200, 1000):
        assert replay("t", requests, "lru", capacity).hits == lru_by_list(requests, capacity)


def test_a_cache_as_large_as_the_trace_misses_only_what_is_new_under_every_policy() -> None:
    requests: list[Request] = [(0.0, [1, 2, 3]), (1.0, [1, 2, 4]), (2.0, [2]), (3.0, [1, 9, 2])]
    for policy in ("lru", "lfu", "fifo", "arc", "ttl"):
        assert replay("t", requests, policy, 100).hits == 2 + 1 + 1


def test_pages_past_their_time_are_no_hits() -> None:
    cache = Cache("ttl", 10, ttl_s=5.0)
    assert [cache.request([1, 2], now_s) for now_s in (0.0, 4.9, 5.0)] == [0, 2, 0]


@pytest.mark.parametrize(
    "make",
    [
        partial(skewed, requests=5000, blocks=3000),
        partial(scanning, requests=5000, blocks=300, scan=750),
        partial(multi_turn, sessions=100),
    ],
)
def test_a_seed_makes_the_same_trace_in_order_of_time(make: Callable[[int], list[Request]]) -> None:
    requests = make(5)
    assert requests == make(5)
    assert requests != make(6)
    assert [now_s for now_s, _ in requests] == sorted(now_s for now_s, _ in requests)


def test_what_is_used_again_outlives_a_scan_under_arc_and_lfu_but_not_under_lru() -> None:
    requests = scanning(1, requests=20_000, blocks=1200, scan=3000)
    rates = {policy: replay("scanning", requests, policy, 2000).hit_rate for policy in ("lru", "lfu", "arc")}
    assert min(rates["arc"], rates["lfu"]) > rates["lru"] + 0.02


def test_a_trace_is_read_and_a_bad_line_is_named(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 1500, "input_length": 9, "hash_ids": [4, 5]}\n{"timestamp": 2000}\n')
    with pytest.raises(ConfigError, match="line 2"):
        read_trace(trace)
    trace.write_text(trace.read_text().splitlines()[0])
    assert read_trace(trace) == [(1.5, [4, 5])]
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "absent")


def test_policies_prints_a_table_and_one_json_object_per_figure(tmp_path: Path) -> None:
    trace = tmp_path / "my_trace.jsonl"
    trace.write_text('{"timestamp": 0, "hash_ids": [1, 2]}\n' * 4)
    options = ("--no-generated", "--trace", str(trace), "--policy", "lru,ttl", "--capacity", "1,100")
    rows = results(bench_here("policies", "--json", *options))
    assert [(row["trace"], row["policy"], row["capacity_blocks"]) for row in rows] == [
        ("my trace", policy, capacity) for policy in ("lru", "ttl") for capacity in (1, 100)
    ]
    assert [row["hit_rate"] for row in rows] == [0.0, 0.75, 0.0, 0.75]
    table = bench_here("policies", *options).stdout
    assert table.startswith("python -m benchmarks policies --no-generated")
    assert "(commit " in table.splitlines()[0]
    assert "my trace" in table
    assert "75.0" in table


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("policies", "--policy", "lruu"), "nearest is 'lru'"),
        (("policies", "--capacity", "many"), "no list of positive numbers"),
        (("index", "--pages", "0"), "no list of positive numbers"),
    ],
)
def test_bad_options_end_with_one_line(arguments: tuple[str, ...], complaint: str) -> None:
    assert_refused(complaint, *arguments)


def test_the_index_is_measured_in_a_process_of_its_own() -> None:
    [row] = results(bench("index", "--json", "--pages", "20000"))
    assert row["pages"] == 20_000
    assert 100 < row["bytes_per_page"] < 400
    assert min(row["find_ns"], row["miss_ns"], row["write_ns"]) > 0


def test_an_index_that_finds_nothing_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_write", lambda store, keys: 1)  # nothing is written
    with pytest.raises(BenchError, match="does not find what was written"):
        index.measure(100)


def test_the_kept_run_has_the_known_hit_rates_of_lru_on_the_conversation_trace() -> None:
    kept = Path(__file__).parents[3] / "pdserve" / "bench" / "results" / "policies-2026-11-21.jsonl"
    rows = [json.loads(line) for line in kept.read_text().splitlines()[1:]]
    rates = [
        r["hit_rate"] for r in rows if (r["trace"], r["policy"]) == ("mooncake conversation trace", "lru")
    ]
    assert [round(100 * rate, 1) for rate in rates] == [4.5, 6.5, 21.1, 32.6]  # measured by others before
