"""`pdserve doctor` as a command: this machine, and a cluster of scripted workers."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from pdserve.doctor import cluster
from pdserve.doctor.facts import PoolNode
from pdserve.engine.prompt_identity import chat_template_fingerprint, tokenizer_fingerprint
from tests.e2e.cluster import PoolNode as RealNode
from tests.router.harness import disagg, run
from tests.router.mock_worker import REPORT, MockWorker, Received, Wire

SERVER = {
    "max_total_num_tokens": 40_000,
    "hicache_ratio": 2.0,
    "hicache_size": 0,
    "hicache_write_policy": "write_through",
    "hicache_storage_prefetch_policy": "wait_complete",
    "disable_radix_cache": False,
}


async def doctor(*words: str) -> tuple[int, str]:
    """(exit status, what it said)"""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdserve", "doctor", "--no-measure", *words), stdout=asyncio.subprocess.PIPE
    )
    said, _ = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode or 0, said.decode()


def levels(said: str) -> dict[str, str]:
    """The worst level of each check."""
    order = ["ok", "warn", "fail"]
    found: dict[str, str] = {}
    for one in json.loads(said)["findings"]:
        found[one["check"]] = max(found.get(one["check"], "ok"), one["level"], key=order.index)
    return found


def serves(worker: MockWorker, node: RealNode, **server: Any) -> None:
    """Answer as SGLang does when it is asked for its arguments, for as often as needed, and a generation."""
    storage = {"prefetch_threshold": 16, "pdserve": {"pool": {"nodes": [node.ref]}}}
    told = {**SERVER, "hicache_storage_backend_extra_config": json.dumps(storage), **server}

    async def script(wire: Wire, request: Received) -> None:
        await wire.json(200, told)

    async def generate(wire: Wire, request: Received) -> None:
        tokens = len(request.json()["input_ids"])
        body = json.dumps({"output_ids": [5] * 16, "meta_info": {"prompt_tokens": tokens}}).encode()
        found = f"x-pdserve-cached: device=0, host=0, pool=16, ssd={(tokens - 17) // 16 * 16}, computed=7\r\n"
        await wire.head(200, "application/json", len(body), found)
        await wire.raw(body)

    async def prefilled(wire: Wire, request: Received) -> None:
        tokens = len(request.json()["input_ids"])
        await wire.json(200, REPORT | {"prompt_tokens": tokens, "cached": {"pool": tokens // 16 * 16}})

    worker.script("/pd/prefill", *[prefilled] * 20)
    worker.script("/get_server_info", *[script] * 20)
    worker.script("/generate", *[generate] * 20)


def test_a_cluster_that_is_well_a_fault_in_it_and_one_that_is_away(tmp_path: Path) -> None:
    node = RealNode(tmp_path, capacity="16MiB").start()

    async def main() -> None:
        async with disagg() as (harness, [prefill], [decode]):
            for worker in (prefill, decode):
                worker.info |= {"tokenizer": "t", "chat_template": "c"}
                serves(worker, node)
            asked = ("--json", "--router", harness.url)
            status, said = await doctor(*asked)
            found = levels(said)
            assert {check: level for check, level in found.items() if level == "fail"} == {}, said
            assert {"pool node", "tokenizer", "live probe", "UCX", "/dev/shm", "open files"} <= set(found)
            assert status == json.loads(said)["status"] == (1 if "warn" in found.values() else 0)

            decode.info["chat_template"] = "d"
            node.stop()
            status, said = await doctor(*asked)
            assert status == 2
            failed = {c for c, level in levels(said).items() if level == "fail"}
            # no decode worker is left for the probe once the router has refused it
            assert failed - {"live probe"} == {"chat template", "pool node"}
        status, said = await doctor("--router", harness.url)
        assert status >= 1
        assert "nothing answers" in said

    try:
        run(main(), timeout_s=280)
    finally:
        node.stop()


def test_what_workers_say_becomes_facts() -> None:
    info = {"role": "decode", "model": "m", "page_size": 64, "namespace": "n", "context_length": 4096}
    told = {**SERVER, "hicache_size": 1, "hicache_storage_backend_extra_config": "{}"}
    worker = cluster.worker_of("u", {"ready": True, "pool": "up"}, info, told, 0.0)
    assert not worker.has_storage
    assert (worker.host_tokens, worker.prefetch_threshold) == (0, 256)  # SGLang's own threshold
    page = PoolNode(address="a", page_bytes={"n": 10**6})
    assert cluster.with_host_tokens(worker, [page]).host_tokens == 64_000
    by_ratio = cluster.worker_of("u", {}, info, SERVER, 0.0)
    assert cluster.with_host_tokens(by_ratio, [page]).host_tokens == 80_000


def test_fingerprints_tell_tokenizers_and_templates_apart() -> None:
    class Tokenizer:
        chat_template: str | None = None

        def __init__(self, shift: int) -> None:
            self.shift = shift

        def encode(self, text: str) -> list[int]:
            return [ord(c) + self.shift for c in text]

        def __len__(self) -> int:
            return 100

    one, same, other = Tokenizer(0), Tokenizer(0), Tokenizer(1)
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(same) != tokenizer_fingerprint(other)
    assert chat_template_fingerprint(one, None) == "none"
    one.chat_template, same.chat_template = "a", "b"
    said = {chat_template_fingerprint(one, None), chat_template_fingerprint(same, None)}
    assert len(said | {chat_template_fingerprint(one, "chatml")}) == 3
