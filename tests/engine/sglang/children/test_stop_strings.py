"""SGLang's own check of stop strings, and the choice among those that one step completes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import FINISH_MATCHED_STR, Req

from pdserve.engine.sglang.children.stop_strings import choosing

WORDS = ["The", " capital", " of", " France", " is", " Paris"]


class Words:
    """A tokenizer whose token ids are numbers of words."""

    def decode(self, ids: list[int]) -> str:
        return "".join(WORDS[one] for one in ids)


def finished(stops: list[str], ids: list[int], accepted: int = 1) -> Any:
    """An SGLang request with these output tokens, the last of them new, after its check."""
    req = Req.__new__(Req)
    req.sampling_params = SimpleNamespace(
        stop_strs=stops, stop_regex_strs=[], stop_str_max_len=8, stop_regex_max_len=0
    )
    req.tokenizer, req.output_ids, req.decoded_text = Words(), ids, ""
    req.finished_reason, req.finished_len = None, None
    choosing(Req._check_str_based_finish, lambda stop: FINISH_MATCHED_STR(matched=stop))(req, accepted)
    return req


@pytest.mark.parametrize("stops", [["of France", "capital of F"], ["capital of F", "of France"]])
def test_of_stop_strings_that_one_token_completes_the_one_that_begins_first_ends_the_answer(
    stops: list[str],
) -> None:
    assert finished(stops, [0, 1, 2, 3]).finished_reason.matched == "capital of F"


def test_of_several_tokens_of_one_step_the_first_that_completes_a_stop_string_ends_the_answer() -> None:
    req = finished(["capital of France", "of", " is"], [0, 1, 2, 3, 4], accepted=4)
    assert (req.finished_reason.matched, req.finished_len) == ("of", 3)


def test_one_stop_string_is_sglangs_own_affair_and_no_stop_string_ends_nothing() -> None:
    assert finished(["Paris"], [0, 1, 2, 3, 4, 5]).finished_reason.matched == "Paris"
    assert finished(["Rome", "Oslo"], [0, 1, 2, 3, 4, 5]).finished_reason is None
