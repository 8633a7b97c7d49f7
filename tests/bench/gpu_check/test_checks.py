"""Which checks there are, what becomes of those that do not run, and the report."""

from __future__ import annotations

import pytest

from benchmarks.gpu_check.answers import Answer, difference
from benchmarks.gpu_check.checks import (
    GROUPS,
    NO_GPU,
    Check,
    Group,
    Result,
    chosen,
    is_good,
    missing,
    not_here,
)
from benchmarks.gpu_check.report import markdown

GROUP = Group("g", 1.0, (Check("a", "is a"), Check("b", "is b", needs_gpu=False), Check("c", "is c")))
ANSWER = Answer([5, 6, 7], [-0.1, -1.0, -2.0], [(9, -3.0), (8, -1.05), (4, -9.0)], {})


def passed(name: str) -> Result:
    return Result(check=name, outcome="passed")


def test_a_quarter_of_an_hour_has_room_for_each_group_and_names_are_unique() -> None:
    names = [check.name for group in GROUPS for check in group.checks]
    assert len(names) == len(set(names))
    assert max(group.limit_s for group in GROUPS) < 900.0


def test_groups_are_chosen_by_name_in_their_order() -> None:
    assert [group.name for group in chosen(["gaps", "machine"])] == ["machine", "gaps"]
    assert chosen([]) == GROUPS
    with pytest.raises(ValueError, match="no group of checks is named gpu: there are machine, "):
        chosen(["gpu"])


def test_without_a_gpu_its_checks_are_skipped_and_say_why() -> None:
    assert [(one.check, one.outcome, one.says) for one in not_here(GROUP)] == [
        ("a", "skipped", NO_GPU),
        ("c", "skipped", NO_GPU),
    ]


def test_a_process_that_broke_off_fails_the_check_it_was_at() -> None:
    broken = list(missing(GROUP, [passed("a")], "it did not end within 1 s"))
    assert [(one.check, one.outcome) for one in broken] == [("b", "failed"), ("c", "skipped")]
    assert broken[0].says == "it did not end within 1 s"
    assert not is_good(broken)
    assert list(missing(GROUP, [passed(name) for name in "abc"], "x")) == []


def test_the_report_has_a_row_for_each_check() -> None:
    results = [passed("cold"), Result(check="plain", outcome="failed", says="a | b\nc", seconds=2.0)]
    text = markdown({"date": "today", "commit": "abc"}, results)
    assert "today, commit abc: 1 passed, 1 failed, 0 skipped" in text
    assert "| plain | failed | 2.0 | SGLang alone serves the model | a \\| b c |" in text


@pytest.mark.parametrize(
    ("tokens", "logprobs", "said"),
    [
        ([5, 6, 7], [-0.1, -1.0, -2.0], ""),
        ([5, 6, 7], [-0.12, -1.1, -1.9], ""),
        ([5, 8, 1], [-0.1, -1.02, -4.0], ""),  # a tie went the other way
        ([9, 6, 7], [-0.1, -1.0, -2.0], "token 0 is 9, not 5"),
        ([5, 3, 7], [-0.1, -1.0, -2.0], "token 1 is 3, not 6"),
        ([5, 6, 7], [-0.1, -1.0, -2.4], "the log-probability of token 2 is 0.400 away"),
        ([5, 6], [-0.1, -1.0], "2 tokens, not 3"),
    ],
)
def test_answers_are_the_same_but_for_ties(tokens: list[int], logprobs: list[float], said: str) -> None:
    assert difference(ANSWER, Answer(tokens, logprobs, [(0, 0.0)] * len(tokens), {})) == said
