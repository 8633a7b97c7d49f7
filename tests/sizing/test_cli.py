"""`pdserve plan`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.simulate.cli import app, parse_level
from pdserve.errors import ConfigError

RATES = [
    "--prefill-tokens-s",
    "10000",
    "--step-ms",
    "10",
    "--step-ms-per-request",
    "0.5",
    "--pool-tokens-s",
    "200000",
]
LEVEL = ["--slo", "ttft_ms=2000,itl_ms=30"]


def run(*words: str) -> str:
    result = CliRunner().invoke(app, [*words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_comparison_is_a_json_line_for_each_kind_of_fleet() -> None:
    out = run(*LEVEL, *RATES, "--turning", "--requests", "200", "--workers", "4", "--json")
    origin, *lines = map(json.loads, out.splitlines())
    assert origin["seed"] == 1
    assert [line["size"] for line in lines] == [
        {"prefill": 2, "decode": 2, "elastic": 0, "agg": 0},
        {"prefill": 0, "decode": 0, "elastic": 4, "agg": 0},
        {"prefill": 0, "decode": 0, "elastic": 0, "agg": 4},
    ]
    assert {line["what"] for line in lines} == {"compared"}
    assert all(len(line["in_time_by_part"]) == 4 for line in lines)


def test_a_trace_gets_its_advice_the_comparison_and_sizes_of_the_pool(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = (
        {
            "timestamp": 200 * n,
            "input_length": 3000,
            "output_length": 40,
            "hash_ids": [n % 5, *range(9 * n, 9 * n + 5)],
        }
        for n in range(60)
    )
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = (*LEVEL, *RATES, "--trace", str(trace), "--max-workers", "8")
    what = [json.loads(line).get("what") for line in run(*words, "--json").splitlines()]
    assert what == [None, *["advice"] * 3, *["compared"] * 3, *["pool"] * 5]
    shown = run(*words, "--kv-bytes-per-token", "100000")
    assert "in time" in shown
    assert "GiB" in shown


def test_a_level_is_one_of_two_times_or_both() -> None:
    level = parse_level("ttft_ms=2000, itl_ms=50")
    assert (level.ttft_ms, level.itl_ms) == (2000, 50)
    assert parse_level("itl_ms=50").ttft_ms == 0
    for text in ("", "ttft_ms", "ttft_ms=x", "ttft_ms=0", "tpot_ms=3", "ttft_ms=-1", "ttft_ms=5,dwell_s=3"):
        with pytest.raises(ConfigError, match="--slo"):
            parse_level(text)


def test_one_load_is_needed() -> None:
    for words in ([], ["--turning", "--trace", "x"]):
        with pytest.raises(ConfigError, match="which load"):
            run(*LEVEL, *RATES, *words)
