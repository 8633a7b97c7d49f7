"""Requests that come to a scheduler with the first token of their answer: SGLang's own requests, beside a
scheduler in small.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_params import SamplingParams

from pdserve.engine.sglang.children.first_tokens import FIRST, first_tokens_given, without_first

PROMPT = [1, 2, 3]
TOKEN, END = 7, 9
WORDS = {4: " b", TOKEN: "wo", 8: "rd", END: ""}


class Tokenizer:
    """A word a token."""

    eos_token_id = END
    additional_stop_token_ids = None

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(WORDS[one] for one in ids)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [4] * len(text)


@dataclass
class Batch:
    """Of requests that run."""

    running: int = 0
    batch_is_full: bool = False

    def batch_size(self) -> int:
        return self.running


@dataclass
class Scheduler:
    """What is touched of SGLang's."""

    max_running_requests: int = 4
    running_batch: Batch = field(default_factory=Batch)
    waiting_queue: list[Any] = field(default_factory=list)
    output_streamer: Any = None
    batch_result_processor: Any = None
    is_queue_full: bool = False
    streamed: list[tuple[Req, list[int]]] = field(default_factory=list)
    reasoned: list[int] = field(default_factory=list)
    looked_up: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        def stream(reqs: list[Req], _: bool) -> None:
            self.streamed += [(one, list(one.output_ids)) for one in reqs]

        def reason(_: Req, token: int) -> None:
            self.reasoned.append(token)

        self.output_streamer = SimpleNamespace(stream_output=stream)
        self.batch_result_processor = SimpleNamespace(_maybe_update_reasoning_tokens=reason)

    def add(self, req: Req, is_retracted: bool = False) -> None:
        if self.is_queue_full:
            return
        req.init_next_round_input()
        self.looked_up.append(list(req.full_untruncated_fill_ids))
        self.waiting_queue.append(req)


add: Callable[..., Any] = first_tokens_given(Scheduler.add)


def request(token: int | None = TOKEN, *, stream: bool = True, **sampling: Any) -> Req:
    params = SamplingParams(max_new_tokens=8, **sampling)
    params.normalize(Tokenizer())
    if token is not None:
        params.custom_params = {FIRST: token, "other": 1}
    made = Req("r", "", array("q", PROMPT), params, stream=stream, eos_token_ids={END}, vocab_size=16)
    made.tokenizer = Tokenizer()
    return made


def computed(req: Req, token: int) -> tuple[list[int], Any]:
    """What a forward pass samples is added, as SGLang does it: the answer so far, and why it has ended."""
    req.output_ids.append(token)
    req.update_finish_state()
    return list(req.output_ids_through_stop), req.finished_reason and req.finished_reason.to_json()


def test_the_token_is_the_answers_first_when_the_pool_is_asked_and_leaves_at_once() -> None:
    scheduler, req = Scheduler(), request()
    add(scheduler, req)
    assert scheduler.looked_up == [[*PROMPT, TOKEN]], "the last page is looked up where the prompt fills it"
    assert scheduler.streamed == [(req, [TOKEN])]
    assert scheduler.reasoned == [TOKEN]
    assert req.sampling_params.custom_params == {"other": 1}
    assert computed(req, 8) == ([TOKEN, 8], None)


def test_a_request_without_one_and_one_that_comes_back_are_as_they_were() -> None:
    scheduler, plain, back = Scheduler(), request(None), request()
    add(scheduler, plain)
    add(scheduler, back)
    computed(back, 8)
    add(scheduler, back, is_retracted=True)
    assert scheduler.streamed == [(back, [TOKEN])]
    assert scheduler.looked_up == [PROMPT, [*PROMPT, TOKEN], [*PROMPT, TOKEN, 8]]


def test_a_token_that_ends_the_answer_is_all_of_it_once_it_was_computed() -> None:
    for ends, reason in (
        ({}, {"type": "stop", "matched": END}),
        ({"stop_token_ids": [TOKEN]}, {"type": "stop", "matched": TOKEN}),
        ({"stop": ["wo"]}, {"type": "stop", "matched": "wo"}),
    ):
        scheduler, req = Scheduler(), request(TOKEN if ends else END, **ends)
        add(scheduler, req)
        assert not req.finished(), "a queued request that has ended is never computed, and never answered"
        assert scheduler.streamed == []
        assert computed(req, 8) == ([TOKEN if ends else END], reason)


def test_a_stop_string_may_begin_in_the_first_token() -> None:
    scheduler, req = Scheduler(), request(stop=["word"])
    add(scheduler, req)
    assert computed(req, 8) == ([TOKEN, 8], {"type": "stop", "matched": "word"})


def test_nothing_leaves_early_where_other_requests_are_computed_first_or_nobody_reads_a_stream() -> None:
    busy = [
        Scheduler(running_batch=Batch(batch_is_full=True)),
        Scheduler(running_batch=Batch(4)),
        Scheduler(waiting_queue=[None] * 4),
        Scheduler(is_queue_full=True, waiting_queue=[request()]),
        Scheduler(is_queue_full=True),
    ]
    for scheduler in busy:
        add(scheduler, request())
        assert scheduler.streamed == []
    idle = Scheduler()
    add(idle, request(stream=False))
    assert idle.streamed == []
    last = Scheduler(waiting_queue=[None], running_batch=Batch(2))
    add(last, request())
    assert len(last.streamed) == 1


def test_an_aborted_request_gets_none() -> None:
    scheduler, req = Scheduler(), request()
    req.to_finish = FINISH_ABORT("too long")
    add(scheduler, req)
    assert (list(req.output_ids), scheduler.streamed) == ([], [])


def test_a_client_cannot_say_one() -> None:
    params = SamplingParams(custom_params={FIRST: 10**9})
    assert without_first(params) == 10**9
    assert params.custom_params is None
    assert without_first(params) is None
