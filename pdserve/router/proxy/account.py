"""What is noted of a request that is over: metrics, a line in the access log, one in the trace of the load,
spans of its own trace.

    POST /v1/chat/completions                                        the router's first span
      queue | plan | settle | prefill | publish | first token | stream

`prefill` and `publish` are the prefill worker's work and its wait for the commit in the pool, `first token`
what the client waited for the decode worker, pulling pages included. Workers' own spans are beside them.
"""

from __future__ import annotations

import logging
import time
from time import monotonic
from typing import Any, Final

from pdserve.router.config.router import RouterConfig
from pdserve.router.metrics.stats import Stats
from pdserve.router.request.request import End, Request
from pdserve.router.request.traces import Served, TraceFile
from pdserve.tracing import Tracer

ACCESS_LOG: Final = logging.getLogger("pdserve.router.access")
_ENDS: Final[dict[End | None, str]] = {"client": "the client left", "deadline": "the deadline passed"}
STAGES: Final = ("settle", "prefill", "publish")


class Account:
    """Notes the requests of one router."""

    def __init__(
        self, config: RouterConfig, stats: Stats, trace_file: TraceFile | None, *, has_traces: bool
    ) -> None:
        """`has_traces`: some requests have a trace of their own."""
        self._stats = stats
        self._level = config.slo if config.slo.is_set else None
        self._logs_access = config.access_log
        self._trace_file = trace_file
        self._has_more = has_traces or config.slo.is_set or config.access_log or trace_file is not None

    def end(self, request: Request) -> None:
        """The request is over, in whatever way: count it."""
        stats, now_s, parts_s = self._stats, monotonic(), request.parts_s
        if not request.is_started:
            stats.requests[request.path, "aborted"] += 1
        else:
            model, is_stream, is_complete = request.model, request.is_stream, request.is_complete
            kind = request.path, request.status, model, is_stream, is_complete, tuple(parts_s)
            row = request.started_s, request.first_s, now_s, request.used[1], *parts_s.values()
            stats.answers[kind].append(row)
            stats.left -= 1
            if not stats.left:
                stats.count()
        if self._has_more:
            self._note(request, now_s)

    def _note(self, request: Request, now_s: float) -> None:
        """What is noted only where the configuration asks for it."""
        is_good = request.is_complete and request.is_stream and request.status < 400
        if self._level is not None and is_good and request.endpoint.task is not None:
            between_s = (now_s - request.first_s) / max(1, request.used[1] - 1)
            first_s = request.first_s - request.started_s
            kept = self._level.kept(1e3 * first_s, 1e3 * between_s if request.used[1] > 1 else 0.0)
            self._stats.slo_streams[request.model, kept] += 1
        if self._logs_access:
            request.name_logs()
            log_access(request, now_s)
        if self._trace_file is not None and (told := served(request, now_s)) is not None:
            self._stats.untraced += not self._trace_file.record(told)
        if request.trace is not None:
            end_trace(request, now_s)


def log_access(request: Request, now_s: float) -> None:
    """Write the request's line. It holds no prompt, answer or key."""
    prompt, output = request.used
    said: dict[str, Any] = {
        "route": request.endpoint.path,
        "status": request.status or "aborted",
        "tenant": "" if request.tenant is None else request.tenant.name,
        "model": request.model,
        "stream": request.streams,
        "seconds": round(now_s - request.started_s, 4),
        "first_byte_s": round(request.first_s - request.started_s, 4) if request.is_started else None,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "plan": request.plan_words.decode("ascii", "replace"),
        **{name.decode(): value.decode() for name, value in request.worker_headers},
    }
    if request.end is not None:
        said["ended_by"] = request.end
    ACCESS_LOG.info("request", extra=said)


def served(request: Request, now_s: float) -> Served | None:
    """What a trace of the router's load has of the request; None: nothing was generated."""
    meter, facts = request.meter, request.facts
    if (
        meter is None
        or request.endpoint.task != "generate"
        or not request.is_complete
        or request.status >= 400
    ):
        return None
    input_tokens, output_tokens = request.used
    session = facts.session
    return Served(
        at_s=time.time() - (now_s - request.started_s),
        scope=f"{'' if request.tenant is None else request.tenant.name}/{request.model}",
        prompt=request.prompt,
        body_bytes=len(request.body),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        session="" if session is None else session.links[0],
        parent="" if session is None else session.parent,
    )


def begin_trace(tracer: Tracer, request: Request) -> None:
    """The request has come."""
    request.trace = tracer.begin(
        f"POST {request.endpoint.path}",
        request.fields,
        request.started_s,
        **{"url.path": request.endpoint.path, "pdserve.request_id": request.id.decode("ascii")},
    )
    request.fields.update(request.trace.headers)
    request.set_lines()


def end_trace(request: Request, now_s: float) -> None:
    """The request is over, in whatever way."""
    trace, parts_s = request.trace, request.parts_s
    assert trace is not None
    begun_s = request.planned_s or now_s
    queued_s = parts_s.get("queue", 0.0)
    if queued_s:
        trace.part("queue", begun_s - queued_s, begun_s)
    staged_s = sum(parts_s.get(stage, 0.0) for stage in STAGES)
    asked_s = request.asked_s or begun_s + staged_s
    if request.planned_s:
        trace.part("plan", begun_s, asked_s - staged_s, words=request.plan_words.decode("ascii"))
    at_s = asked_s - staged_s  # the stages follow each other, and the decode worker is asked at once
    for stage in STAGES:
        if stage in parts_s:
            trace.part(stage, at_s, at_s + parts_s[stage])
            at_s += parts_s[stage]
    if request.asked_s:
        trace.part("first token", request.asked_s, request.first_s or now_s)
    if request.is_stream and request.first_s:
        trace.part("stream", request.first_s, now_s)
    workers = {name.decode(): value.decode() for name, value in request.worker_headers}
    trace.end(
        now_s,
        _error(request),
        **{
            "http.response.status_code": request.status or None,
            "pdserve.model": request.facts.model,
            **workers,
        },
    )


def _error(request: Request) -> str:
    if request.end in _ENDS:
        return _ENDS[request.end]
    if request.status >= 500 or not request.is_started:
        return f"status {request.status}"
    return "" if request.is_complete else "broken off"
