"""Frames from samples: what the live page and `pdserve top` show."""

from __future__ import annotations

import pytest

from pdserve.kvpool.admin.sampling import Rates, Row
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import NamespaceSettings
from pdserve.router.admin.live_frames import frame_of, point_of, quantile
from pdserve.router.fleet.worker import Worker
from pdserve.router.metrics.stats import Histogram, Snapshot


def observed(*values_s: float) -> Histogram:
    histogram = Histogram()
    for value_s in values_s:
        histogram.observe(value_s)
    return histogram


BEFORE = Snapshot(
    {"requests": {("/a", "200"): 10}, "turn_tokens": {("1", "pool"): 100}},
    {"first_token_seconds": {("decode",): observed(1.0), ("router",): observed(0.0)}},
)
NOW = Snapshot(
    {
        "requests": {("/a", "200"): 14, ("/b", "502"): 2},
        "stream_errors": {("timeout",): 2},
        "requests_in_flight": {(): 3},
        "worker_requests_in_flight": {("ready:1", "decode"): 12},
        "tenant_waiting": {("t",): 4},
        "sessions": {(): 5},
        "turn_tokens": {("1", "pool"): 140, ("2", "pool"): 60, ("2", "computed"): 20},
    },
    {
        "first_token_seconds": {
            ("decode",): observed(1.0, 0.5, 0.5),
            ("pull",): observed(0.25, 0.25),
            ("router",): observed(0.0, 0.0, 0.0),
        }
    },
)


def test_a_point_is_the_growth_between_two_samples() -> None:
    point = point_of(BEFORE, NOW, 2.0, 99.0)
    assert (point.at_s, point.requests_s, point.failed_s, point.in_flight) == (99.0, 3.0, 2.0, 3)
    assert point.parts_s == {"pull": 0.25, "decode": 0.5}
    assert point.tokens_s == {"pool": 50.0, "computed": 10.0}
    assert point.first_byte_p50_s is None


def test_a_counter_that_fell_counts_from_zero() -> None:
    before = Snapshot({"requests": {("/a", "200"): 1000}})
    assert point_of(before, BEFORE, 1.0, 0.0).requests_s == 10


@pytest.mark.parametrize(
    ("values_s", "share", "expected"),
    [
        ([], 0.5, None),
        ([0.0005] * 10, 0.5, 0.0005),
        ([0.0015] * 10, 0.9, 0.001 + 0.9 * 0.0015),
        ([0.3] * 5 + [3.0] * 5, 0.8, 2.5 + 0.6 * 2.5),
        ([1000.0] * 10, 0.5, 120.0),
    ],
)
def test_quantiles_are_those_of_prometheus(values_s: list[float], share: float, expected: float) -> None:
    assert quantile(observed(*values_s), share) == (None if expected is None else pytest.approx(expected))


def test_a_histogram_that_fell_counts_from_zero() -> None:
    before = Snapshot({}, {"time_to_first_byte_seconds": {("/a",): observed(*[100.0] * 9)}})
    now = Snapshot({}, {"time_to_first_byte_seconds": {("/a",): observed(0.0005), ("/b",): observed(0.0005)}})
    point = point_of(before, now, 1.0, 0.0)
    assert (point.first_byte_p50_s, point.first_byte_p90_s) == (pytest.approx(0.0005), pytest.approx(0.0009))


def test_workers_have_one_state_and_the_pool_is_added_up() -> None:
    workers = {
        name: Worker("decode", f"http://{name}:1") for name in ("ready", "draining", "failing", "down", "no")
    }
    for name, worker in workers.items():
        worker.ready = name != "down"
    workers["draining"].drained = True
    workers["failing"].circuit.retry_at_s = 5.0
    workers["no"].refused = "it does not fit"
    space = m.NamespaceStatus(
        "s", 7, 700, {}, 3, 1, 5, 800, settings=NamespaceSettings(quota_bytes=1000), counters={}
    )
    report = m.StatusReport(0, "n", 1, 5.0, 100, 40, 30, 20, 10, 3, 2, 1, 4, [space])
    moved = Rates("s", read_bytes_s=10.0, hits_s=3.0, misses_s=1.0)
    rows = [
        Row(m.NodeAddress("n", "unix:/n"), report, "", moved, [moved]),
        Row(m.NodeAddress("o", "unix:/o"), report, "", moved, [moved]),
        Row(m.NodeAddress("p", "unix:/p"), None, "refused", Rates("p"), []),
    ]
    samples = NOW
    frame = frame_of(point_of(Snapshot(), samples, 1.0, 0.0), 1.0, samples, workers.values(), rows, [])
    assert [view.state for view in frame.workers] == ["ready", "draining", "failing", "down", "refused"]
    assert (frame.waiting, frame.sessions) == (4, 5)
    assert [(node.node, node.error) for node in frame.nodes] == [("n", ""), ("o", ""), ("p", "refused")]
    [view] = frame.namespaces
    assert (view.pages, view.quota_bytes, view.evictions, view.hit_rate) == (14, 2000, 10, 0.75)


@pytest.mark.parametrize(("load", "elsewhere"), [(15, 3), (5, 0)])
def test_a_worker_is_shown_with_the_requests_of_all_processes(load: int, elsewhere: int) -> None:
    """Of its load, which this one counts as its own and others', what is of no process is elsewhere."""
    worker = Worker("decode", "http://ready:1")
    worker.in_flight, worker.elsewhere = 4, load - 4
    samples = NOW
    [seen] = frame_of(point_of(Snapshot(), samples, 1.0, 0.0), 1.0, samples, [worker], [], []).workers
    assert (seen.in_flight, seen.elsewhere) == (12, elsewhere)


def test_a_worker_is_shown_without_requests_where_a_process_does_not_say_its_own() -> None:
    worker = Worker("decode", "http://ready:1")
    worker.in_flight, worker.elsewhere = 4, 5
    samples = Snapshot(NOW.values | {"processes_silent": {(): 1}})
    [seen] = frame_of(point_of(Snapshot(), samples, 1.0, 0.0), 1.0, samples, [worker], [], []).workers
    assert (seen.in_flight, seen.elsewhere) == (None, 0)
