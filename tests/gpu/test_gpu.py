"""Pages between GPU, host memory and pool; UCX's transports; a model served alone, with the pool, and
disaggregated.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import pytest

from benchmarks.peers import ucx_perftest_gbps
from pdserve.engine.device import Device
from pdserve.engine.sglang import selfcheck
from pdserve.kvpool.transports.ucx import libucx_root, ucx_options
from pdserve.pages import KV, namespace_seed, page_hashes
from pdserve.settings.config_file import to_toml
from tests.support.e2e.cluster import Process, pdserve
from tests.support.kvpool.node_processes import NodeProcess, client_of, memory_dir, pool_of
from tests.support.processes import free_ports
from tests.support.random_model import make_random_model
from tests.support.sglang_symbols import TABLE, misfits

pytestmark = pytest.mark.timeout(600)

COPIES: Final = [("page_first", "kernel"), ("page_first_direct", "direct"), ("layer_first", "kernel")]
PAGE_TOKENS: Final = 64
NEW_TOKENS: Final = 8
LENGTHS: Final = (63, 64, 65, 200, 640, 1000, 1999)
CONTEXT_TOKENS: Final = 4096
SHARE: Final = 0.3  # of the GPU's memory, for each of two workers
TIE: Final = 0.1
"""A second token whose log-probability is so close is as likely."""
NOISE: Final = 0.25
"""So far may the log-probability of one token be apart: a GPU adds numbers in another order when more is
cached.
"""


@pytest.fixture(scope="module")
def sglang_ready(device: Device) -> None:
    from pdserve.engine.sglang import prepare

    prepare.choose(device)
    with prepare.without_gc():
        prepare.load_plugins()


def test_the_installed_sglang_has_all_that_pdserve_leans_on(sglang_ready: None) -> None:
    selfcheck.check()
    assert list(misfits(TABLE.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("extra_key", "cache_salt", "pairs"),
    [(None, None, False), ("tenant", "sält", False), (None, None, True)],
)
def test_page_hashes_are_sglangs(
    extra_key: str | None, cache_salt: str | None, pairs: bool, sglang_ready: None
) -> None:
    from sglang.srt.mem_cache import utils
    from sglang.srt.mem_cache.radix_cache import RadixKey

    tokens = [(7919 * i) % 150_000 for i in range(3 * 16 + pairs)]
    key = RadixKey(array("q", tokens), is_bigram=pairs)
    theirs = utils.get_hash_str(key, utils.storage_namespace_seed(extra_key, cache_salt), page_size=16)
    seed = namespace_seed(extra_key, cache_salt)
    assert theirs == [digest.hex() for digest in page_hashes(tokens, 16, seed, pairs=pairs)]


@pytest.mark.parametrize(("layout", "io_backend"), COPIES)
def test_hicache_copies_pages_to_host_memory_and_back(
    device: Device, sglang_ready: None, layout: str, io_backend: str
) -> None:
    if device == "cpu" and io_backend == "kernel":
        pytest.skip("a CPU has no kernel that copies")
    from tests.gpu.device_pages import DevicePages

    pages = DevicePages(device, layout, io_backend)
    pages.to_host()
    pages.forget_device()
    pages.from_host()
    pages.check()


def test_pages_of_the_device_come_back_from_a_pool_node(
    device: Device, sglang_ready: None, tmp_path: Path
) -> None:
    from tests.gpu.device_pages import KEYS, DevicePages

    layout, io_backend = ("page_first_direct", "direct") if device == "cpu" else ("page_first", "kernel")
    pages = DevicePages(device, layout, io_backend)
    settings = {"capacity_bytes": 256 << 20, "keep": False}
    with pool_of(1, tmp_path, settings) as nodes, pages.in_pool(client_of(nodes)) as access:
        pages.to_host()
        assert all(access.put(KV, KEYS, pages.host_indices))
        pages.forget_device()
        pages.host.kv_buffer.zero_()
        assert all(access.get(KV, KEYS, pages.host_indices))
        pages.from_host()
        pages.check()


@pytest.mark.parametrize("transport", ["", "cuda_copy", "cuda_ipc", "gdr_copy"])
def test_ucx_moves_memory_of_host_and_gpu(device: Device, transport: str) -> None:
    root = libucx_root()
    info = subprocess.run(
        [root / "bin/ucx_info", "-d"], env={**os.environ, "LD_LIBRARY_PATH": str(root / "lib")},
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    there = re.findall(r"Transport: (\S+)", info.stdout)
    if transport and (transport not in there or device == "cpu"):
        pytest.skip(f"UCX sees no {transport}, or there is no memory of a GPU")
    settings = ucx_options({})
    if transport:
        settings["TLS"] = ",".join(dict.fromkeys(["tcp", "self", "cuda_copy", transport]))
    gbps = ucx_perftest_gbps(
        1 << 20, settings, runs=1, move_bytes=2 * 10**9, memory="cuda" if transport else "host"
    )
    print(f"{transport or 'host memory'}: {gbps:.2f} GB/s")
    assert gbps > 0


# --- a model that is served


class Answer(NamedTuple):
    """A greedy answer: its tokens, the log-probability of each, the second likeliest of each place with its
    own, and how many tokens of the prompt were found in which place.
    """

    tokens: list[int]
    logprobs: list[float]
    seconds: list[tuple[int, float]]
    found: dict[str, int]


def same(wanted: Answer, found: Answer) -> bool:
    """Whether all is as wanted, up to the first tie that went the other way."""
    for place, (token, other) in enumerate(zip(wanted.tokens, found.tokens, strict=True)):
        if token != other:
            second, logprob = wanted.seconds[place]
            return other == second and wanted.logprobs[place] - logprob <= TIE
        if abs(wanted.logprobs[place] - found.logprobs[place]) > NOISE:
            return False
    return True


class Server:
    """`pdserve ROLE` with these settings."""

    def __init__(self, name: str, role: str, config: dict[str, Any], directory: Path, port: int) -> None:
        file = directory / f"{name}.toml"
        file.write_text(to_toml(config))
        self.process = Process(name, pdserve(role, "--config", str(file)), directory / f"{name}.log", {})
        self.url = f"http://127.0.0.1:{port}"
        self._ready = f"{self.url}{'/ready' if role == 'router' else '/pd/ready'}"

    def start(self) -> Server:
        self.process.start().wait_ready(self._answers)
        return self

    def _answers(self) -> bool:
        try:
            return httpx.get(self._ready, timeout=5.0, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def generate(self, prompt: list[int]) -> Answer:
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        body = {
            "input_ids": prompt,
            "sampling_params": sampling,
            "return_logprob": True,
            "top_logprobs_num": 2,
        }
        answer = httpx.post(f"{self.url}/generate", json=body, timeout=120.0, trust_env=False)
        assert answer.status_code == 200, answer.text
        meta = answer.json()["meta_info"]
        pairs = meta["output_token_logprobs"]
        found = {k: n for k, n in (meta.get("cached_tokens_details") or {}).items() if isinstance(n, int)}
        seconds = [(top[1][1], top[1][0]) for top in meta["output_top_logprobs"]]
        return Answer([pair[1] for pair in pairs], [pair[0] for pair in pairs], seconds, found)


class Bench:
    """Servers on this machine, and the answers of SGLang alone."""

    def __init__(self, device: Device, model: Path, directory: Path, node: NodeProcess) -> None:
        self._device, self._model, self._directory = device, model, directory
        self._pool = {"pool": {"nodes": [{"node": node.name, "address": node.address}]}}
        draw = random.Random(7)
        self.prompts = [[draw.randrange(200, 1200) for _ in range(length)] for length in LENGTHS]
        self.wanted: list[Answer] = []

    def server(self, name: str, role: str, *, alone: bool = False) -> Server:
        (port,) = free_ports(1)
        engine: dict[str, Any] = {
            "model_path": str(self._model),
            "port": port,
            "device": self._device,
            "page_size": PAGE_TOKENS,
            "max_total_tokens": 4 * CONTEXT_TOKENS,
            "hicache_ratio": 2.0,
            "dtype": "float32" if self._device == "cpu" else "bfloat16",
            "extra_args": ["--context-length", str(CONTEXT_TOKENS)],
        }
        engine["extra_args"] += os.environ.get("PDSERVE_GPU_ARGS", "").split()
        if self._device == "cuda":
            engine["extra_args"] += ["--mem-fraction-static", str(SHARE)]
        more = {"storage": "none"} if alone else self._pool
        return Server(name, role, {"insecure": True, **more, "engine": engine}, self._directory, port)

    def router(self, prefill: Server, decode: Server) -> Server:
        (port,) = free_ports(1)
        config = {"port": port, "prefill": [prefill.url], "decode": [decode.url], "min_prefill_tokens": 0}
        return Server("router", "router", config, self._directory, port)

    def check(self, server: Server, found_in: str = "") -> None:
        """It answers as SGLang alone. `found_in`: where the pages of each prompt must have been."""
        for prompt, wanted in zip(self.prompts, self.wanted, strict=True):
            got = server.generate(prompt)
            assert same(wanted, got), f"prompt of {len(prompt)} tokens"
            pages = (len(prompt) - 1) // PAGE_TOKENS
            if found_in:
                assert got.found.get(found_in, 0) >= pages * PAGE_TOKENS, (len(prompt), got.found)


@pytest.fixture
def bench(device: Device, tmp_path: Path) -> Iterator[Bench]:
    model = Path(os.environ.get("PDSERVE_GPU_MODEL", tmp_path / "model"))
    if not model.exists():
        make_random_model("small", model)
    settings = {"capacity_bytes": 1 << 30, "keep": False}
    assert memory_dir() is not None
    with pool_of(1, tmp_path, settings) as (node,):
        yield Bench(device, model, tmp_path, node)


def test_a_worker_with_the_pool_and_a_disaggregated_cluster_answer_as_sglang_alone(bench: Bench) -> None:
    plain = bench.server("plain", "agg", alone=True).start()
    bench.wanted = [plain.generate(prompt) for prompt in bench.prompts]
    plain.process.stop()
    assert not all(map(same, bench.wanted, [*bench.wanted[1:], bench.wanted[0]])), "no wrong page would show"
    worker = bench.server("agg", "agg").start()
    bench.check(worker)
    bench.check(worker, "device")
    deadline_s = time.monotonic() + 30
    while (
        httpx.post(f"{worker.url}/flush_cache", trust_env=False).status_code != 200
    ):  # pages are on their way
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    bench.check(worker, "storage")
    worker.process.kill()
    worker.process.end()
    bench.check(worker.start(), "storage")
    worker.process.stop()
    prefill, decode = bench.server("prefill", "prefill").start(), bench.server("decode", "decode").start()
    router = bench.router(prefill, decode).start()
    try:
        bench.check(router, "storage")
        prefill.process.kill()
        bench.check(router)
    finally:
        for server in (router, decode, prefill):
            server.process.stop()
