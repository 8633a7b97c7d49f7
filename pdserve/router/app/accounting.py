"""What is noted of a request that is over: metrics, and a line in the access log."""

from __future__ import annotations

import logging
from typing import Any, Final

from pdserve.router.config.slo import ServiceLevel
from pdserve.router.metrics.stats import Stats
from pdserve.router.request.call import Call

NO_LEVEL: Final = ServiceLevel()
ACCESS_LOG: Final = logging.getLogger("pdserve.router.access")


def account(call: Call, stats: Stats, now_s: float, level: ServiceLevel = NO_LEVEL) -> None:
    """Count the request."""
    answer = call.answer
    stats.in_flight -= 1
    if not answer.is_started:
        stats.requests[call.endpoint.path, "aborted"] += 1
        return
    stats.requests[call.endpoint.path, str(answer.status)] += 1
    stats.first_byte[call.endpoint.path].observe(answer.started_s - call.started_s)
    if answer.is_stream:
        for part, spent_s in call.parts_s.items():
            stats.first_token[part].observe(spent_s)
    if answer.is_complete and answer.status < 400 and call.facts.endpoint.task is not None:
        stats.model_request[call.model].observe(now_s - call.started_s)
        if answer.is_stream:
            first_s, between_s = answer.started_s - call.started_s, 0.0
            stats.model_first_token[call.model].observe(first_s)
            if (more := _tokens(call)[1] - 1) > 0:
                between_s = (now_s - answer.started_s) / more
                stats.model_inter_token[call.model].observe(between_s)
            if level.is_set:
                stats.slo_streams[call.model, level.kept(1e3 * first_s, 1e3 * between_s)] += 1


def log_access(call: Call, now_s: float) -> None:
    """Write the request's line. It holds no prompt, answer or key."""
    answer = call.answer
    prompt, output = _tokens(call)
    said: dict[str, Any] = {
        "route": call.endpoint.path,
        "status": answer.status or "aborted",
        "tenant": "" if answer.tenant is None else answer.tenant.name,
        "model": call.model,
        "stream": call.streams,
        "seconds": round(now_s - call.started_s, 4),
        "first_byte_s": round(answer.started_s - call.started_s, 4) if answer.is_started else None,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "plan": answer.plan_words.decode("ascii", "replace"),
        **{name.decode(): value.decode() for name, value in answer.worker_headers},
    }
    if call.end is not None:
        said["ended_by"] = call.end
    ACCESS_LOG.info("request", extra=said)


def _tokens(call: Call) -> tuple[int, int]:
    """Of the prompts and of the answer, as far as they are known."""
    meter = call.answer.meter
    return (0, 0) if meter is None else meter.total(call.answer.is_stream)
