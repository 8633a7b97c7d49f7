"""What the doctor says of facts: one fault at a time, each against a cluster that is well."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from pdserve.doctor import judge
from pdserve.doctor.facts import NO_UCX, Finding, Machine, PoolNode, Probe, Turn, Worker

MACHINE = Machine(
    open_files=100_000,
    shm_bytes=64 << 30,
    shm_free_bytes=60 << 30,
    memory_bytes=128 << 30,
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
WORKER = Worker(
    url="http://a",
    ready=True,
    pool="up",
    role="decode",
    model="m",
    context_length=4096,
    page_size=64,
    namespace="m@1",
    geometry=GEOMETRY,
    tokenizer="t",
    chat_template="c",
    versions="v",
    write_policy="write_through",
    prefetch_policy="wait_complete",
    prefetch_threshold=64,
    device_tokens=40_000,
    host_tokens=80_000,
)
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
    assert {"page size", "layout", "KV dtype", "model revision", "tokenizer", "chat template"} < {
        finding.check for finding in findings
    }


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
        (
            {"has_gpu": True, "numa_nodes": 2, "has_numactl": False},
            "warn",
            "NUMA",
        ),
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
        ({"page_size": 32}, "fail", "page size"),
        ({"geometry": {**GEOMETRY, "layout": "layer_first"}}, "fail", "layout"),
        ({"geometry": {**GEOMETRY, "tp_size": "2"}}, "fail", "ranks"),
        ({"geometry": {**GEOMETRY, "kv_dtype": "float8_e4m3fn"}}, "fail", "KV dtype"),
        ({"geometry": {**GEOMETRY, "model": "bb"}}, "fail", "model revision"),
        ({"tokenizer": "u"}, "fail", "tokenizer"),
        ({"chat_template": "none"}, "fail", "chat template"),
        ({"namespace": "m@2"}, "fail", "namespace"),
        ({"versions": "w"}, "warn", "versions"),
        ({"pool": "down"}, "fail", "pool"),
        ({"has_storage": False}, "warn", "storage"),
        ({"radix_cache": False}, "fail", "radix cache"),
        ({"prefetch_policy": "best_effort"}, "fail", "prefetch"),
        ({"prefetch_policy": "timeout"}, "warn", "prefetch"),
        ({"prefetch_threshold": 256}, "warn", "prefetch"),
        ({"prefetch_threshold": 4096}, "fail", "prefetch"),
        ({"write_policy": "write_back"}, "fail", "write policy"),
        ({"host_tokens": 4000}, "fail", "host pool"),
        ({"host_tokens": 20_000}, "warn", "host pool"),
        ({"host_tokens": 4000, "keeps_host_pages": False}, "fail", "host pool"),
        ({"clock_ahead_s": -7.0}, "warn", "clock"),
        ({"ready": False, "draining": True}, "warn", "worker"),
        ({"busy": True, "has_storage": False, "write_policy": ""}, "warn", "worker"),
    ],
)
def test_one_workers_fault_is_found(change: dict[str, Any], level: str, check: str) -> None:
    found = troubles(judge.workers([WORKER, replace(PREFILL, **change)]))
    if check == "page size":  # a smaller one than its threshold
        found.remove(("warn", "prefetch"))
    assert found == [(level, check)]
    assert judge.status([Finding(check, level, "")]) == {"warn": 1, "fail": 2}[level]  # type: ignore[arg-type]


def test_host_memory_that_keeps_no_pages_is_for_one_request_at_least() -> None:
    staged = replace(WORKER, keeps_host_pages=False, host_tokens=4096)
    small = replace(PREFILL, keeps_host_pages=False, host_tokens=1000, device_tokens=1000)
    assert troubles(judge.workers([staged, small])) == []


def test_of_a_worker_that_tells_nothing_of_itself_nothing_is_made_up() -> None:
    starts = Worker(url="http://c", described=False)
    assert troubles(judge.workers([WORKER, PREFILL, starts])) == [("fail", "worker")]
    assert troubles(judge.workers([PREFILL, replace(starts, draining=True)])) == [("warn", "worker")]


@pytest.mark.parametrize(
    ("change", "checks"),
    [
        ({"tokenizer": ""}, ["tokenizer"]),
        ({"chat_template": ""}, ["chat template"]),
        ({"namespace": ""}, ["namespace"]),
        ({"page_size": 0, "prefetch_threshold": 0}, []),  # its geometry has it
        ({"geometry": {}}, ["layout", "ranks", "KV dtype", "model revision"]),
    ],
)
def test_workers_that_do_not_say_what_must_be_alike_are_named(
    change: dict[str, Any], checks: list[str]
) -> None:
    """As workers of an earlier version may not, while the others are upgraded."""
    silent = replace(PREFILL, **change)
    found = [*judge.workers([WORKER, silent])]
    assert troubles(found) == [("warn", check) for check in checks]
    assert all(silent.url in one.says and WORKER.url not in one.says for one in found if one.check in checks)


def test_a_worker_that_has_nobody_to_be_alike_need_not_say_what_it_has() -> None:
    assert troubles(judge.workers([replace(WORKER, tokenizer="", role="agg")])) == []


def test_workers_of_different_models_may_differ() -> None:
    other = replace(WORKER, url="http://c", model="n", page_size=32, prefetch_threshold=32, tokenizer="u")
    assert troubles(judge.workers([WORKER, other])) == []


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


VLLM = Worker(url="http://v", ready=True, engine="vllm", role="decode", model="v", context_length=4096)


def test_a_worker_of_another_engine_is_judged_by_what_is_known() -> None:
    prefill = replace(VLLM, url="http://w", role="prefill")
    assert troubles(judge.workers([VLLM, prefill, WORKER, PREFILL])) == []
    assert troubles(judge.workers([prefill])) == [("fail", "worker"), ("warn", "worker")]
    assert troubles(judge.workers([replace(VLLM, ready=False)])) == [("fail", "worker")]
    assert troubles(judge.workers([replace(VLLM, role="")])) == []  # nobody says what it is
    assert troubles(judge.workers([replace(VLLM, clock_ahead_s=9.0)])) == [("warn", "clock")]


def test_two_engines_do_not_serve_one_model() -> None:
    assert troubles(judge.workers([WORKER, replace(VLLM, model="m")])) == [("fail", "engine")]
