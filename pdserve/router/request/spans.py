"""The spans of a request at the router, made from what the call wrote down on its way.

    POST /v1/chat/completions                                        the router's first span
      queue | plan | settle | prefill | publish | first token | stream

`prefill` and `publish` are the prefill worker's work and its wait for the commit in the pool, `first token`
what the client waited for the decode worker, pulling pages included. Workers' own spans are beside them.
"""

from __future__ import annotations

from typing import Final

from pdserve.router.request.call import Call, End
from pdserve.tracing import Tracer

_ENDS: Final[dict[End | None, str]] = {"client": "the client left", "deadline": "the deadline passed"}
STAGES = ("settle", "prefill", "publish")


def begin(tracer: Tracer, call: Call) -> None:
    """The call has come."""
    call.trace = tracer.begin(
        f"POST {call.endpoint.path}",
        call.headers,
        call.started_s,
        **{"url.path": call.endpoint.path, "pdserve.request_id": call.request_id.decode("ascii")},
    )
    call.pass_on(call.trace.headers)


def end(call: Call, now_s: float) -> None:
    """The call is over, in whatever way."""
    trace, parts_s = call.trace, call.parts_s
    assert trace is not None
    begun_s = call.planned_s or now_s
    queued_s = parts_s.get("queue", 0.0)
    if queued_s:
        trace.part("queue", begun_s - queued_s, begun_s)
    staged_s = sum(parts_s.get(stage, 0.0) for stage in STAGES)
    asked_s = call.asked_s or begun_s + staged_s
    if call.planned_s:
        trace.part("plan", begun_s, asked_s - staged_s, words=call.answer.plan_words.decode("ascii"))
    at_s = asked_s - staged_s  # the stages follow each other, and the decode worker is asked at once
    for stage in STAGES:
        if stage in parts_s:
            trace.part(stage, at_s, at_s + parts_s[stage])
            at_s += parts_s[stage]
    if call.asked_s:
        trace.part("first token", call.asked_s, call.answer.started_s or now_s)
    if call.answer.is_stream and call.answer.started_s:
        trace.part("stream", call.answer.started_s, now_s)
    workers = {name.decode(): value.decode() for name, value in call.answer.worker_headers}
    trace.end(
        now_s,
        _error(call),
        **{
            "http.response.status_code": call.answer.status or None,
            "pdserve.model": call.facts.model,
            **workers,
        },
    )


def _error(call: Call) -> str:
    if call.end in _ENDS:
        return _ENDS[call.end]
    if call.answer.status >= 500 or not call.answer.is_started:
        return f"status {call.answer.status}"
    return "" if call.answer.is_complete else "broken off"
