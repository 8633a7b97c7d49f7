"""Workers wanted of each role in the fleet."""

from __future__ import annotations

import pytest

from pdserve.router.config.placement import PlacementSettings
from pdserve.router.config.slo import ServiceLevel
from pdserve.router.fleet.registry import Snapshot
from pdserve.router.fleet.worker import Role, Worker
from pdserve.router.placement.elastic.roles import ElasticRoles

LEVEL = ServiceLevel(itl_ms=20.0, step_ms=10.0, step_ms_per_request=1.0, window_s=10.0)


def workers(role: Role, count: int) -> tuple[Worker, ...]:
    return tuple(Worker(role, f"http://{role}{number}:1") for number in range(count))


def fleet(prefill: int = 0, decode: int = 0, elastic: int = 0, agg: int = 0) -> Snapshot:
    both = workers("elastic", elastic)
    return Snapshot(
        models=("m",),
        model="m",
        prefill=(*workers("prefill", prefill), *both),
        decode=(*workers("decode", decode), *both) or workers("agg", agg),
        elastic=both,
    )


def loaded(snapshot: Snapshot, processes: int = 1) -> ElasticRoles:
    """4 prompts a second of 500 ms each: 2 workers prefill. 20 answers of 10 at a time, and their root."""
    roles = ElasticRoles(PlacementSettings(), LEVEL, processes)
    snapshot.decode[0].in_flight = 20
    for number in range(1000):
        roles.narrow(snapshot, 5000, None, number / 4)
        roles.on_planned(snapshot, 5000, number / 4)
    return roles


@pytest.mark.parametrize(
    ("snapshot", "processes", "wanted"),
    [
        (fleet(prefill=1, decode=1), 1, {"prefill": 2.0, "decode": 2.45}),
        (fleet(elastic=2), 1, {"elastic": 4.45}),
        (fleet(agg=2), 1, {"agg": 4.45}),
        (fleet(prefill=1, decode=1, elastic=1), 1, {"prefill": 2.0, "decode": 2.45, "elastic": 2.45}),
        (fleet(prefill=1, decode=1, elastic=1), 2, {"prefill": 2.0, "decode": 2.45, "elastic": 3.45}),
        (fleet(prefill=9, decode=9, elastic=1), 1, {"prefill": 2.0, "decode": 2.45, "elastic": 0.0}),
    ],
)
def test_elastic_and_aggregated_workers_do_what_fixed_ones_leave(
    snapshot: Snapshot, processes: int, wanted: dict[str, float]
) -> None:
    found = loaded(snapshot, processes).wanted_of_role(snapshot, wanted, 250.0)
    assert found == pytest.approx(wanted, rel=0.05, abs=0.01)


def test_requests_whose_prompts_are_still_computed_need_no_answering_worker() -> None:
    snapshot = fleet(elastic=2)
    roles = ElasticRoles(PlacementSettings(), LEVEL)
    prefill, decode = snapshot.decode
    prefill.in_flight, prefill.prefilling, decode.in_flight = 30, 30, 30
    for number in range(100):
        assert roles.wanted(snapshot, float(number)).decode == 0
    prefill.in_flight, prefill.prefilling = 0, 0
    assert roles.wanted(snapshot, 200.0).decode > 3


def test_without_requests_the_need_fades() -> None:
    snapshot = fleet(elastic=2)
    roles = loaded(snapshot)
    snapshot.decode[0].in_flight = 0
    roles.wanted(snapshot, 250.0)
    assert roles.wanted_of_role(snapshot, ["elastic"], 400.0)["elastic"] < 0.1


def test_without_elastic_workers_and_level_nothing_is_measured() -> None:
    roles, snapshot = ElasticRoles(PlacementSettings(), ServiceLevel()), fleet(agg=1)
    roles.on_planned(snapshot, 5000, 0.0)
    assert not roles.counts(snapshot)
    assert roles.narrow(snapshot, 5000, None, 1.0) is snapshot
    assert roles.changes() == {}
