"""Requests one at a time through a disaggregated cluster of our own, with what router and workers say of
each.
"""

from __future__ import annotations

import time
import tomllib
from pathlib import Path
from typing import Final

import httpx
import msgspec

from benchmarks.serving.cluster import launched
from benchmarks.serving.compare import warm_up
from benchmarks.serving.contenders import Setting, trace_path
from benchmarks.serving.load.plan import Shape, make_load
from benchmarks.serving.load.records import Record
from benchmarks.serving.load.run import Say, Server, run_load
from benchmarks.serving.parts import WORKER_PARTS, Interval, Sample, part_sums
from benchmarks.stores import BenchError
from pdserve.kvpool.hicache.page_trace import PageSpan
from pdserve.router.request.timing import parse_timing

ROLES: Final = ("prefill", "decode")
SETTLE_S: Final = 1.0  # after each request: its pages are written back, and belong to no other


def weights(
    shape: Shape, seed: int, setting: Setting, say: Say, silence_s: float
) -> tuple[list[Sample], list[str]]:
    """Start a cluster, send the load one ask at a time, stop it: a sample for each ask that was answered, and
    what went wrong with the others. Raises BenchError.
    """
    with launched("disagg", setting) as url:
        server = Server(url, silence_s=silence_s)
        warm_up(server, shape)
        workers = _Workers(Path(setting.directory) / "disagg")
        run = run_load(server, make_load(shape, seed), say, concurrency=1, lockstep=True, watch=workers.note)
        workers.close()
        spans = {role: _spans(Path(trace_path(setting, "disagg", role))) for role in ROLES}
    samples = [
        _sample(record, workers.parts(record), spans, run.began_at_s)
        for record in run.records
        if record.first_token_s is not None
    ]
    return samples, [f"{one.error} {one.detail}".strip() for one in run.records if one.error]


class _Workers:
    """Reads what the workers of a cluster count, after each request."""

    def __init__(self, directory: Path) -> None:
        self._http = httpx.Client(trust_env=False, timeout=30.0)
        self._urls = {role: _worker_url(directory / f"{role}0.toml") for role in ROLES}
        self._before = {role: self._read(role) for role in ROLES}
        self._parts: dict[tuple[int, int], dict[str, dict[str, float]]] = {}

    def note(self, record: Record) -> None:
        """A request was answered: what has been counted since the last one is its."""
        time.sleep(SETTLE_S)  # nothing else runs in this client
        after = {role: self._read(role) for role in ROLES}
        self._parts[record.session, record.turn] = {
            role: {
                part: round(1e3 * (after[role].get(part, 0.0) - self._before[role].get(part, 0.0)), 3)
                for part in WORKER_PARTS
            }
            for role in ROLES
        }
        self._before = after

    def parts(self, record: Record) -> dict[str, dict[str, float]]:
        return self._parts[record.session, record.turn]

    def close(self) -> None:
        self._http.close()

    def _read(self, role: str) -> dict[str, float]:
        try:
            answer = self._http.get(f"{self._urls[role]}/metrics")
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise BenchError(f"the {role} worker's /metrics cannot be read: {error}") from error
        return part_sums(answer.text)


def _worker_url(config: Path) -> str:
    engine = tomllib.loads(config.read_text())["engine"]
    return f"http://{engine['host']}:{engine['port']}"


def _spans(path: Path) -> list[PageSpan]:
    decoder = msgspec.json.Decoder(PageSpan)
    return [decoder.decode(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def _sample(
    record: Record, parts: dict[str, dict[str, float]], spans: dict[str, list[PageSpan]], began_at_s: float
) -> Sample:
    assert record.first_token_s is not None, "failed ones were refused"
    sent_s, first_ms = began_at_s + record.sent_s, 1e3 * record.first_token_s

    def moved(role: str, what: str) -> list[Interval]:
        times = (
            (1e3 * (span.start_s - sent_s), 1e3 * (span.end_s - sent_s))
            for span in spans[role]
            if span.what == what
        )
        return [(round(start, 3), round(end, 3)) for start, end in times if 0 <= start <= first_ms]

    return Sample(
        turn=record.turn,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached.total,
        first_token_ms=round(first_ms, 3),
        router=parse_timing(record.server_timing),
        prefill=parts["prefill"],
        decode=parts["decode"],
        puts=moved("prefill", "put"),
        gets=moved("decode", "get"),
    )
