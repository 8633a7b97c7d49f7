from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.fleet import Fleet, Worker, WorkerInfo

GEOMETRY = {"layers": 2, "dtype": "float32"}


def info(role: str = "decode", **fields: Any) -> WorkerInfo:
    base: dict[str, Any] = {
        "role": role,
        "model": "m",
        "page_size": 16,
        "namespace": "ns",
        "kv_geometry": GEOMETRY,
        "context_length": 4096,
    }
    return WorkerInfo(**(base | fields))


def make(*roles: Any) -> Fleet:
    fleet = Fleet(
        (Worker(role, f"http://h{i}:1") for i, role in enumerate(roles)), circuit_failures=2, circuit_open_s=5
    )
    for worker in fleet.workers:
        assert fleet.on_info(worker, info(worker.role)) is None
        fleet.on_probe_ready(worker)
    return fleet


def test_a_worker_is_not_eligible_before_it_has_joined_and_is_ready() -> None:
    fleet = Fleet([Worker("decode", "http://h:1")])
    worker = fleet.workers[0]
    assert fleet.models == ()
    fleet.on_info(worker, info())
    assert fleet.snapshot("m", 0).decode == ()
    assert fleet.on_probe_ready(worker)
    assert fleet.snapshot("m", 0).decode == (worker,)
    assert fleet.on_probe_not_ready(worker)
    assert fleet.snapshot("m", 0).decode == ()
    assert fleet.models == ("m",)


def test_one_unanswered_probe_is_forgiven() -> None:
    fleet = make("decode")
    worker = fleet.workers[0]
    assert not fleet.on_probe_unanswered(worker, failures_to_down=2)
    assert worker.ready
    assert fleet.on_probe_unanswered(worker, failures_to_down=2)
    assert fleet.snapshot("m", 0).decode == ()


def test_agg_workers_stand_in_where_no_decode_worker_is_eligible() -> None:
    fleet = make("decode", "agg")
    decode, agg = fleet.workers
    assert fleet.snapshot("m", 0).decode == (decode,)
    fleet.on_probe_not_ready(decode)
    assert fleet.snapshot("m", 0).decode == (agg,)


def test_an_open_circuit_lets_one_request_try_after_a_while() -> None:
    fleet = make("decode", "decode")
    bad, good = fleet.workers
    assert not fleet.on_failure(bad, 0.0)
    assert fleet.on_failure(bad, 0.0)
    assert fleet.snapshot("m", 4.9).decode == (good,)
    assert fleet.snapshot("m", 5.0).decode == (bad, good)
    fleet.on_selected(bad, 5.0)
    assert fleet.snapshot("m", 5.1).decode == (good,)
    fleet.on_released(bad)
    fleet.on_success(bad)
    assert fleet.snapshot("m", 5.2).decode == (bad, good)


def test_a_failed_trial_opens_the_circuit_again() -> None:
    fleet = make("prefill", "decode")
    bad = fleet.workers[0]
    fleet.on_failure(bad, 0.0)
    fleet.on_failure(bad, 0.0)
    assert fleet.snapshot("m", 1.0).prefill == ()
    fleet.on_selected(bad, 5.0)
    assert not fleet.on_failure(bad, 6.0)
    assert fleet.snapshot("m", 10.9).prefill == ()
    assert fleet.snapshot("m", 11.0).prefill == (bad,)


def test_decode_workers_with_open_circuits_are_used_when_there_is_no_other() -> None:
    fleet = make("decode")
    worker = fleet.workers[0]
    fleet.on_failure(worker, 0.0)
    fleet.on_failure(worker, 0.0)
    assert fleet.snapshot("m", 1.0).decode == (worker,)


def test_coming_back_closes_the_circuit() -> None:
    fleet = make("prefill", "decode")
    worker = fleet.workers[0]
    fleet.on_failure(worker, 0.0)
    fleet.on_failure(worker, 0.0)
    fleet.on_probe_not_ready(worker)
    fleet.on_probe_ready(worker)
    assert fleet.snapshot("m", 0.1).prefill == (worker,)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"page_size": 32}, "page_size (32 and 16)"),
        ({"kv_geometry": {"layers": 3, "dtype": "float32"}}, "kv_geometry.layers (3 and 2)"),
        ({"kv_geometry": {"layers": 2}}, "kv_geometry.dtype"),
        ({"namespace": "other"}, "namespace"),
        ({"model": "m2"}, "model ('m2' and 'm')"),
    ],
)
def test_a_worker_whose_pages_differ_is_refused(fields: dict[str, Any], named: str) -> None:
    fleet = Fleet([Worker("prefill", "http://a:1"), Worker("decode", "http://b:1")])
    first, second = fleet.workers
    assert fleet.on_info(first, info("prefill")) is None
    refused = fleet.on_info(second, info(**fields))
    assert refused is not None
    assert named in refused
    assert "a:1" in refused
    assert "b:1" in refused
    fleet.on_probe_ready(second)
    assert fleet.snapshot("m", 0).decode == ()
    assert fleet.models == ("m",)
    assert fleet.on_info(second, info()) is None


def test_a_worker_in_the_wrong_list_is_refused() -> None:
    fleet = Fleet([Worker("prefill", "http://a:1")])
    refused = fleet.on_info(fleet.workers[0], info("decode"))
    assert refused is not None
    assert "listed under 'prefill'" in refused


def test_two_models_in_two_namespaces_live_side_by_side() -> None:
    fleet = Fleet([Worker("decode", "http://a:1"), Worker("decode", "http://b:1")])
    first, second = fleet.workers
    fleet.on_info(first, info())
    assert fleet.on_info(second, info(model="m2", namespace="ns2", page_size=64)) is None
    fleet.on_probe_ready(first)
    fleet.on_probe_ready(second)
    assert fleet.models == ("m", "m2")
    assert fleet.snapshot("m2", 0).decode == (second,)


def test_context_length_is_what_every_worker_takes() -> None:
    fleet = make("prefill", "decode")
    fleet.on_info(fleet.workers[1], info(context_length=1024))
    assert fleet.context_length("m") == 1024


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["failure", "success", "ready", "not_ready", "select", "release"]),
        st.integers(0, 3),
        st.floats(0, 3),
    ),
    max_size=60,
)


@given(EVENTS)
def test_snapshots_are_right_however_they_are_cached(events: list[tuple[str, int, float]]) -> None:
    fleet, now_s = make("prefill", "decode", "decode", "agg"), 0.0
    for what, index, passed_s in events:
        now_s += passed_s
        worker = fleet.workers[index]
        if what == "failure":
            fleet.on_failure(worker, now_s)
        elif what == "success":
            fleet.on_success(worker)
        elif what == "ready":
            fleet.on_probe_ready(worker)
        elif what == "not_ready":
            fleet.on_probe_not_ready(worker)
        elif what == "select":
            fleet.on_selected(worker, now_s)
        elif worker.in_flight:
            fleet.on_released(worker)
        snapshot = fleet.snapshot("m", now_s)
        assert snapshot == fleet._take_snapshot("m", now_s)
        assert all(w.ready for w in (*snapshot.prefill, *snapshot.decode))
        assert bool(snapshot.decode) == any(w.ready for w in fleet.workers if w.role != "prefill")
