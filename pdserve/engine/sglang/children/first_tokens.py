"""An answer whose first token another worker has sampled, as a scheduler goes on with it.

SGLang (0.5.23) knows requests that have output before they are computed: those that it had to take off the
device (`retracted`). It computes their prompt and output together. So a request that comes with its first
token gets that as its output before it is queued. The forward pass that computes the prompt's last tokens
then computes the second token. What the token does to the answer (its end, stop strings, text, reasoning) is
SGLang's own code, at the same place as for any token.

Its client has the token at once where the request is the next to be computed. Behind a full batch it waits
for the second one: a stream that has begun is given less time for its next piece than for its first.

Importing this module imports neither SGLang nor torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

FIRST: Final = "__pdserve_first"
"""The name among a request's `custom_params` under which its first token travels to the scheduler."""


def without_first(sampling: Any) -> Any:
    """The first token that SGLang's SamplingParams carry, which is taken out; None: they carry none."""
    said = sampling.custom_params
    if not isinstance(said, dict) or FIRST not in said:
        return None
    sampling.custom_params = {name: value for name, value in said.items() if name != FIRST} or None
    return said[FIRST]


def first_tokens_given(add: Callable[..., Any]) -> Callable[..., Any]:
    """`Scheduler._add_request_to_queue`: a request has come, or comes back."""

    @functools.wraps(add)
    def added(scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        token = without_first(req.sampling_params)
        is_given = token is not None and req.to_finish is None and not req.output_ids and not req.is_dllm()
        if is_given:
            _give(scheduler, req, token)
        result = add(scheduler, req, *args, **kwargs)
        if is_given and req.stream and req.to_finish is None and _is_next(scheduler, req):
            scheduler.output_streamer.stream_output([req], req.return_logprob)
        return result

    return added


def _give(scheduler: Any, req: Any, token: int) -> None:
    req.output_ids.append(token)
    scheduler.batch_result_processor._maybe_update_reasoning_tokens(req, token)
    req.update_finish_state()
    if req.finished():  # what ends a queued request is looked at when it was computed
        req.to_finish, req.finished_reason = req.finished_reason, None


def _is_next(scheduler: Any, req: Any) -> bool:
    """The request was queued, and all that wait are computed with the next batch, as far as can be seen."""
    waiting, running = scheduler.waiting_queue, scheduler.running_batch
    return (
        bool(waiting)
        and waiting[-1] is req
        and not running.batch_is_full
        and len(waiting) + running.batch_size() <= scheduler.max_running_requests
    )
