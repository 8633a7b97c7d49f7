"""Sessions of coding agents by AIPerf, the tool that others measure with: its `synthesize agentic-code` makes
them, and its `profile` sends them to each contender in turn. `--trace` replays what a router recorded
(`trace.file`), or any trace in Mooncake's format, in place of them.

Lengths and delays are divided by `--shrink`; what shares a prefix shares it still. AIPerf needs an
environment of its own, as its versions of packages are not ours: `python -m venv DIR`, `DIR/bin/pip install
aiperf`, and `--aiperf DIR/bin/aiperf`.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import msgspec
import typer

from benchmarks.lib.cluster import ExtraArgs, ModelOption, PoolCapacityOption, launched, settings_of
from benchmarks.lib.report import FormatOption, OutOption, Output, Table, ms, say, script, times
from tests.support.processes import HarnessError

BLOCK_TOKENS: Final = 512  # of AIPerf's traces
LIMIT_S: Final = 1800.0
FIGURES: Final = {
    "first_token_ms": ("time_to_first_token", "p50"),
    "first_token_p90_ms": ("time_to_first_token", "p90"),
    "inter_token_ms": ("inter_token_latency", "p50"),
    "cached_percent": ("overall_usage_prompt_cache_read_pct", "avg"),
    "requests": ("request_count", "avg"),
    "failed": ("error_request_count", "avg"),
    "duration_s": ("benchmark_duration", "avg"),
}
"""Ours, and where AIPerf's `profile_export_aiperf.json` has it."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One contender in one round, as AIPerf says it."""

    contender: str
    round: int
    first_token_ms: float
    first_token_p90_ms: float
    inter_token_ms: float
    cached_percent: float
    requests: float
    failed: float
    duration_s: float


def main(
    aiperf: Annotated[Path, typer.Option(help="The program.")],
    model: ModelOption,
    against: Annotated[str, typer.Option(help="Contenders; ratios are over the first.")] = "plain,agg",
    recorded: Annotated[Path | None, typer.Option("--trace", help="Replay this trace's sessions.")] = None,
    sessions: Annotated[int, typer.Option(min=1, help="Conversations that are made.")] = 6,
    shrink: Annotated[int, typer.Option(min=1, help="Divides lengths and delays.")] = 32,
    longest: Annotated[int, typer.Option(min=1, help="Longest prompt, before it is divided.")] = 100_000,
    concurrency: Annotated[int, typer.Option(min=1, help="Conversations at a time.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; results are medians.")] = 2,
    device_tokens: Annotated[int, typer.Option(min=1, help="The device's cache of a worker.")] = 8192,
    pool_capacity: PoolCapacityOption = "2GiB",
    seed: Annotated[int, typer.Option(min=0, help="Of the sessions.")] = 1,
    out: OutOption = None,
    format: FormatOption = "text",
    extra: ExtraArgs = None,
) -> None:
    load = f"agentic-code, {sessions} sessions" if recorded is None else f"trace {recorded.name}"
    title = f"{load}, divided by {shrink}, {concurrency} at a time"
    output = Output(format, load=title, model=model.name, seed=seed, against=against)
    found: list[Measured] = []
    with settings_of(model, device_tokens, extra, out, pool_capacity=pool_capacity) as settings:
        for number in range(rounds):
            names = against.split(",")
            for name in names if number % 2 == 0 else reversed(names):
                work = settings.directory / f"round-{number}-{name}"
                work.mkdir(parents=True, exist_ok=True)
                made = recorded or _made(aiperf, work, sessions, longest, seed + number)
                trace = _shrunk(made, work / "trace.jsonl", shrink)
                say(f"round {number + 1}: {name}")
                with launched(name, settings) as cluster:
                    report = _profile(aiperf, work, cluster.url, settings.model, trace, shrink, concurrency)
                found.append(Measured(contender=name, round=number, **figures_of(report)))
                output.row(found[-1])
    output.show(table_of(found, f"{title}, {model.name}"))


def _made(aiperf: Path, work: Path, sessions: int, longest: int, seed: int) -> Path:
    """A trace of AIPerf's."""
    words = ("synthesize", "agentic-code", "--num-sessions", sessions, "--max-isl", longest, "--seed", seed)
    _run(aiperf, work, *words, "--output", work / "made")
    (made,) = (work / "made").glob("*/dataset.jsonl")
    return made


def _shrunk(trace: Path, shrunk: Path, shrink: int) -> Path:
    """The trace with shorter lengths and delays."""
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    shrunk.write_text("".join(json.dumps(shrunk_line(line, shrink)) + "\n" for line in lines))
    return shrunk


def shrunk_line(line: dict[str, Any], shrink: int) -> dict[str, Any]:
    """A line with lengths and delays divided; each block of the prompt keeps its name."""
    length = max(1, line["input_length"] // shrink)
    blocks = line["hash_ids"][: math.ceil(length / (BLOCK_TOKENS // shrink))]
    times = {name: line[name] / shrink for name in ("timestamp", "delay") if line.get(name) is not None}
    output = max(2, line["output_length"] // shrink)
    return {**line, **times, "input_length": length, "output_length": output, "hash_ids": blocks}


def _profile(
    aiperf: Path, work: Path, url: str, model: Path, trace: Path, shrink: int, concurrency: int
) -> dict[str, Any]:
    """AIPerf's report."""
    _run(
        aiperf,
        work,
        *("profile", "--url", url, "--model", model.name, "--tokenizer", _in_a_hub(model, work)),
        *("--endpoint-type", "chat", "--streaming", "--use-server-token-count"),
        *("--input-file", trace, "--custom-dataset-type", "mooncake-trace", "--no-fixed-schedule"),
        *("--isl-block-size", BLOCK_TOKENS // shrink, "--concurrency", concurrency),
        *("--session-header", "x-session-id", "--extra-inputs", "ignore_eos:true"),
        *("--ui", "none", "--output-artifact-dir", work / "artifacts"),
    )
    report = next((work / "artifacts").rglob("profile_export_aiperf.json"), None)
    if report is None:
        raise HarnessError(f"aiperf left no profile_export_aiperf.json in {work / 'artifacts'}")
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def _in_a_hub(model: Path, work: Path) -> str:
    """The name of this directory in a cache of Hugging Face's hub below `work`: the processes of AIPerf 0.13
    that make prompts take no path.
    """
    cached = work / "hub/models--local--model"
    (cached / "snapshots").mkdir(parents=True)
    (cached / "snapshots/main").symlink_to(model)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("main")
    return "local/model"


def _run(aiperf: Path, work: Path, *words: object) -> None:
    log = work / f"{words[0]}.log"
    with log.open("wb") as lines:
        try:
            ended = subprocess.run(
                [aiperf, *map(str, words)],
                env={**os.environ, "HF_HUB_CACHE": str(work / "hub"), "HF_HUB_OFFLINE": "1"},
                stdout=lines,
                stderr=lines,
                check=False,
                timeout=LIMIT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise HarnessError(f"{aiperf} {words[0]}: {error}") from error
    if ended.returncode:
        last = log.read_text(errors="replace").splitlines()[-12:]
        raise HarnessError("\n".join([f"{aiperf} {words[0]} ended with status {ended.returncode}:", *last]))


def figures_of(report: dict[str, Any]) -> dict[str, float]:
    """FIGURES of a report; what it does not have is 0."""
    return {ours: float((report.get(name) or {}).get(which) or 0) for ours, (name, which) in FIGURES.items()}


def table_of(found: Sequence[Measured], title: str) -> Table:
    """Medians of each contender, and its first token over the first one's in the same round."""
    base = {one.round: one for one in found if one.contender == found[0].contender}
    rows = []
    for name in dict.fromkeys(one.contender for one in found):
        its = [one for one in found if one.contender == name]
        ratio = median(one.first_token_ms / base[one.round].first_token_ms for one in its)
        cells = (median(getattr(one, field) for one in its) for field in list(FIGURES)[:3])
        cached = f"{median(one.cached_percent for one in its):.0f}%"
        counts = f"{sum(one.requests for one in its):.0f}", f"{sum(one.failed for one in its):.0f}"
        rows.append((name, *map(ms, cells), times(ratio), cached, *counts))
    columns = ("contender", "first token p50, ms", "p90", "inter-token", "first token over", "cached")
    return Table(title, (*columns, "requests", "failed"), [*rows], left=("contender",))


if __name__ == "__main__":
    script(main, __doc__)
