"""A model served on this machine: alone, with the pool, disaggregated; the same answers each time."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu_check.answers import Answer, difference
from benchmarks.gpu_check.place import Place, output_of
from benchmarks.gpu_check.workers import Server, running
from benchmarks.node_processes import NodeProcess, pool_of
from benchmarks.processes import free_ports
from benchmarks.stores import BenchError

PAGE_TOKENS: Final = 64
NEW_TOKENS: Final = 8
LENGTHS: Final = (63, 64, 65, 200, 640, 1000, 1999)
CONTEXT_TOKENS: Final = 4096
IDLE_S: Final = 30.0
BENCH_S: Final = 200.0
_SHARE: Final = 0.3  # of the GPU's memory, for each of two workers
_TOKENS: Final = range(200, 1200)  # ids that every vocabulary has, none of them special


def steps(place: Place) -> Iterator[tuple[str, Callable[[], str]]]:
    """See `checks.GROUPS`. Servers live from the step that starts them to the end of the last one."""
    with ExitStack() as stack:
        serving = _Serving(place, stack)
        yield "plain", serving.plain
        yield "cold", serving.cold
        yield "device hit", serving.device_hit
        yield "pool hit", serving.pool_hit
        yield "kill -9", serving.killed
        yield "disaggregated", serving.disaggregated
        yield "prefill killed", serving.prefill_killed
        yield "bench multiturn", serving.multiturn


def gap_steps(place: Place) -> Iterator[tuple[str, Callable[[], str]]]:
    """See `checks.GROUPS`."""
    yield "bench gaps", lambda: _gaps(place)


class _Serving:
    def __init__(self, place: Place, stack: ExitStack) -> None:
        self._place = place
        self._stack = stack
        dice = random.Random(7)
        self._prompts = [[dice.choice(_TOKENS) for _ in range(length)] for length in LENGTHS]
        self._wanted: list[Answer] = []
        self._worker: Server | None = None
        self._disagg: tuple[Server, Server, Server] | None = None
        self._nodes: Sequence[NodeProcess] = ()

    def plain(self) -> str:
        server = self._server("plain", "agg", {"storage": "none"})
        with running(server):
            self._wanted = [server.generate(prompt, NEW_TOKENS) for prompt in self._prompts]
        others = [*self._wanted[1:], self._wanted[0]]
        if not all(map(difference, self._wanted, others)):  # else no wrong page would show
            raise BenchError("SGLang gives the same answer to different prompts")
        return f"{len(self._prompts)} prompts, each with an answer of its own"

    def cold(self) -> str:
        directory = Path(self._place.directory)
        settings = {"capacity_bytes": "1GiB", "slab_bytes": "32MiB", "keep": False}
        self._nodes = self._stack.enter_context(pool_of(1, directory, settings))
        self._worker = self._server("agg", "agg", self._pool())
        self._reaper = self._stack.enter_context(running(self._worker))
        return self._ask(self._worker)

    def device_hit(self) -> str:
        return self._ask(self._running, "device")

    def pool_hit(self) -> str:
        worker = self._running
        deadline_s = time.monotonic() + IDLE_S
        while not worker.flush():  # pages are on their way
            if time.monotonic() > deadline_s:
                raise BenchError(f"the worker was not idle within {IDLE_S:.0f} s")
            time.sleep(0.1)
        return self._ask(worker, "storage")

    def killed(self) -> str:
        worker = self._running
        worker.kill()
        self._reaper.close()  # and what it had started
        self._reaper = self._stack.enter_context(running(worker))
        said = self._ask(worker, "storage")
        worker.close()
        return said

    def disaggregated(self) -> str:
        if not self._nodes:
            raise BenchError("there is no pool node")
        if self._worker is not None:
            self._worker.close()  # its memory is needed
        prefill = self._server("prefill", "prefill", self._pool())
        decode = self._server("decode", "decode", self._pool())
        self._stack.enter_context(running(prefill, decode))
        (port,) = free_ports(1)
        config: dict[str, Any] = {"port": port, "prefill": [prefill.url], "decode": [decode.url]}
        config["min_prefill_tokens"] = 0  # short prompts, too, go through both
        router = Server("router", "router", config, Path(self._place.directory), port)
        self._stack.enter_context(running(router))
        self._disagg = prefill, decode, router
        return self._ask(router, "storage")

    def prefill_killed(self) -> str:
        prefill, _, router = self._three
        prefill.kill()
        return self._ask(router)

    def multiturn(self) -> str:
        *_, router = self._three
        load = ("--scale", "0.05", "--users", "4", "--rounds", "3", "--output-tokens", "16", "--json")
        said = _pdserve("bench", "multiturn", router.url, *load)
        outcome = json.loads(said.splitlines()[-1])
        asks = outcome["all"]
        if asks["failed"]:
            raise BenchError(f"{asks['failed']} of {asks['asks']} asks failed")
        return f"{asks['asks']} asks answered"

    @property
    def _running(self) -> Server:
        if self._worker is None or not self._worker.runs:
            raise BenchError("its worker did not start")
        return self._worker

    @property
    def _three(self) -> tuple[Server, Server, Server]:
        if self._disagg is None:
            raise BenchError("its workers did not start")
        return self._disagg

    def _ask(self, server: Server, found_in: str = "") -> str:
        """Ask for all prompts. `found_in`: where the pages of each must have been. Raises BenchError."""
        if not self._wanted:
            raise BenchError("SGLang alone did not answer")
        places: dict[str, int] = {}
        for prompt, wanted in zip(self._prompts, self._wanted, strict=True):
            got = server.generate(prompt, NEW_TOKENS)
            if said := difference(wanted, got):
                raise BenchError(f"prompt of {len(prompt)} tokens: {said}")
            pages = (len(prompt) - 1) // PAGE_TOKENS
            if found_in and got.found.get(found_in, 0) < pages * PAGE_TOKENS:
                raise BenchError(
                    f"prompt of {len(prompt)} tokens: {got.found} were cached, not all in {found_in}"
                )
            for name, count in got.found.items():
                places[name] = places.get(name, 0) + count
        total = sum(map(len, self._prompts))
        found = ", ".join(f"{count} from {name}" for name, count in places.items() if count)
        return (
            f"{len(self._prompts)} answers as SGLang alone; of {total} tokens {found or 'none were cached'}"
        )

    def _pool(self) -> dict[str, Any]:
        return {"pool": {"nodes": [{"node": one.name, "address": one.address} for one in self._nodes]}}

    def _server(self, name: str, role: str, more: dict[str, Any]) -> Server:
        place = self._place
        (port,) = free_ports(1)
        engine: dict[str, Any] = {
            "model_path": place.model,
            "port": port,
            "device": place.device,
            "page_size": PAGE_TOKENS,
            "context_length": CONTEXT_TOKENS,
            "max_total_tokens": 4 * CONTEXT_TOKENS,
            "hicache_ratio": 2.0,
            "dtype": "float32" if place.device == "cpu" else "bfloat16",
        }
        if place.device == "cuda":
            engine["mem_fraction"] = _SHARE
        config = {"insecure": True, **more, "engine": engine}
        return Server(name, role, config, Path(place.directory), port)


def _gaps(place: Place) -> str:
    load = ("--tokens", "2000", "--output-tokens", "100", "--rounds", "1", "--model", place.model)
    said = _pdserve("bench", "gaps", *load, "--out", f"{place.directory}/gaps", "--json")
    found = [row for row in map(json.loads, said.splitlines()) if "p99_over_alone" in row]
    return "; ".join(
        f"{row['contender']} {row['beside']}: p50 {row['p50_ms']:.1f} ms, p99 {row['p99_ms']:.1f} ms"
        for row in found
    )


def _pdserve(*words: str) -> str:
    return output_of([sys.executable, "-m", "pdserve", *words], BENCH_S, {**os.environ, "OPENAI_API_KEY": ""})
