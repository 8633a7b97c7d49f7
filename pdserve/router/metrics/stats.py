"""The router's metrics: plain counters on the hot path, copied into a `Snapshot` when asked for. Pure.

A metric is declared once, as an attribute of `Stats`, which is the counter itself. Counting is a dictionary
increment; prometheus_client's own counters take a lock each and cost ten times that. A snapshot is all
metrics of a moment as one value: written by one process, added up by another, shown in Prometheus' text form.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from operator import sub
from typing import Final, NamedTuple

import msgspec

from pdserve.metric import Definition, Labels, by_name
from pdserve.router.api.endpoints import ENDPOINTS
from pdserve.router.metrics.names import counter, gauge, histogram

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
MAX_PLACEMENTS: Final = 64
"""Label values of placements; policies of other packages may have any words."""
MAX_UNCOUNTED: Final = 512
"""Requests whose observations wait to be counted."""


class Histogram(msgspec.Struct):
    """Observations in seconds: how many in each of `BUCKETS_S` and beyond, and their sum."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    sum_s: float = 0.0

    def __add__(self, other: Histogram) -> Histogram:
        counts = [one + more for one, more in zip(self.counts, other.counts, strict=True)]
        return Histogram(counts, self.sum_s + other.sum_s)

    def observe(self, value_s: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(BUCKETS_S, value_s)] += 1
        self.sum_s += value_s

    def observe_all(self, values_s: Collection[float]) -> None:
        """Count several observations, for less than one by one."""
        for at, count in Counter(map(partial(bisect_left, BUCKETS_S), values_s)).items():
            self.counts[at] += count
        self.sum_s += sum(values_s)

    def cumulative(self) -> list[tuple[str, float]]:
        """Prometheus's form: (upper bound, observations at or below it)."""
        total, rows = 0, []
        for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), self.counts, strict=True):
            total += count
            rows.append((bound, float(total)))
        return rows


Counts = defaultdict[Labels, int]
"""By the values of the labels."""
CountsOf = defaultdict[str, int]
"""By the value of the only label."""
Histograms = defaultdict[str, Histogram]
Shown = Mapping[Labels, float]
"""Kept elsewhere, and shown here (`Stats.show`)."""


class Answered(NamedTuple):
    """What requests that were answered have in common. They are counted together."""

    route: str
    status: int
    model: str
    is_stream: bool
    is_complete: bool
    parts: tuple[str, ...]
    """Names of parts of `first_token`."""


class Stats:
    """All metrics of a router process: each is declared here, and is its own counter. Of those that are kept
    elsewhere the values are those of the last `show`.
    """

    requests: Counts = counter(
        ("route", "status"), "Answered requests. `aborted`: the client disconnected before the answer."
    )
    requests_in_flight: int = gauge((), "Requests being answered.")
    first_byte: Histograms = histogram(
        ("route",),
        "Time from a request's arrival to the first byte of its answer; of a stream, to its first event.",
        name="time_to_first_byte_seconds",
    )
    first_token: Histograms = histogram(
        ("part",),
        "Streams: the parts of the time to the first token. queue: here; settle: for the last turn's "
        "pages; prefill: at the prefill worker, its queue too; publish: until the pages are in the pool; "
        "pull: the decode worker's wait for them; decode: its queue and the rest, and prefill where that "
        "hands over directly; router: what is left. A part that did not occur is not counted; `router` "
        "always is, so its count is that of the streams.",
        name="first_token_seconds",
    )
    model_request: Histograms = histogram(
        ("model",),
        "Time from a request's arrival to the last byte of its answer. Answers with an error do not count.",
        name="model_request_seconds",
    )
    model_first_token: Histograms = histogram(
        ("model",),
        "Streams: time from the request's arrival to the first token.",
        name="model_first_token_seconds",
    )
    model_inter_token: Histograms = histogram(
        ("model",),
        "Streams: mean time between two tokens, one observation for each stream.",
        name="model_inter_token_seconds",
    )
    turn_tokens: Counts = counter(
        ("turn", "tier"),
        "Prompt tokens by the session's turn (1, 2, 3, 4-7, 8-15, 16+, none: no session) and where the "
        "worker that computed the prompt had them from: device, host, pool, computed.",
    )
    client_aborts: CountsOf = counter(("phase",), "Requests whose client disconnected, by phase.")
    stream_errors: CountsOf = counter(("reason",), "Streams ended by an error event, by reason.")
    placements: Counts = counter(
        ("role", "reason"),
        "Requests by what decided about their worker, for each role. session: its last turn's worker; "
        "rendezvous: a first turn; overloaded, gone: that worker was left, is away; prefix: what a worker "
        "has of the prompt; cache-aware, load-aware, power-of-two, least-loaded, round-robin: load, or "
        "the turn, alone; retry: another had failed. Why there is no prefill: direct, media, no-stage, "
        "none-ready, session-worker-gone, agg; here: an elastic worker does both.",
    )
    slo_streams: Counts = counter(
        ("model", "outcome"),
        "Streams where there is a service level, by what was measured. met; ttft: the first token came "
        "late; itl: the tokens came too slowly; both.",
    )
    workers_wanted: Shown = gauge(
        ("model", "role"),
        "Workers that the load of late needs for the service level, in parts of workers, for each role in "
        "the fleet. Elastic and aggregated ones: what the others leave. Routers add up; round the sum up.",
    )
    worker_prefills: Shown = gauge(
        ("worker", "role"), "Of elastic workers. 1: its duty is to prefill; 0: to answer."
    )
    duty_changes: Shown = counter(("model",), "Elastic workers that got the other duty.")
    prefill: CountsOf = counter(("outcome",), "Prefill stages, by outcome.")
    direct: CountsOf = counter(
        ("outcome",),
        "Direct hand-offs by outcome: ok, or which worker failed and how before another way was taken.",
    )
    settle: CountsOf = counter(("outcome",), "Waits for the pages of a session's previous turn, by outcome.")
    pull_ahead: CountsOf = counter(("outcome",), "Long prompts pulled while prefill computed, by outcome.")
    decode_retries: CountsOf = counter(("reason",), "Requests tried on another worker, by reason.")
    continued: CountsOf = counter(
        ("reason",), "Streams continued by another worker, by reason.", name="streams_continued"
    )
    retries_refused: int = counter((), "Retries refused by the retry budget.")
    poisoned: int = counter(
        (), "Requests refused with 400 because they have ended two workers.", name="poisoned_requests"
    )
    nonces: int = counter((), "Prompts from which a line was taken out that agents change with each request.")
    prompt_tokens: int = counter((), "Prompt tokens of requests to prefill workers.")
    cached_tokens: CountsOf = counter(
        ("source",),
        "Prompt tokens that prefill workers found in a cache, by source.",
        name="prompt_cached_tokens",
    )
    missing_pages: int = counter(
        (), "Pages not published in time, and pages of prompts with images.", name="prefill_missing_pages"
    )
    worker_requests_in_flight: Shown = gauge(("worker", "role"), "Requests of this router at a worker.")
    worker_healthy: Shown = gauge(
        ("worker", "role"), "1: the worker's last probe said ready, and it was not refused."
    )
    worker_draining: Shown = gauge(
        ("worker", "role"), "1: the worker finishes its requests and gets no new ones."
    )
    worker_circuit_open: Shown = gauge(
        ("worker", "role"), "1: the worker's circuit is open after too many failed requests in a row."
    )
    worker_refused: Shown = gauge(
        ("worker", "role"),
        "1: the worker was refused: its model is not wanted, or its pages do not match those of others.",
    )
    processes_silent: int = gauge(
        (), "Router processes that did not report in time; the sums contain their older figures."
    )
    joins_refused: int = counter((), "Workers refused when they joined.")
    task_failures: CountsOf = counter(
        ("task",),
        "Failures of a background task (probes, discovery), which then begins again; each is a bug.",
    )
    sessions: int = gauge((), "Sessions in the session table.")
    upstream_connections: Shown = counter(
        ("kind",), "Connections to workers, by kind: opened, reused, stale (replaced), failed."
    )
    upstream_connections_open: int = gauge((), "Open connections to workers.")
    upstream_connections_idle: int = gauge((), "Open connections to workers that no request uses.")
    tenant_requests: Shown = counter(
        ("tenant", "outcome"), "Requests of a tenant: admitted, or refused with 429."
    )
    tenant_tokens: Shown = counter(("tenant", "kind"), "Tokens a tenant used: prompt, output.")
    tenant_running: Shown = gauge(("tenant",), "Requests of a tenant that are being answered.")
    tenant_waiting: Shown = gauge(("tenant",), "Requests of a tenant that wait in the queue.")
    limits_apart: int = gauge(
        (), "Router processes that do not hear those of other hosts by Redis, and hold a part of all limits."
    )
    untraced: int = counter(
        (),
        "Answers that are not in the file of the trace: too many waited to be written, or it is full.",
        name="untraced_requests",
    )
    queue_wait: Histogram = histogram(
        (), "Time in the queue of the requests that had to wait.", name="queue_wait_seconds"
    )
    unknown_keys: int = counter((), "Requests refused with 401.")
    unread_keys: int = counter(
        (), "Requests refused with 429 because their address has sent too many wrong keys."
    )

    def __init__(self) -> None:
        for attribute, definition in DECLARED.items():
            if definition.kind == "histogram":
                value: object = defaultdict(Histogram) if definition.labels else Histogram()
            else:
                value = defaultdict(int) if definition.labels else 0
            setattr(self, attribute, value)
        self.answers: Final[defaultdict[tuple[object, ...], list[tuple[float, ...]]]] = defaultdict(list)
        """By what `Answered` has, one row for each request: when it came, when its answer began and was over,
        the answer's tokens, and the parts. They are counted in lots: who adds one counts `left` down."""
        self.plans: Final[defaultdict[tuple[tuple[str, str], ...], int]] = defaultdict(int)
        """By what decided about the workers of requests, each (role, reason): `placements` once counted."""
        self.left = MAX_UNCOUNTED
        """Answers that may be added before `count` is called."""

    def count(self) -> None:
        """Count what was observed and not counted."""
        self.left = MAX_UNCOUNTED
        for causes, requests in self.plans.items():
            for role, reason in causes:
                self.on_placed(role, reason, requests)
        self.plans.clear()
        for kind, rows in self.answers.items():
            self._count_answers(Answered._make(kind), rows)
        self.answers.clear()

    def _count_answers(self, of: Answered, rows: Collection[tuple[float, ...]]) -> None:
        came_s, began_s, over_s, tokens, *parts_s = zip(*rows, strict=True)
        until_first_s = list(map(sub, began_s, came_s))
        has_model = of.is_complete and of.status < 400 and ENDPOINTS[of.route].task is not None
        self.requests[of.route, str(of.status)] += len(rows)
        self.first_byte[of.route].observe_all(until_first_s)
        if has_model:
            self.model_request[of.model].observe_all(list(map(sub, over_s, came_s)))
        if not of.is_stream:
            return
        for name, values_s in zip(of.parts, parts_s, strict=True):
            self.first_token[name].observe_all(values_s)
        if has_model:
            self.model_first_token[of.model].observe_all(until_first_s)
            spans = zip(map(sub, over_s, began_s), tokens, strict=True)
            self.model_inter_token[of.model].observe_all([span / (n - 1) for span, n in spans if n > 1])

    def on_placed(self, role: str, reason: str, requests: int = 1) -> None:
        """A worker of the role was chosen, or none was, for that reason."""
        key = role, reason
        if key not in self.placements and len(self.placements) >= MAX_PLACEMENTS:
            key = role, "other"
        self.placements[key] += requests

    def show(self, values: Mapping[str, Shown | int]) -> None:
        """Take over what is kept elsewhere, by the names of the attributes."""
        for attribute in values.keys() & DECLARED.keys():
            setattr(self, attribute, values[attribute])

    def snapshot(self) -> Snapshot:
        """All of them as they are now. Shares nothing with the counters."""
        self.count()
        found = Snapshot()
        for attribute, definition in DECLARED.items():
            value = getattr(self, attribute)
            by_label = value if isinstance(value, Mapping) else {(): value}
            by_labels = {key if isinstance(key, tuple) else (key,): one for key, one in by_label.items()}
            if definition.kind == "histogram":
                found.histograms[definition.name] = {key: one + Histogram() for key, one in by_labels.items()}
            else:
                found.values[definition.name] = by_labels
        return found


DECLARED: Final[Mapping[str, Definition]] = {
    attribute: one._replace(name=one.name or attribute)
    for attribute, one in vars(Stats).items()
    if isinstance(one, Definition)
}
"""By the attribute of `Stats`."""
METRICS: Final = tuple(DECLARED.values())
BY_NAME: Final = by_name(METRICS)
STATES: Final = frozenset(
    f"worker_{state}" for state in ("healthy", "draining", "circuit_open", "refused", "prefills")
) | {"sessions"}
"""Gauges that are 0 or 1, and the table that each process has whole: of several processes the largest value
counts. All other metrics add up.
"""


class Snapshot(msgspec.Struct):
    """By a metric's name in `METRICS`, then by the values of its labels."""

    values: dict[str, dict[Labels, float]] = {}
    """Counters and gauges."""
    histograms: dict[str, dict[Labels, Histogram]] = {}

    def value(self, name: str, *labels: str) -> int:
        """A counter or gauge that counts whole things; 0 where there is none."""
        return int(self.values.get(name, {}).get(labels, 0))

    def total(self, name: str) -> int:
        """The same, over all labels."""
        return int(sum(self.values.get(name, {}).values()))

    @property
    def is_whole(self) -> bool:
        """Every process of the router has answered in time."""
        return not self.value("processes_silent")


def add_up(snapshots: Iterable[Snapshot]) -> Snapshot:
    """The metrics of several processes as those of one router."""
    total = Snapshot()
    for one in snapshots:
        for name, values in one.values.items():
            sums = total.values.setdefault(name, {})
            for labels, value in values.items():
                before = sums.get(labels, 0.0)
                sums[labels] = max(before, value) if name in STATES else before + value
        for name, histograms in one.histograms.items():
            added = total.histograms.setdefault(name, {})
            for labels, one_histogram in histograms.items():
                added[labels] = added.get(labels, Histogram()) + one_histogram
    return total


def left_behind(snapshot: Snapshot) -> Snapshot:
    """What stays of a process that has ended: its counters and histograms, but no gauge."""
    counters = {name: of for name, of in snapshot.values.items() if BY_NAME[name].kind == "counter"}
    return Snapshot(counters, snapshot.histograms)
