from __future__ import annotations

import heapq
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.fleet.membership import FleetError
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import Worker, WorkerInfo

GEOMETRY = {"layers": 2, "dtype": "float32"}


def info(role: str = "decode", **fields: Any) -> WorkerInfo:
    base: dict[str, Any] = {
        "role": role,
        "model": "m",
        "page_size": 16,
        "namespace": "ns",
        "kv_geometry": GEOMETRY,
        "context_length": 4096,
        "tokenizer": "f00d",
        "chat_template": "beef",
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


def test_when_the_stream_of_a_trial_begins_the_next_request_may_try() -> None:
    fleet = make("decode", "decode")
    tried, good = fleet.workers
    fleet.on_failure(tried, 0.0)
    fleet.on_failure(tried, 0.0)
    first = fleet.on_selected(tried, 5.0)
    fleet.on_trial_answering(tried, first, 5.1)
    assert fleet.snapshot("m", 5.1).decode == (tried, good)
    second = fleet.on_selected(tried, 5.2)
    assert fleet.snapshot("m", 5.2).decode == (good,)
    fleet.on_trial_answering(tried, first, 5.3)  # of an earlier one: the last has not begun
    assert fleet.snapshot("m", 5.3).decode == (good,)
    fleet.on_trial_answering(tried, second, 5.4)
    assert fleet.snapshot("m", 5.4).decode == (tried, good)


def test_streams_that_begin_say_nothing_of_a_worker_at_which_one_has_broken_off_since() -> None:
    fleet = make("decode", "decode")
    bad, good = fleet.workers
    earlier = fleet.on_selected(bad, 0.0)
    fleet.on_failure(bad, 0.0)
    fleet.on_failure(bad, 0.0)
    fleet.on_trial_answering(bad, earlier, 0.1)
    assert fleet.snapshot("m", 0.1).decode == (good,)
    trial = fleet.on_selected(bad, 5.0)
    fleet.on_failure(bad, 5.1)
    fleet.on_trial_answering(bad, trial, 5.2)
    assert fleet.snapshot("m", 10.0).decode == (good,)


def test_a_worker_that_breaks_off_its_streams_is_given_few_of_them_however_many_there_are() -> None:
    fleet = make("decode", "decode")
    bad, _ = fleet.workers
    events: list[tuple[float, int, int]] = [(n / 40, n, 0) for n in range(60 * 40)]
    trials: dict[int, int] = {}
    while events:
        now_s, request, step = heapq.heappop(events)
        if step == 0:
            worker = min(fleet.snapshot("m", now_s).decode, key=lambda one: one.in_flight)
            trial = fleet.on_selected(worker, now_s)
            if worker is bad:  # its first token comes 0.3 s later, its end another 0.5 s later
                trials[request] = trial
                heapq.heappush(events, (now_s + 0.3, request, 1))
        elif step == 1:
            fleet.on_trial_answering(bad, trials[request], now_s)
            heapq.heappush(events, (now_s + 0.5, request, 2))
        else:
            fleet.on_released(bad)
            fleet.on_failure(bad, now_s)
    assert 12 < len(trials) < 100  # of 2,400


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
        ({"tokenizer": "cafe"}, "tokenizer ('cafe' and 'f00d')"),
        ({"chat_template": "none"}, "chat template ('none' and 'beef')"),
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


def test_a_worker_that_does_not_say_what_tokenizer_it_has_may_join() -> None:
    fleet = make("prefill", "decode")
    assert fleet.on_info(fleet.workers[1], info(tokenizer="", chat_template="")) is None


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


def join(fleet: Fleet, url: str, role: Any = "decode") -> Worker:
    worker = fleet.members.join(url, role)
    assert fleet.on_info(worker, info(role)) is None
    fleet.on_probe_ready(worker)
    return worker


def test_a_worker_that_joins_is_used_once_a_probe_found_it_ready() -> None:
    fleet = make("decode")
    new = fleet.members.join("http://new:1", "decode")
    assert new not in fleet.snapshot("m", 0).decode
    assert join(fleet, "http://new:1") is new
    assert fleet.snapshot("m", 0).decode == (fleet.by_id["h0:1"], new)


def test_a_worker_that_leaves_is_out_at_once_and_its_requests_are_counted_to_their_end() -> None:
    fleet = make("decode", "decode")
    leaving, other = fleet.workers
    fleet.on_selected(leaving, 0.0)
    assert fleet.members.leave(leaving.id) is leaving
    assert fleet.snapshot("m", 0).decode == (other,)
    fleet.on_failure(leaving, 0.0)
    fleet.on_released(leaving)
    assert leaving.in_flight == 0
    again = join(fleet, leaving.url)
    assert again is not leaving
    assert fleet.snapshot("m", 0).decode == (other, again)


def test_the_last_worker_of_a_model_takes_the_model_with_it() -> None:
    fleet = make("decode")
    fleet.members.leave("h0:1")
    assert fleet.models == ()
    assert fleet.workers == ()


def test_a_draining_worker_gets_nothing_new_and_can_be_asked_about_what_it_did() -> None:
    fleet = make("prefill", "decode", "decode")
    prefill, first, second = fleet.workers
    fleet.members.drain(first.id, True)
    fleet.members.drain(prefill.id, True)
    snapshot = fleet.snapshot("m", 0)
    assert (snapshot.prefill, snapshot.decode, snapshot.draining) == ((), (second,), (first,))
    fleet.members.drain(first.id, False)
    assert fleet.snapshot("m", 0).decode == (first, second)


def test_a_worker_that_says_it_stops_is_drained_until_another_one_is_there() -> None:
    fleet = make("decode", "decode")
    first, second = fleet.workers
    was = first.incarnation
    assert fleet.on_probe_stopping(first)
    assert not fleet.on_probe_stopping(first)
    assert (fleet.snapshot("m", 0).decode, fleet.snapshot("m", 0).draining) == ((second,), (first,))
    assert fleet.on_probe_not_ready(first)
    assert not first.draining
    assert fleet.on_probe_ready(first)
    fleet.on_probe_stopping(first)
    assert fleet.on_probe_ready(first)  # it was away too shortly to be missed
    assert fleet.snapshot("m", 0).decode == (first, second)
    assert first.incarnation != was
    fleet.members.drain(first.id, True)
    fleet.on_probe_ready(first)
    assert first.draining  # what the admin API said holds


@pytest.mark.parametrize(
    ("code", "act"),
    [
        ("bad_url", lambda fleet: fleet.members.join("https://h:1", "decode")),
        ("other_role", lambda fleet: fleet.members.join("http://h0:1", "prefill")),
        ("unknown_worker", lambda fleet: fleet.members.leave("h9:1")),
        ("unknown_worker", lambda fleet: fleet.members.drain("h9:1", True)),
        ("bad_url", lambda fleet: fleet.members.sync("etcd", {"http://h1:1": "decode", "h2": "decode"})),
    ],
)
def test_what_cannot_be_done_is_said_and_changes_nothing(code: str, act: Any) -> None:
    fleet = make("decode")
    before = fleet.workers
    with pytest.raises(FleetError) as caught:
        act(fleet)
    assert caught.value.code == code
    assert fleet.workers == before


def test_a_source_names_exactly_its_workers_and_leaves_the_others_alone() -> None:
    fleet = Fleet([])
    fleet.members.sync("config", {"http://a:1": "prefill", "http://b:1": "decode"})
    by_hand = fleet.members.join("http://c:1", "decode")
    fleet.members.sync("etcd", {"http://b:1": "decode", "http://d:1": "decode"})
    joined, left = fleet.members.sync("config", {"http://e:1": "decode"})
    assert [w.id for w in joined] == ["e:1"]
    assert [w.id for w in left] == ["a:1"]
    assert list(fleet.by_id) == ["b:1", "c:1", "d:1", "e:1"]  # etcd still has b
    assert [w.id for w in fleet.members.sync("etcd", {})[1]] == ["b:1", "d:1"]
    assert list(fleet.by_id) == ["c:1", "e:1"]
    assert by_hand in fleet.workers


def test_a_worker_that_changes_its_role_joins_anew() -> None:
    fleet = Fleet([])
    fleet.members.sync("etcd", {"http://a:1": "prefill"})
    old = fleet.by_id["a:1"]
    joined, left = fleet.members.sync("etcd", {"http://a:1": "decode"})
    assert left == [old]
    assert [(w.id, w.role) for w in joined] == [("a:1", "decode")]
    with pytest.raises(FleetError, match="etcd has it as 'decode'"):
        fleet.members.sync("config", {"http://a:1": "prefill"})


def test_a_worker_that_is_away_does_not_keep_others_out() -> None:
    fleet = make("decode")
    fleet.on_probe_not_ready(fleet.workers[0])
    new = fleet.members.join("http://new:1", "decode")
    assert fleet.on_info(new, info(page_size=32)) is None
    fleet.on_probe_ready(new)
    refused = fleet.on_info(fleet.workers[0], info())  # it comes back as it was
    assert refused is not None
    assert "page_size (16 and 32)" in refused


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *("failure", "answering", "success", "ready", "not_ready", "stopping", "select", "release"),
                *("drain", "undrain", "leave"),
            ]
        ),
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
        if what == "leave":
            url, role = f"http://h{index}:1", fleet.by_id[f"h{index}:1"].role
            fleet.members.leave(f"h{index}:1")
            join(fleet, url, role)
        worker = fleet.by_id[f"h{index}:1"]
        if what in ("drain", "undrain"):
            fleet.members.drain(worker.id, what == "drain")
        elif what == "failure":
            fleet.on_failure(worker, now_s)
        elif what == "answering":
            fleet.on_trial_answering(worker, worker.circuit.trial, now_s)
        elif what == "success":
            fleet.on_success(worker)
        elif what == "ready":
            fleet.on_probe_ready(worker)
        elif what == "not_ready":
            fleet.on_probe_not_ready(worker)
        elif what == "stopping":
            fleet.on_probe_stopping(worker)
        elif what == "select":
            fleet.on_selected(worker, now_s)
        elif what == "release" and worker.in_flight:
            fleet.on_released(worker)
        snapshot = fleet.snapshot("m", now_s)
        assert snapshot == fleet._take_snapshot("m", now_s)
        assert all(w.ready and not w.draining for w in (*snapshot.prefill, *snapshot.decode))
        able = any(w.ready and not w.draining for w in fleet.workers if w.role != "prefill")
        assert bool(snapshot.decode) == able
