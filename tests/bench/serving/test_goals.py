"""The goals of the serving table, judged by what was measured."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.serving.report.goals import Row, goal_rows
from benchmarks.serving.summary import Round, Summary


def summary(contender: str, **more: Any) -> Summary:
    given: dict[str, Any] = {
        "load": "documents",
        "size": "small",
        "rounds": 3,
        "failed": 0,
        "first_turn_ms": 1000.0,
        "later_turns_ms": 1000.0,
        "later_p99_ms": None,
        "all_turns_ms": 1000.0,
        "inter_token_ms": None,
        "prompt_tokens_s": 100.0,
        "cached_share": 0.9,
        "storage_share": 0.8,
        "reusable_share": 0.99,
    }
    given |= more
    mean_ms = given.pop("mean_ms", None)
    figures = {name: given[name] for name in Round.__struct_fields__ if name != "mean_ms"}
    given["by_round"] = {0: Round(mean_ms=mean_ms, **figures)}
    return Summary(contender=contender, **given)


def measured(*found: Summary, hop_ms: float | None = None) -> dict[str, tuple[str, bool | None]]:
    rows: list[Row] = goal_rows(found, hop_ms)
    return {
        f"{row.contender}: {row.goal.partition(':')[2].split()[0]}": (row.measured, row.met) for row in rows
    }


@pytest.mark.parametrize(
    ("rate", "first_ms", "met"), [(370.0, 330.0, (True, True)), (369.0, 331.0, (False, False))]
)
def test_from_turn_2_on_the_pool_is_judged_over_plain_sglang(
    rate: float, first_ms: float, met: tuple[bool, bool]
) -> None:
    agg = summary("agg", prompt_tokens_s=rate, later_turns_ms=first_ms)
    found = measured(summary("plain"), agg)
    assert (found["agg: tokens/s"][1], found["agg: first"][1]) == met


def test_what_a_load_allows_at_most_is_said_where_it_is_little() -> None:
    plain, agg = summary("plain"), summary("agg", prompt_tokens_s=150.0, reusable_share=0.6)
    assert measured(plain, agg)["agg: tokens/s"] == ("1.50 × (all reused: about 2.5 ×)", False)


def test_the_file_backend_is_judged_with_what_came_from_storage() -> None:
    agg, file = summary("agg", later_turns_ms=810.0), summary("file", storage_share=0.5)
    assert measured(file, agg) == {"agg: first": ("0.81 × (from storage: 80 / 50 %)", False)}
    from_host = summary("file", storage_share=0.4)
    assert measured(from_host, agg) == {"agg: first": ("0.81 × (from storage: 80 / 40 %)", None)}


def test_at_a_rate_two_workers_are_judged_over_one_by_median_and_mean() -> None:
    load = {"load": "long, 0.2 requests/s", "reusable_share": 0.9}
    agg = summary("agg", all_turns_ms=300.0, mean_ms=1000.0, **load)
    disagg = summary("disagg", all_turns_ms=390.0, mean_ms=1110.0, **load)
    rows = {row.goal.partition("first token, ")[2]: row.met for row in goal_rows((agg, disagg), None)}
    assert rows["median ≤ 1.3 ×"] is True
    assert rows["mean ≤ 1.1 ×"] is False


def test_cold_prompts_are_judged_less_the_hop_and_by_all_turns() -> None:
    cold = {"reusable_share": 0.0, "size": "large", "later_turns_ms": None}
    plain = summary("plain", **cold)
    agg = summary("agg", all_turns_ms=1030.0, **cold)
    disagg = summary("disagg", all_turns_ms=1140.0, **cold)
    found = measured(plain, agg, disagg, hop_ms=60.0)
    assert found == {
        "agg: having": ("1.03 ×", True),
        "disagg: first": ("1.11 ×; 1.05 × less 60 ms of hop", True),
    }
    assert measured(agg, disagg)["disagg: first"] == ("1.11 ×; the hop's time unknown", False)


@pytest.mark.parametrize(("first_ms", "met"), [(1050.0, True), (1051.0, False)])
def test_a_dead_pool_is_judged_over_no_pool(first_ms: float, met: bool) -> None:
    cold = {"reusable_share": 0.0, "size": "large", "later_turns_ms": None}
    found = measured(summary("plain", **cold), summary("dead", all_turns_ms=first_ms, **cold))
    assert found == {"dead: first": ("1.05 ×", met)}


def test_sessions_that_fit_have_no_goal() -> None:
    plain, agg = summary("plain", size="large"), summary("agg", size="large", prompt_tokens_s=98.0)
    assert list(measured(plain, agg).values()) == [("0.98 ×, 1.00 ×", None)]


def test_where_asks_failed_no_goal_is_met_and_their_number_is_said() -> None:
    good = {"prompt_tokens_s": 400.0, "later_turns_ms": 100.0}
    plain, agg = summary("plain"), summary("agg", failed=2, **good)
    assert measured(plain, agg)["agg: tokens/s"] == (
        "4.00 ×; failed: 2 asks of agg, 0 of plain",
        None,
    )
    plain, agg = summary("plain", failed=1), summary("agg", **good)
    assert [met for _, met in measured(plain, agg).values()] == [None, None]


@pytest.mark.parametrize("share", [None, 0.0])
def test_one_that_answered_nothing_is_under_no_goal(share: float | None) -> None:
    nothing = {"all_turns_ms": None, "later_turns_ms": None, "prompt_tokens_s": None, "failed": 8}
    agg = summary("agg", reusable_share=share, cached_share=share, **nothing)
    assert goal_rows([summary("plain", reusable_share=0.0), agg], None) == []
    assert goal_rows([summary("plain", **nothing), summary("agg")], None) == []


def test_a_contender_of_which_only_first_turns_were_answered_is_not_one_with_nothing_cached() -> None:
    agg = summary("agg", reusable_share=None, later_turns_ms=None)
    assert goal_rows([summary("plain"), agg], None) == []


def test_what_was_not_measured_has_no_row() -> None:
    assert goal_rows([summary("agg"), summary("disagg")], None) == []
    failed = summary("agg", prompt_tokens_s=None, later_turns_ms=None)
    assert measured(summary("plain"), failed)["agg: tokens/s"] == ("-", False)
