"""What the doctor says of facts: one fault at a time, each against a cluster that is well."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from pdserve.doctor import judge
from pdserve.doctor.facts import NO_UCX, Finding, Machine, PoolNode, Probe, Turn, Worker
from pdserve.router.fleet.worker import Foreign, WorkerInfo

MACHINE = Machine(
    open_files=100_000,
    shm_bytes=64 << 30,
    shm_free_bytes=60 << 30,
    sglang="0.5.23",
    sglang_tested="0.5.23",
)
GEOMETRY = {
    "model": "aa",
    "kv_dtype": "bfloat16",
    "page_size": "64",
    "layout": "page_first_direct",
    "tp_size": "1",
}
INFO = WorkerInfo(
    role="decode",
    model="m",
    context_length=4096,
    page_size=64,
    namespace="m@1",
    kv_geometry=GEOMETRY,
    tokenizer="t",
    chat_template="c",
)
WORKER = Worker(url="http://a", ready=True, pool="up", role="decode", info=INFO)
PREFILL = replace(WORKER, url="http://b", role="prefill")
NODE = PoolNode(address="unix:/a", node="a", epoch=3, capacity_bytes=1 << 30, free_bytes=1 << 29)
TURNS = (
    Turn(prompt_tokens=263, prefill={"computed": 263}, decode={"pool": 256, "computed": 7}, plan="p"),
    Turn(prompt_tokens=334, prefill={"device": 256, "pool": 64, "computed": 14}, decode={"pool": 320}),
)
PROBE = Probe(model="m", page_size=64, turns=TURNS)


def troubles(findings: Any) -> list[tuple[str, str]]:
    """(level, check) of what is not well; every such finding says what to change, no other does."""
    found: list[Finding] = list(findings)
    assert all((finding.level == "ok") != bool(finding.change) for finding in found), found
    assert all("\n" not in finding.says + finding.change for finding in found)
    return [(finding.level, finding.check) for finding in found if finding.level != "ok"]


def test_nothing_is_said_of_what_is_well() -> None:
    findings = [
        *judge.machine(MACHINE),
        *judge.workers([WORKER, PREFILL]),
        *judge.pool([NODE]),
        *judge.probe(PROBE),
    ]
    assert troubles(findings) == []
    assert judge.status(findings) == 0
    assert {"alike", "clock", "pool node", "live probe"} <= {finding.check for finding in findings}


@pytest.mark.parametrize(
    ("change", "level", "check"),
    [
        ({"sglang": ""}, "warn", "sglang"),
        ({"sglang": "0.6"}, "warn", "sglang"),
        ({"open_files": 1024}, "fail", "open files"),
        ({"open_files": 8192}, "warn", "open files"),
        ({"shm_bytes": 1 << 40}, "warn", "/dev/shm"),
        ({"ucx_error": "no ucxx"}, "fail", "UCX"),
        ({"ucx_error": NO_UCX}, "warn", "UCX"),
    ],
)
def test_a_machines_fault_is_found(change: dict[str, Any], level: str, check: str) -> None:
    assert troubles(judge.machine(replace(MACHINE, **change))) == [(level, check)]


def test_an_sglang_that_lacks_what_pdserve_needs_does_not_work() -> None:
    found = [*judge.machine(replace(MACHINE, sglang_misfit="sglang.srt.x: gone"))]
    assert troubles(found) == [("fail", "sglang")]
    assert any("sglang.srt.x: gone" in finding.says for finding in found)


def test_the_network_that_will_be_used_is_named() -> None:
    (tcp,) = [one for one in judge.machine(MACHINE) if one.check == "UCX"]
    (rdma,) = [one for one in judge.machine(replace(MACHINE, has_infiniband=True)) if one.check == "UCX"]
    assert "over TCP" in tcp.says
    assert "over RDMA" in rdma.says


@pytest.mark.parametrize(
    ("change", "level", "check"),
    [
        ({"error": "refused"}, "fail", "worker"),
        ({"ready": False}, "fail", "worker"),
        ({"refused": "it differs"}, "fail", "worker"),
        ({"pool": "down"}, "warn", "pool"),
        ({"clock_ahead_s": -7.0}, "warn", "clock"),
        ({"ready": False, "draining": True}, "warn", "worker"),
    ],
)
def test_one_workers_fault_is_found(change: dict[str, Any], level: str, check: str) -> None:
    assert troubles(judge.workers([WORKER, replace(PREFILL, **change)])) == [(level, check)]
    assert judge.status([Finding(check, level, "")]) == {"warn": 1, "fail": 2}[level]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"page_size": 32}, "page_size: 64 at http://a, 32 at http://b"),
        ({"kv_geometry": {**GEOMETRY, "layout": "layer_first"}}, "kv_geometry.layout"),
        ({"tokenizer": "u"}, "tokenizer"),
        ({"namespace": "m@2"}, "namespace"),
        ({"engine": "vllm"}, "engine"),
    ],
)
def test_workers_that_share_no_pages_are_named(change: dict[str, Any], named: str) -> None:
    found = [*judge.workers([WORKER, replace(PREFILL, info=replace(INFO, **change))])]
    assert troubles(found) == [("fail", "alike")]
    assert any(f"workers of m differ in {named}" in one.says for one in found)


def test_workers_of_two_versions_are_to_be_upgraded() -> None:
    newer = replace(PREFILL, info=replace(INFO, pdserve_version="9"))
    assert troubles(judge.workers([WORKER, newer])) == [("warn", "versions")]


def test_of_a_worker_that_tells_nothing_of_itself_nothing_is_made_up() -> None:
    starts = Worker(url="http://c")
    assert troubles(judge.workers([WORKER, PREFILL, starts])) == [("fail", "worker")]
    assert troubles(judge.workers([PREFILL, replace(starts, draining=True)])) == [("warn", "worker")]


def test_workers_of_different_models_may_differ() -> None:
    other = replace(INFO, model="n", namespace="n@1", page_size=32, tokenizer="u")
    assert troubles(judge.workers([WORKER, replace(WORKER, url="http://c", info=other)])) == []


def test_roles_that_do_not_make_a_cluster() -> None:
    assert troubles(judge.workers([PREFILL])) == [("fail", "worker"), ("warn", "worker")]
    assert troubles(judge.workers([replace(WORKER, role="agg")])) == []


@pytest.mark.parametrize(
    ("change", "level", "check"),
    [
        ({"error": "refused"}, "fail", "pool node"),
        ({"dead_members": ("b",)}, "warn", "pool node"),
        ({"full_namespaces": ("m@1",)}, "warn", "quota"),
        ({"unwritable_tiers": ("ssd0",)}, "fail", "tier"),
        ({"free_bytes": 1 << 20, "evictions": 5}, "warn", "pool memory"),
        ({"free_bytes": 81 << 20, "tail_bytes": 80 << 20, "evictions": 5}, "warn", "pool memory"),
        ({"free_bytes": 900 << 20, "tail_bytes": 300 << 20}, "warn", "pool memory"),
        ({"epoch": 4}, "warn", "pool node"),
    ],
)
def test_a_pool_nodes_fault_is_found(change: dict[str, Any], level: str, check: str) -> None:
    assert troubles(judge.pool([NODE, replace(NODE, node="b", **change)])) == [(level, check)]


@pytest.mark.parametrize(
    ("turn", "change", "levels"),
    [
        (0, {"decode": {"pool": 192, "computed": 71}}, ["fail"]),
        (0, {"decode": {}}, ["fail"]),
        (0, {"prefill": None, "decode": {"computed": 263}, "plan": "decode=only, prefill=agg"}, []),
        (1, {"prefill": {"device": 256, "computed": 78}}, ["warn"]),
        (1, {"prefill": {"computed": 334}}, ["fail"]),
        (1, {"prefill": None, "decode": {"device": 320, "computed": 14}}, []),
        (1, {"prefill": None, "decode": {"computed": 334}}, ["fail"]),
    ],
)
def test_the_live_probe_is_judged_by_the_tokens_each_step_reused(
    turn: int, change: dict[str, Any], levels: list[str]
) -> None:
    turns = list(TURNS)
    turns[turn] = replace(turns[turn], **change)
    assert [level for level, _ in troubles(judge.probe(replace(PROBE, turns=tuple(turns))))] == levels


@pytest.mark.parametrize(
    ("plan", "levels"),
    [
        ("decode=only, prefill=only, stage=status-500", ["fail"]),
        ("decode=only, prefill=only, settle=settled, stage=garbage, retried", ["fail"]),
        ("decode=only, prefill=none-ready", ["fail"]),
        ("decode=only, prefill=session-worker-gone", ["fail"]),
        ("decode=only, prefill=no-stage", []),
        ("decode=only, prefill=direct(uncached=9<64)", []),
        ("decode=agg, prefill=agg", []),
    ],
)
@pytest.mark.parametrize("turn", [0, 1])
def test_a_prefill_stage_that_was_to_be_and_was_not_is_a_failure(
    plan: str, levels: list[str], turn: int
) -> None:
    turns = list(TURNS)
    turns[turn] = replace(turns[turn], prefill=None, plan=plan)
    assert [level for level, _ in troubles(judge.probe(replace(PROBE, turns=tuple(turns))))] == levels


def test_a_probe_that_got_no_answer_is_a_failure() -> None:
    assert troubles(judge.probe(Probe(error="status 503"))) == [("fail", "live probe")]


VLLM = replace(
    WORKER, url="http://v", pool="down", info=WorkerInfo.of_foreign(Foreign("vllm", "v", 4096), "agg")
)


def test_a_worker_of_another_engine_is_judged_by_what_is_known() -> None:
    prefill = replace(VLLM, url="http://w", role="prefill")
    assert troubles(judge.workers([VLLM, prefill, WORKER, PREFILL])) == []
    assert troubles(judge.workers([prefill])) == [("fail", "worker"), ("warn", "worker")]
    assert troubles(judge.workers([replace(VLLM, ready=False)])) == [("fail", "worker")]
    assert troubles(judge.workers([replace(VLLM, role="")])) == []  # nobody says what it is
