"""What the doctor says of facts: one fault at a time, each against a cluster that is well."""

from __future__ import annotations

from collections.abc import Iterator
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


VLLM = replace(
    WORKER, url="http://v", pool="down", info=WorkerInfo.of_foreign(Foreign("vllm", "v", 4096), "agg")
)
VLLM_PREFILL = replace(VLLM, url="http://w", role="prefill")
OTHER_MODEL = replace(INFO, model="n", namespace="n@1", page_size=32, tokenizer="u")
STARTS = Worker(url="http://c")


def machine(**change: Any) -> Iterator[Finding]:
    return judge.machine(replace(MACHINE, **change))


def workers(**change: Any) -> Iterator[Finding]:
    return judge.workers([WORKER, replace(PREFILL, **change)])


def informed(**change: Any) -> Iterator[Finding]:
    return workers(info=replace(INFO, **change))


def node(**change: Any) -> Iterator[Finding]:
    return judge.pool([NODE, replace(NODE, node="b", **change)])


def turn(number: int, **change: Any) -> Iterator[Finding]:
    """The judgement of a probe with a change in one turn. How each step's tokens were come by decides."""
    turns = list(TURNS)
    turns[number] = replace(turns[number], **change)
    return judge.probe(replace(PROBE, turns=tuple(turns)))


def plan(words: str) -> list[Finding]:
    """Of a prefill stage that did not take place in either turn."""
    found = [list(turn(number, prefill=None, plan=words)) for number in (0, 1)]
    assert troubles(found[0]) == troubles(found[1])
    return found[0]


@pytest.mark.parametrize(
    ("found", "expected", "says"),
    [
        (machine(sglang=""), "warn sglang", ""),
        (machine(sglang="0.6"), "warn sglang", ""),
        (machine(sglang_misfit="sglang.srt.x: gone"), "fail sglang", "sglang.srt.x: gone"),
        (machine(open_files=1024), "fail open files", ""),
        (machine(open_files=8192), "warn open files", ""),
        (machine(shm_bytes=1 << 40), "warn /dev/shm", ""),
        (machine(ucx_error="no ucxx"), "fail UCX", ""),
        (machine(ucx_error=NO_UCX), "warn UCX", ""),
        (machine(), "", "over TCP"),
        (machine(has_infiniband=True), "", "over RDMA"),
        (workers(error="refused"), "fail worker", ""),
        (workers(ready=False), "fail worker", ""),
        (workers(refused="it differs"), "fail worker", ""),
        (workers(pool="down"), "warn pool", ""),
        (workers(clock_ahead_s=-7.0), "warn clock", ""),
        (workers(ready=False, draining=True), "warn worker", ""),
        (informed(page_size=32), "fail alike", "differ in page_size: 64 at http://a, 32 at http://b"),
        (informed(kv_geometry={**GEOMETRY, "layout": "z"}), "fail alike", "differ in kv_geometry.layout"),
        (informed(tokenizer="u"), "fail alike", "workers of m differ in tokenizer"),
        (informed(namespace="m@2"), "fail alike", "workers of m differ in namespace"),
        (informed(engine="vllm"), "fail alike", "workers of m differ in engine"),
        (informed(pdserve_version="9"), "warn versions", ""),
        (judge.workers([WORKER, PREFILL, STARTS]), "fail worker", ""),
        (judge.workers([PREFILL, replace(STARTS, draining=True)]), "warn worker", ""),
        (judge.workers([WORKER, replace(WORKER, url="http://c", info=OTHER_MODEL)]), "", ""),
        (judge.workers([PREFILL]), "fail worker, warn worker", ""),
        (judge.workers([replace(WORKER, role="agg")]), "", ""),
        (judge.workers([VLLM, VLLM_PREFILL, WORKER, PREFILL]), "", ""),
        (judge.workers([VLLM_PREFILL]), "fail worker, warn worker", ""),
        (judge.workers([replace(VLLM, ready=False)]), "fail worker", ""),
        (judge.workers([replace(VLLM, role="")]), "", ""),  # nobody says what it is
        (node(error="refused"), "fail pool node", ""),
        (node(dead_members=("b",)), "warn pool node", ""),
        (node(full_namespaces=("m@1",)), "warn quota", ""),
        (node(unwritable_tiers=("ssd0",)), "fail tier", ""),
        (node(free_bytes=1 << 20, evictions=5), "warn pool memory", ""),
        (node(free_bytes=81 << 20, tail_bytes=80 << 20, evictions=5), "warn pool memory", ""),
        (node(free_bytes=900 << 20, tail_bytes=300 << 20), "warn pool memory", ""),
        (node(epoch=4), "warn pool node", ""),
        (judge.probe(Probe(error="status 503")), "fail live probe", ""),
        (turn(0, decode={"pool": 192, "computed": 71}), "fail live probe", ""),
        (turn(0, decode={}), "fail live probe", ""),
        (turn(0, prefill=None, decode={"computed": 263}, plan="decode=only, prefill=agg"), "", ""),
        (turn(1, prefill={"device": 256, "computed": 78}), "warn live probe", ""),
        (turn(1, prefill={"computed": 334}), "fail live probe", ""),
        (turn(1, prefill=None, decode={"device": 320, "computed": 14}), "", ""),
        (turn(1, prefill=None, decode={"computed": 334}), "fail live probe", ""),
        (plan("decode=only, prefill=only, stage=status-500"), "fail live probe", ""),
        (plan("decode=only, prefill=only, settle=settled, stage=garbage, retried"), "fail live probe", ""),
        (plan("decode=only, prefill=none-ready"), "fail live probe", ""),
        (plan("decode=only, prefill=session-worker-gone"), "fail live probe", ""),
        (plan("decode=only, prefill=no-stage"), "", ""),
        (plan("decode=only, prefill=direct(uncached=9<64)"), "", ""),
        (plan("decode=agg, prefill=agg"), "", ""),
    ],
)
def test_one_fault_is_found_and_nothing_else(found: Iterator[Finding], expected: str, says: str) -> None:
    findings = list(found)
    assert ", ".join(f"{level} {check}" for level, check in troubles(findings)) == expected
    assert any(says in one.says for one in findings)
    assert judge.status(findings) == (2 if "fail" in expected else 1 if expected else 0)
