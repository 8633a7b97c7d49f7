"""The block of eight results in README.md, and the list of kept runs in docs/benchmarks/index.md."""

from __future__ import annotations

from collections.abc import Iterator

from docs.generate.benchmarks import pool, router
from docs.generate.benchmarks.results import kinds as kept_kinds
from docs.generate.benchmarks.results import met, runs, spread
from docs.generate.benchmarks.serving import goal_list
from docs.generate.markdown import table
from docs.generate.product import GoalRow

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


def eight_results() -> str:
    """What was measured, its goal, and whether the goal is met."""
    rows = [_serving_row(*words, found=goal_list()) for words in SERVING]
    rows += [*_pool_rows(), _router_row()]
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
