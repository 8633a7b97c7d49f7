"""`python -m benchmarks weights`: the parts of first-token time, and the pages that moved meanwhile."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.serving.contenders import Setting, contender, trace_path
from benchmarks.serving.parts import (
    Interval,
    Sample,
    bars,
    covered_ms,
    part_sums,
    shared_ms,
    weigh,
)
from benchmarks.serving.report.weights_report import plot_weights, text
from pdserve.engine.worker import WorkerConfig
from pdserve.kvpool.hicache.page_trace import VARIABLE, PageSpan, PageTrace
from pdserve.router.config.router import RouterConfig
from pdserve.router.request.timing import parse_timing, timing
from pdserve.settings.config_file import build_config

intervals = st.lists(
    st.tuples(st.integers(0, 50), st.integers(1, 20)).map(lambda pair: (pair[0], pair[0] + pair[1]))
)


def moments(spans: list[Interval]) -> set[int]:
    """The whole milliseconds that they cover."""
    return {at for start, end in spans for at in range(int(start), int(end))}


@given(intervals, intervals)
def test_time_is_counted_once_however_many_pages_move(one: list[Interval], other: list[Interval]) -> None:
    assert covered_ms(one) == len(moments(one))
    assert shared_ms(one, other) == len(moments(one) & moments(other))


def test_the_routers_header_is_read_as_it_writes_it() -> None:
    parts = {"queue": 0.001, "prefill": 0.25, "publish": 0.0305, "decode": 0.02, "router": 0.0001}
    assert parse_timing(timing(parts).decode()) == {
        "queue": 1.0,
        "prefill": 250.0,
        "publish": 30.5,
        "decode": 20.0,
        "router": 0.1,
    }
    assert parse_timing("") == {}


def test_a_workers_parts_are_added_up_over_its_processes() -> None:
    name = "pdserve_worker_first_token_seconds"
    lines = [
        f'{name}_sum{{part="compute",pid="1"}} 1.5',
        f'{name}_sum{{part="compute",pid="2"}} 0.25',
        f'{name}_bucket{{part="compute",le="0.1"}} 3.0',
        f'{name}_sum{{part="pull"}} 2e-3',
        "other_sum 4.0",
    ]
    assert part_sums("\n".join(lines)) == {"compute": 1.75, "pull": 0.002}


def sample(first_ms: float = 100.0, scale: float = 1.0) -> Sample:
    return Sample(
        turn=1,
        prompt_tokens=640,
        cached_tokens=64,
        first_token_ms=first_ms * scale,
        router={
            name: value * scale
            for name, value in {
                "queue": 1.0,
                "prefill": 60.0,
                "publish": 20.0,
                "pull": 8.0,
                "decode": 6.0,
                "router": 1.0,
            }.items()
        },
        prefill={"queue": 2.0, "pull": 3.0, "compute": 50.0},
        decode={"queue": 0.5, "pull": 8.0, "compute": 4.0},
        puts=[(51.0, 61.0), (61.0, 71.0)],
        gets=[(70.0, 74.0), (84.0, 88.0)],
    )


def test_parts_add_up_to_the_whole_and_overlap_is_told() -> None:
    found = weigh([sample()])
    assert sum(found.parts.values()) == pytest.approx(found.first_token)
    assert found.parts["client"] == pytest.approx(4.0)
    assert (found.put, found.put_hidden) == (20.0, 10.0)  # prefill ends at 61
    assert (found.get, found.get_beside_put) == (8.0, 1.0)


def test_weights_are_medians_of_each_part() -> None:
    found = weigh([sample(scale=1.0), sample(scale=3.0), sample(scale=2.0)])
    assert (found.first_token, found.parts["prefill"], found.requests) == (200.0, 120.0, 3)


def test_the_picture_lays_stages_one_after_the_other_and_worker_parts_within_theirs() -> None:
    found = bars(sample())
    stages = [bar for bar in found if bar.row == "router"]
    assert [bar.name for bar in stages] == ["queue", "prefill", "publish", "pull", "decode", "router"]
    assert all(after.start == before.end for before, after in itertools.pairwise(stages))
    inside = [bar for bar in found if bar.row == "prefill worker"]
    assert [(bar.name, bar.start, bar.end) for bar in inside] == [
        ("queue", 6.0, 8.0),
        ("pull", 8.0, 11.0),
        ("compute", 11.0, 61.0),
    ]


def test_text_and_picture_show_every_part(tmp_path: Path) -> None:
    lines = list(text(weigh([sample()])))
    for name in ("prefill", "compute", "publish", "pull", "decode", "client"):
        assert any(line.split()[0] == name for line in lines)
    assert "pages put for 20.0 ms, 50% of it while computing" in "\n".join(lines)
    picture = tmp_path / "weights.png"
    plot_weights(picture, [sample()], "one")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_workers_trace_their_pages_where_the_benchmark_looks() -> None:
    setting = Setting(model_path="/m", directory="/run/b", device_tokens=640, trace_pages=True)
    tables = contender("disagg", setting, 9000, 9001).tables
    for role in ("prefill", "decode"):
        assert tables[role][0]["env"] == {VARIABLE: trace_path(setting, "disagg", role)}
    off = contender("disagg", msgspec.structs.replace(setting, trace_pages=False), 9000, 9001).tables
    assert "env" not in off["prefill"][0]


def test_prompts_are_pulled_ahead_as_asked_for_by_settings_that_workers_and_router_know() -> None:
    setting = Setting(model_path="/m", directory="/run/b", device_tokens=640, pull_step_tokens=512)
    tables = contender("disagg", setting, 9000, 9001).tables
    worker = build_config(WorkerConfig, tables["worker"], source="worker")
    router = build_config(RouterConfig, tables["router"], source="router")
    assert (worker.pull_step_tokens, router.pull_ahead_tokens) == (512, 1024)
    usual = contender("disagg", msgspec.structs.replace(setting, pull_step_tokens=None), 9000, 9001).tables
    assert "pull_step_tokens" not in usual["worker"]


def test_a_trace_has_a_line_for_each_call_also_of_one_that_raises(tmp_path: Path) -> None:
    path = tmp_path / "pages.jsonl"
    trace = PageTrace({VARIABLE: str(path)})
    with trace.span("get", 3):
        pass
    with pytest.raises(ValueError), trace.span("put", 5):
        raise ValueError
    found = [msgspec.json.decode(line, type=PageSpan) for line in path.read_bytes().splitlines()]
    assert [(span.what, span.pages) for span in found] == [("get", 3), ("put", 5)]
    assert all(span.start_s <= span.end_s for span in found)


@pytest.mark.parametrize("environment", [{}, {VARIABLE: "/nowhere/at/all"}])
def test_without_a_file_nothing_is_traced_and_nothing_fails(environment: dict[str, str]) -> None:
    with PageTrace(environment).span("get", 1):
        pass
