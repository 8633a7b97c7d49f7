"""What SGLang says of cached tokens and times, and what the client and the router are told instead."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.http.cache_report import Found, Reuse, parse_prefilled
from pdserve.engine.http.timing import FirstToken
from pdserve.engine.sglang.answers import clipped, first_token, is_aborted, note_counts, tell_counts


@dataclass
class Output:
    """The part of SGLang's BatchStrOutput that is looked at."""

    rids: list[str]
    prompt_tokens: list[int]
    cached_tokens: list[int]
    cached_tokens_details: list[dict[str, Any] | None] | None


def knowing(reuses: dict[str, Reuse]) -> Callable[[str, int, Any], Reuse | None]:
    return lambda rid, answer_tokens, finish: reuses.get(rid)


def details(device: int, host: int, storage: int) -> dict[str, Any]:
    return {"device": device, "host": host, "storage": storage, "storage_backend": "Pool"}


def meta_of(output: Output, i: int) -> dict[str, Any]:
    """The `meta_info` that SGLang makes of one request's output."""
    meta: dict[str, Any] = {"id": output.rids[i], "cached_tokens": output.cached_tokens[i]}
    if output.cached_tokens_details:
        meta["cached_tokens_details"] = output.cached_tokens_details[i]
    return meta


def out(reuse: Reuse, rid: str, found: tuple[int, int, int]) -> tuple[int, dict[str, Any] | None]:
    """(cached tokens, details) of a prompt of 2,000 tokens as its client is told them."""
    output = Output(["other", rid], [9, 2000], [1, sum(found)], [None, details(*found)])
    before = copy.deepcopy(output)
    note_counts(output, knowing({rid: reuse}))
    answers = [{"meta_info": meta_of(output, 0)}, {"meta_info": meta_of(output, 1)}]
    tell_counts(answers, reuse)
    tell_counts(answers, reuse)
    assert output == before, "SGLang's own metrics count these"
    assert answers[0]["meta_info"] == meta_of(output, 0)
    told = answers[1]["meta_info"]
    return told["cached_tokens"], told["cached_tokens_details"]


def test_after_a_prefill_stage_the_client_is_told_what_that_stage_found() -> None:
    reuse = Reuse([Found(0, 0, 64)])
    reuse.begin(1, 1)
    reuse.sent("a")
    assert out(reuse, "a", (0, 0, 1984)) == (64, details(0, 0, 64))
    assert reuse.headers() == [(b"x-pdserve-cached", b"device=0, host=0, pool=1984, computed=16")]


def test_without_one_sglangs_own_count_stands() -> None:
    reuse = Reuse([])
    reuse.begin(1, 1)
    reuse.sent("a")
    assert reuse.headers() == []
    assert out(reuse, "a", (128, 64, 0)) == (192, details(128, 64, 0))
    assert reuse.headers() == [(b"x-pdserve-cached", b"device=128, host=64, pool=0, computed=1808")]


@pytest.mark.parametrize(("told", "said"), [([], [64, 0]), ([Found(7), Found(9)], [7, 9])])
def test_choices_do_not_count_what_their_own_request_computed(told: list[Found], said: list[int]) -> None:
    reuse = Reuse(told)
    reuse.begin(2, 3)
    for rid in ("p0", "p1"):  # SGLang computes each prompt first
        reuse.sent(rid)
    assert [out(reuse, "p0", (64, 0, 0))[0], out(reuse, "p1", (0, 0, 0))[0]] == said
    for prompt in (0, 1):
        for choice in range(3):
            reuse.sent(f"p{prompt}c{choice}")
            assert out(reuse, f"p{prompt}c{choice}", (320, 0, 0))[0] == said[prompt]
    assert reuse.by_tier() == {"device": 64, "host": 0, "pool": 0, "computed": 3936}


def test_every_prompt_of_a_batch_has_its_own_count() -> None:
    reuse = Reuse([Found(1), Found(2)])
    reuse.begin(3, 1)
    for rid in ("a", "b", "c"):
        reuse.sent(rid)
    assert reuse.by_tier() == {}
    assert out(reuse, "c", (50, 0, 0))[0] == 50
    assert reuse.by_tier() == {"device": 50, "host": 0, "pool": 0, "computed": 1950}
    assert [out(reuse, rid, (50, 0, 0))[0] for rid in ("a", "b")] == [1, 2]
    assert reuse.by_tier() == {"device": 150, "host": 0, "pool": 0, "computed": 5850}


def test_requests_that_nobody_follows_are_left_alone() -> None:
    output = Output(["a"], [9], [5], None)
    note_counts(output, knowing({}))
    unsent = Reuse([Found(1)])  # it was never sent to the scheduler
    note_counts(output, knowing({"a": unsent}))
    answers: list[dict[str, Any]] = [{"meta_info": {"id": "a", "cached_tokens": 5}}, {"text": "no meta"}]
    tell_counts(answers, unsent)
    assert answers == [{"meta_info": {"id": "a", "cached_tokens": 5}}, {"text": "no meta"}]
    note_counts(Output(["a"], [9], [], None), knowing({"a": unsent}))
    assert unsent.headers() == []


def test_a_count_without_details_is_of_the_device() -> None:
    reuse = Reuse([])
    reuse.begin(1, 1)
    reuse.sent("a")
    note_counts(Output(["a"], [9], [5], None), knowing({"a": reuse}))
    assert reuse.headers() == [(b"x-pdserve-cached", b"device=5, host=0, pool=0, computed=4")]


def test_details_are_cut_to_a_prompts_beginning() -> None:
    details = {"device": 4, "host": 3, "storage": 8, "storage_backend": "pool"}
    assert clipped(details, 99) == details
    assert clipped(details, 9) == {**details, "storage": 2}
    assert clipped(details, 5) == {**details, "host": 1, "storage": 0}
    assert clipped({"device": 4, "host": None}, 2) == {"device": 2, "host": 0}


@given(st.binary())
def test_any_bytes_can_be_the_header_of_an_earlier_stage(value: bytes) -> None:
    assert all(len(found) == 3 for found in parse_prefilled(value))
    assert parse_prefilled(b"1/2/3,4/5/6") == [Found(1, 2, 3), Found(4, 5, 6)]
    assert parse_prefilled(b"1/2/3/4/5") == parse_prefilled(b"") == []


META = {
    "queue_time": 0.5,
    "storage_prefetch_wait": 0.2,
    "forward_entry_time": 1000.0,
    "prefill_finished_time": 1000.25,
}


def test_the_wait_for_pages_is_part_of_sglangs_queue_and_told_apart() -> None:
    first = first_token([{"meta_info": META}, {"meta_info": {}}])
    assert first == FirstToken({"queue": pytest.approx(0.3), "pull": 0.2, "compute": 0.25})


@pytest.mark.parametrize("meta", [{}, {"storage_prefetch_wait": None, "queue_time": None}])
def test_what_sglang_does_not_say_is_nothing(meta: dict[str, Any]) -> None:
    assert first_token([{"meta_info": meta}]) == FirstToken({"queue": 0.0, "pull": 0.0})


def test_an_abort_is_told_from_other_ends() -> None:
    assert is_aborted({"meta_info": {"finish_reason": {"type": "abort"}}})
    for answer in (
        {},
        {"meta_info": {"finish_reason": None}},
        {"meta_info": {"finish_reason": {"type": "stop"}}},
    ):
        assert not is_aborted(answer)
