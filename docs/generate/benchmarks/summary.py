"""The block of results in README.md, and the list of kept runs in docs/benchmarks/index.md."""

from __future__ import annotations

from collections.abc import Iterator

from docs.generate.benchmarks import pool, router
from docs.generate.benchmarks.results import kinds as kept_kinds
from docs.generate.benchmarks.results import met, runs, spread
from docs.generate.benchmarks.serving import goal_list
from docs.generate.markdown import table
from docs.generate.product import HOSTILE_MEMORY, HOSTILE_P99, GoalRow

COMPARISONS = ("compare-small", "compare-large")
"""Those of the shipped defaults."""
SERVING = (
    ("tokens/s ≥", "long-input", "agg", "Long conversations, from turn 2: prompt tokens/s over plain SGLang"),
    (
        "over plain: first token",
        "long-input",
        "disagg",
        "Long conversations, from turn 2: first token over plain SGLang",
    ),
    ("tokens/s ≥", "eic", "agg", "Short conversations, from turn 2: prompt tokens/s over plain SGLang"),
    (
        "over the file backend",
        "long-input",
        "disagg",
        "Long conversations: first token over SGLang's file backend",
    ),
    ("over agg", "no-reuse", "disagg", "Nothing is cached: first token, disaggregated over aggregated"),
)
"""Words of the goal, the load and the server; then what the row is called."""


def readme_results() -> str:
    """What was measured, its goal, and whether the goal is met."""
    goals = goal_list(names=COMPARISONS)
    rows = [_serving_row(*words, found=goals) for words in SERVING]
    rows += [*_pool_rows(), *_beside_rows(), *_hostile_rows(), _router_row()]
    return table(("measured", "server", "goal", "result", "met"), rows)


def _serving_row(goal: str, load: str, server: str, title: str, *, found: list[GoalRow]) -> tuple[str, ...]:
    row = next(
        row for row in found if goal in row.goal and row.load.startswith(load) and row.contender == server
    )
    bound = row.goal[max(row.goal.find("≤"), row.goal.find("≥")) :]
    return title, server, bound, row.measured.partition(" (")[0], met(row.met)


def _pool_rows() -> Iterator[tuple[str, ...]]:
    run = runs("pool")[0]
    found = pool.same_host(run, "get_over_memcpy")
    yield (
        "Read of pages of 1 MiB and more, same host, over `memcpy`",
        "pool",
        "≥ 0.85 ×",
        f"{spread(found)} ×",
        met(min(found) >= 0.85),
    )
    found = pool.over_perftest(run, "get_gbps")
    yield (
        "The same over UCX and TCP, over `ucx_perftest`",
        "pool",
        "≥ 0.8 ×",
        f"{spread(found)} ×",
        met(min(found) >= 0.8),
    )


def _beside_rows() -> Iterator[tuple[str, ...]]:
    lines = [
        line
        for run in runs("beside")
        for line in run.lines
        if line["way"] == "mover" and line["beside"] != "none" and line["batch_pages"] == 128
    ]
    found = [line[f"{what}_over_alone"] for line in lines for what in ("get", "put")]
    title = "128 pages of 1 MiB moved beside a busy scheduler thread, over alone"
    yield title, "pool", "≥ 0.8 ×", f"{spread(found)} ×", met(min(found) >= 0.8)
    found = [line[f"{what}_step_p99"] for line in lines for what in ("get", "put")]
    title = "p99 of that thread's steps meanwhile, over no moves"
    yield title, "pool", "≤ 1.2 ×", f"{spread(found)} ×", met(max(found) <= 1.2)


def _hostile_rows() -> Iterator[tuple[str, ...]]:
    lines = [line for line in runs("hostile")[0].lines if line["connections"]]
    servers = ", ".join(dict.fromkeys(line.get("port", "pool").partition(":")[0] for line in lines))
    count = f"{lines[0]['connections']:,}"
    for title, name, goal in (
        (
            f"p99 of honest requests beside {count} hostile connections, over none",
            "p99_over_alone",
            HOSTILE_P99,
        ),
        (f"Memory beside {count} hostile connections, over none", "memory_over_alone", HOSTILE_MEMORY),
    ):
        found = [line[name] for line in lines]
        yield title, servers, f"≤ {goal} ×", f"{spread(found)} ×", met(max(found) <= goal)


def _router_row() -> tuple[str, ...]:
    run = runs("router")[0]
    found = [value for streams in (16, 64) for value in router.requests_over(run, "sglang-router", streams)]
    title = "Requests/s over sglang-router, 16 and 64 connections"
    return title, "router", "≥ 1.5 ×", f"{spread(found)} ×", met(min(found) >= 1.5)


def kept_runs() -> str:
    """Every kept run: what it measured, when, where and from which commit."""
    rows = [
        (
            f"`{run.files[0]}`",
            run.origin["date"][:10],
            run.origin["commit"],
            run.origin.get("machine") or "not kept",
            f"`{run.origin['command']}`",
        )
        for kind in kept_kinds()
        for run in runs(kind)
    ]
    return table(("raw lines", "date", "commit", "machine", "command"), rows)
