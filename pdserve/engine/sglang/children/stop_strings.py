"""The stop string that an answer is cut at, where one step of the model completes several.

OpenAI's API ends the text before the first stop string in it. SGLang 0.5.23 takes the one that comes first
in the request's list (`Req._check_str_based_finish`): with ["of France", "capital of F"] an answer "The
capital of France" kept "The capital ", in which the second one begins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

_MARK: Final = "__pdserve_earliest_stop__"


def install() -> None:
    """Have the scheduler of this process choose so; again is a no-op. Imports SGLang's requests."""
    from sglang.srt.managers.schedule_batch import FINISH_MATCHED_STR, Req

    original = Req._check_str_based_finish
    if not getattr(original, _MARK, False):
        Req._check_str_based_finish = choosing(original, FINISH_MATCHED_STR)


def choosing(check: Callable[..., Any], matched_string: Callable[[str], Any]) -> Callable[..., Any]:
    """`check`, SGLang's `Req._check_str_based_finish`, and then the choice. `matched_string` makes the
    reason of an answer that ends with a stop string.
    """

    @functools.wraps(check)
    def checked(req: Any, new_accepted_len: int = 1) -> Any:
        is_finished = check(req, new_accepted_len)
        stops = req.sampling_params.stop_strs
        found = getattr(req.finished_reason, "matched", None)
        if is_finished and len(stops) > 1 and found in stops:
            tail = req.tail_str(new_accepted_len)
            ends = {
                stop: req._locate_str_stop_finished_len(new_accepted_len, stop_str=stop)
                for stop in stops
                if stop in tail
            }
            if ends and (stop := earliest(tail, ends)) != found:
                req.finished_reason, req.finished_len = matched_string(stop), ends[stop]
        return is_finished

    setattr(checked, _MARK, True)
    return checked


def earliest(text: str, ends: dict[str, int]) -> str:
    """Of the stop strings that `text` holds the one that fewest tokens complete (`ends`: how many); of those
    that the same token completes the one that begins first.
    """
    return min(ends, key=lambda stop: (ends[stop], text.find(stop)))
