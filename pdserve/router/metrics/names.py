"""The router's Prometheus metrics: the whole list. Pure.

Label values are bounded: routes are the router's own, statuses HTTP's, reasons, outcomes, parts, tiers and
turns words of the code; workers and models as many as there are, tenants as many as the keys file names.
"""

from __future__ import annotations

from typing import Final, Literal

from pdserve.metric import Definition, Labels

PREFIX: Final = "pdserve_router_"

PARTS: Final = ("queue", "settle", "prefill", "publish", "pull", "decode", "router")
"""Of the time to a stream's first token, in their order; in sum they are all of it."""
CACHES: Final = ("device", "host", "pool")
TIERS: Final = (*CACHES, "computed")
"""Where a worker had a prompt's tokens from. pool: a pool node, of its memory or a tier below it."""


def _one(name: str, kind: Literal["counter", "gauge", "histogram"], labels: Labels, says: str) -> Definition:
    return Definition(name, kind, labels, says, PREFIX)


_OF_WORKER: Final = ("worker", "role")
_OF_TENANT: Final = ("tenant",)
METRICS: Final = (
    _one(
        "requests",
        "counter",
        ("route", "status"),
        "Answered requests. `aborted`: the client disconnected before the answer.",
    ),
    _one("requests_in_flight", "gauge", (), "Requests being answered."),
    _one(
        "time_to_first_byte_seconds",
        "histogram",
        ("route",),
        "Time from a request's arrival to the first byte of its answer; of a stream, to its first event.",
    ),
    _one(
        "first_token_seconds",
        "histogram",
        ("part",),
        "Streams: the parts of the time to the first token. queue: here; settle: for the last turn's pages; "
        "prefill: at the prefill worker, its queue too; publish: until the pages are in the pool; pull: the "
        "decode worker's wait for them; decode: its queue and the rest, and prefill where that hands over "
        "directly; router: what is left. A part that "
        "did not occur is not counted; `router` always is, so its count is that of the streams.",
    ),
    _one(
        "model_request_seconds",
        "histogram",
        ("model",),
        "Time from a request's arrival to the last byte of its answer. Answers with an error do not count.",
    ),
    _one(
        "model_first_token_seconds",
        "histogram",
        ("model",),
        "Streams: time from the request's arrival to the first token.",
    ),
    _one(
        "model_inter_token_seconds",
        "histogram",
        ("model",),
        "Streams: mean time between two tokens, one observation for each stream.",
    ),
    _one(
        "turn_tokens",
        "counter",
        ("turn", "tier"),
        "Prompt tokens by the session's turn (1, 2, 3, 4-7, 8-15, 16+, none: no session) and where the "
        "worker that computed the prompt had them from: device, host, pool, computed.",
    ),
    _one("client_aborts", "counter", ("phase",), "Requests whose client disconnected, by phase."),
    _one("stream_errors", "counter", ("reason",), "Streams ended by an error event, by reason."),
    _one(
        "placements",
        "counter",
        ("role", "reason"),
        "Requests by what decided about their worker, for each role. session: its last turn's worker; "
        "rendezvous: a first turn; overloaded, gone: that worker was left, is away; prefix: what a worker "
        "has of the prompt; cache-aware, load-aware, power-of-two, least-loaded, round-robin: load, or the "
        "turn, alone; retry: another had failed. Why there is no prefill: direct, media, no-stage, "
        "none-ready, session-worker-gone, agg; here: an elastic worker does both.",
    ),
    _one(
        "slo_streams",
        "counter",
        ("model", "outcome"),
        "Streams where there is a service level, by what was measured. met; ttft: the first token came late; "
        "itl: the tokens came too slowly; both.",
    ),
    _one(
        "workers_wanted",
        "gauge",
        ("model", "role"),
        "Workers that the load of late needs for the service level, in parts of workers, for each role in "
        "the fleet. Elastic and aggregated ones: what the others leave. Routers add up; round the sum up.",
    ),
    _one(
        "worker_prefills",
        "gauge",
        _OF_WORKER,
        "Of elastic workers. 1: its duty is to prefill; 0: to answer.",
    ),
    _one("duty_changes", "counter", ("model",), "Elastic workers that got the other duty."),
    _one("prefill", "counter", ("outcome",), "Prefill stages, by outcome."),
    _one(
        "direct",
        "counter",
        ("outcome",),
        "Direct hand-offs by outcome: ok, or which worker failed and how before another way was taken.",
    ),
    _one("settle", "counter", ("outcome",), "Waits for the pages of a session's previous turn, by outcome."),
    _one("pull_ahead", "counter", ("outcome",), "Long prompts pulled while prefill computed, by outcome."),
    _one("decode_retries", "counter", ("reason",), "Requests tried on another worker, by reason."),
    _one("streams_continued", "counter", ("reason",), "Streams continued by another worker, by reason."),
    _one("retries_refused", "counter", (), "Retries refused by the retry budget."),
    _one(
        "poisoned_requests", "counter", (), "Requests refused with 400 because they have ended two workers."
    ),
    _one(
        "nonces",
        "counter",
        (),
        "Prompts from which a line was taken out that agents change with each request.",
    ),
    _one("prompt_tokens", "counter", (), "Prompt tokens of requests to prefill workers."),
    _one(
        "prompt_cached_tokens",
        "counter",
        ("source",),
        "Prompt tokens that prefill workers found in a cache, by source.",
    ),
    _one(
        "prefill_missing_pages",
        "counter",
        (),
        "Pages not published in time, and pages of prompts with images.",
    ),
    _one("worker_requests_in_flight", "gauge", _OF_WORKER, "Requests of this router at a worker."),
    _one(
        "worker_healthy",
        "gauge",
        _OF_WORKER,
        "1: the worker's last probe said ready, and it was not refused.",
    ),
    _one("worker_draining", "gauge", _OF_WORKER, "1: the worker finishes its requests and gets no new ones."),
    _one(
        "worker_circuit_open",
        "gauge",
        _OF_WORKER,
        "1: the worker's circuit is open after too many failed requests in a row.",
    ),
    _one(
        "worker_refused",
        "gauge",
        _OF_WORKER,
        "1: the worker was refused: its model is not wanted, or its pages do not match those of others.",
    ),
    _one(
        "processes_silent",
        "gauge",
        (),
        "Router processes that did not report in time; the sums contain their older figures.",
    ),
    _one("joins_refused", "counter", (), "Workers refused when they joined."),
    _one(
        "task_failures",
        "counter",
        ("task",),
        "Failures of a background task (probes, discovery), which then begins again; each is a bug.",
    ),
    _one("sessions", "gauge", (), "Sessions in the session table."),
    _one(
        "upstream_connections",
        "counter",
        ("kind",),
        "Connections to workers, by kind: opened, reused, stale (replaced), failed.",
    ),
    _one("upstream_connections_open", "gauge", (), "Open connections to workers."),
    _one("upstream_connections_idle", "gauge", (), "Open connections to workers that no request uses."),
    _one(
        "tenant_requests",
        "counter",
        ("tenant", "outcome"),
        "Requests of a tenant: admitted, or refused with 429.",
    ),
    _one("tenant_tokens", "counter", ("tenant", "kind"), "Tokens a tenant used: prompt, output."),
    _one("tenant_running", "gauge", _OF_TENANT, "Requests of a tenant that are being answered."),
    _one("tenant_waiting", "gauge", _OF_TENANT, "Requests of a tenant that wait in the queue."),
    _one(
        "limits_apart",
        "gauge",
        (),
        "Router processes that do not hear those of other hosts by Redis, and hold a part of all limits.",
    ),
    _one("queue_wait_seconds", "histogram", (), "Time in the queue of the requests that had to wait."),
    _one("unknown_keys", "counter", (), "Requests refused with 401."),
    _one(
        "unread_keys",
        "counter",
        (),
        "Requests refused with 429 because their address has sent too many wrong keys.",
    ),
)


def turn_label(turn: int) -> str:
    """The label of a session's so manieth turn, from 1; 0: no session."""
    if turn <= 3:
        return str(turn) if turn else "none"
    return "4-7" if turn < 8 else "8-15" if turn < 16 else "16+"
