"""Frames from samples: what the live page and `pdserve top` show."""

from __future__ import annotations

import pytest

from pdserve.kvpool.admin.sampling import Rates, Row
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.cluster_messages import NamespaceSettings
from pdserve.router.admin.live_frames import frame_of, point_of, quantile
from pdserve.router.fleet.worker import Worker
from pdserve.router.metrics.totals import read_samples

BEFORE = """
pdserve_router_requests_total{route="/a",status="200"} 10
pdserve_router_first_token_seconds_sum{part="decode"} 1.0
pdserve_router_first_token_seconds_count{part="router"} 1
pdserve_router_turn_tokens_total{turn="1",tier="pool"} 100
other_metric 5
"""
NOW = """
pdserve_router_requests_total{route="/a",status="200"} 14
pdserve_router_requests_total{route="/b",status="502"} 2
pdserve_router_stream_errors_total{reason="timeout"} 2
pdserve_router_requests_in_flight 3
pdserve_router_worker_requests_in_flight{worker="ready:1",role="decode"} 12
pdserve_router_processes_silent 0
pdserve_router_tenant_waiting{tenant="t"} 4
pdserve_router_sessions 5
pdserve_router_first_token_seconds_sum{part="decode"} 2.0
pdserve_router_first_token_seconds_sum{part="pull"} 0.5
pdserve_router_first_token_seconds_count{part="router"} 3
pdserve_router_turn_tokens_total{turn="1",tier="pool"} 140
pdserve_router_turn_tokens_total{turn="2",tier="pool"} 60
pdserve_router_turn_tokens_total{turn="2",tier="computed"} 20
"""


def test_a_point_is_the_growth_between_two_samples() -> None:
    point = point_of(read_samples(BEFORE), read_samples(NOW), 2.0, 99.0)
    assert (point.at_s, point.requests_s, point.failed_s, point.in_flight) == (99.0, 3.0, 2.0, 3)
    assert point.parts_s == {"pull": 0.25, "decode": 0.5}
    assert point.tokens_s == {"pool": 50.0, "computed": 10.0}
    assert point.first_byte_p50_s is None


def test_a_counter_that_fell_counts_from_zero() -> None:
    before = read_samples('pdserve_router_requests_total{route="/a",status="200"} 1000')
    assert point_of(before, read_samples(BEFORE), 1.0, 0.0).requests_s == 10


@pytest.mark.parametrize(
    ("buckets", "share", "expected"),
    [
        ({}, 0.5, None),
        ({"1.0": 0, "+Inf": 0}, 0.5, None),
        ({"1.0": 10, "2.0": 10, "+Inf": 10}, 0.5, 0.5),
        ({"1.0": 0, "2.0": 10, "+Inf": 10}, 0.9, 1.9),
        ({"1.0": 0, "2.0": 0, "+Inf": 10}, 0.5, 2.0),
    ],
)
def test_quantiles_are_those_of_prometheus(buckets: dict[str, float], share: float, expected: float) -> None:
    assert quantile(buckets, share) == (None if expected is None else pytest.approx(expected))


def test_workers_have_one_state_and_the_pool_is_added_up() -> None:
    workers = {
        name: Worker("decode", f"http://{name}:1") for name in ("ready", "draining", "failing", "down", "no")
    }
    for name, worker in workers.items():
        worker.ready = name != "down"
    workers["draining"].drained = True
    workers["failing"].retry_at_s = 5.0
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
    samples = read_samples(NOW)
    frame = frame_of(point_of({}, samples, 1.0, 0.0), 1.0, samples, workers.values(), rows, [])
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
    samples = read_samples(NOW)
    [seen] = frame_of(point_of({}, samples, 1.0, 0.0), 1.0, samples, [worker], [], []).workers
    assert (seen.in_flight, seen.elsewhere) == (12, elsewhere)


def test_a_worker_is_shown_without_requests_where_a_process_does_not_say_its_own() -> None:
    worker = Worker("decode", "http://ready:1")
    worker.in_flight, worker.elsewhere = 4, 5
    samples = read_samples(NOW.replace("processes_silent 0", "processes_silent 1"))
    [seen] = frame_of(point_of({}, samples, 1.0, 0.0), 1.0, samples, [worker], [], []).workers
    assert (seen.in_flight, seen.elsewhere) == (None, 0)
